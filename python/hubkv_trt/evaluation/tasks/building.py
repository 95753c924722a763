# SPDX-License-Identifier: Apache-2.0
"""What generators of samples share: their random numbers, and texts of a length given in tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .prose import Prose, sentences

_PIECE_WORDS = 12  # at least, where the paragraph has so many


def random_of(task: str, tokens: int, index: int, seed: int) -> random.Random:
    """Random numbers of one sample."""
    return random.Random(f"{task}/{seed}/{index}/{tokens}")


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a text alone: no begin-of-sequence, no chat template."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def longest(tokenizer: Any, tokens: int, build: Callable[[int], str], most: int, task: str) -> str:
    """The last of ``build(0), ..., build(most)`` that has at most ``tokens`` tokens; they grow.

    Raises:
        ValueError: not even ``build(0)`` fits.
    """
    low, high, best = 0, most, build(0)
    least = count_tokens(tokenizer, best)
    if least > tokens:
        raise ValueError(f"tokens: {tokens} is too short for {task}, whose facts alone take {least}; ask for more")
    while low < high:
        middle = (low + high + 1) // 2
        text = build(middle)
        if count_tokens(tokenizer, text) <= tokens:
            low, best = middle, text
        else:
            high = middle - 1
    return best


def hide(
    tokenizer: Any,
    tokens: int,
    rng: random.Random,
    needles: Sequence[str],
    prose: Prose,
    absent: Iterable[str],
    task: str,
) -> str:
    """A text of ``tokens`` tokens with the needles, in their order, on lines of their own at random depths of prose.

    Args:
        needles: a line or a block of lines each. They stand between paragraphs, never before the first or behind the
            last one, and no two in the same gap unless the text has fewer gaps than needles.
        prose: is repeated where it is shorter than the text.
        absent: words that the filler must not hold.

    Raises:
        ValueError: the needles alone are longer than ``tokens``, or no prose is without the absent words.
    """
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, sorted(absent))) + r")(?!\w)", re.IGNORECASE)
    units, words = [], 0
    for unit in _filler(prose, rng.randrange(len(prose.paragraphs)), pattern):
        units.append(unit)
        words += len(unit)
        if words > tokens:  # no tokenizer needs less than a token a word
            break
    share = 0.88 / len(needles)
    depths = [0.06 + share * (i + rng.random()) for i in range(len(needles))]

    def build(num_words: int) -> str:
        lines: list[str] = []
        left = num_words
        for unit in units:
            if left <= 0:
                break
            lines.append(" ".join(unit[:left]))
            left -= len(unit)
        if left < 0:
            lines[-1] = lines[-1].rstrip(".,:;") + "."
        gaps = [max(1, min(round(depth * len(lines)), len(lines) - 1)) for depth in depths]
        for i in range(1, len(gaps)):  # one gap each, as long as there are some
            gaps[i] = min(max(gaps[i], gaps[i - 1] + 1), max(len(lines) - 1, 1))
        for gap, needle in sorted(zip(gaps, needles, strict=True), key=lambda each: each[0], reverse=True):
            lines.insert(gap, needle)
        return "\n".join(lines)

    return longest(tokenizer, tokens, build, words, task)


def _filler(prose: Prose, first: int, absent: re.Pattern[str]) -> Iterator[list[str]]:
    """Words of one piece after another, without end."""
    while True:
        found = False
        for paragraph in prose.from_paragraph(first):
            for piece in _pieces(paragraph):
                if not absent.search(piece):
                    found = True
                    yield piece.split()
        if not found:
            raise ValueError("text: all of it holds words that answers are made of; give more text with --text")


def _pieces(paragraph: str) -> list[str]:
    """One to a few sentences each: the gaps between them are where needles go."""
    pieces: list[str] = []
    for sentence in sentences(paragraph):
        if pieces and min(len(pieces[-1].split()), len(sentence.split())) < _PIECE_WORDS:
            pieces[-1] += " " + sentence
        else:
            pieces.append(sentence)
    return pieces
