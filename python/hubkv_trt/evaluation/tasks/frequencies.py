# SPDX-License-Identifier: Apache-2.0
"""Counting what is all over the text, after RULER's common and frequent words (arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..sample import Question, Sample
from .building import longest, random_of
from .prose import Prose
from .words import COMMON

_OFTEN = (5, 4, 3)  # of 20 words of a list, those of the three common ones; the other eight take turns
_TURN = 20
_ZIPF = 2.0  # frequency of the k-th word is that of the first over k ** _ZIPF
_CODED = 50
_DRAWS = 20  # of words, until three of them stand out


def common_words(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """A numbered list of words, three of which come again and again. The prose is not used."""
    rng = random_of("common_words", tokens, index, seed)
    shuffled = rng.sample(COMMON, len(COMMON))
    common, others = shuffled[: len(_OFTEN)], itertools.cycle(shuffled[len(_OFTEN) :])
    often = [word for word, times in zip(common, _OFTEN, strict=True) for _ in range(times)]
    words: list[str] = []
    while len(words) <= tokens:
        turn = [*often, *(next(others) for _ in range(_TURN - len(often)))]
        rng.shuffle(turn)
        words += turn
    lines = [f"{i}. {word}" for i, word in enumerate(words, 1)]
    context = longest(tokenizer, tokens, lambda n: "\n".join(lines[:n]), len(lines), "common_words")
    ranked = _ranked(context.split()[1::2])
    if not ranked:
        raise _too_short("common_words", tokens)
    return Sample("common_words", index, context, _questions(ranked, "words", "the list"))


def frequent_words(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Made-up words whose frequencies fall by Zipf's law. The prose is not used."""
    rng = random_of("frequent_words", tokens, index, seed)
    coded = _coded_words(rng, _CODED)
    for _ in range(_DRAWS):
        words = rng.choices(coded, [1 / k**_ZIPF for k in range(1, _CODED + 1)], k=tokens)
        context = longest(tokenizer, tokens, _Joined(words), len(words), "frequent_words")
        ranked = _ranked(context.split())
        if ranked:
            return Sample("frequent_words", index, context, _questions(ranked, "coded words", "the text"))
    raise _too_short("frequent_words", tokens)


class _Joined:
    """The first n words as a text."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def __call__(self, n: int) -> str:
        return " ".join(self._words[:n])


def _questions(ranked: Sequence[str], things: str, where: str) -> tuple[Question, ...]:
    thing = things.removesuffix("s")
    return (
        Question(
            f"Which {thing} appears most often in {where}?",
            (ranked[0],),
            f"The {thing} that appears most often in {where} is",
        ),
        Question(
            f"Which three {things} appear most often in {where}?",
            tuple(ranked[:3]),
            f"The three {things} that appear most often in {where} are",
            metric="all",
            max_tokens=32,
        ),
    )


def _ranked(words: Sequence[str]) -> list[str]:
    """The three most frequent words; none, where they do not stand out."""
    counts = Counter(words).most_common(4)
    if len(counts) < 4 or any(a[1] == b[1] for a, b in itertools.pairwise(counts)):
        return []
    return [word for word, _ in counts[:3]]


def _too_short(task: str, tokens: int) -> ValueError:
    return ValueError(
        f"tokens: {tokens} is too short for {task}: the most frequent words do not stand out; ask for more"
    )


def _coded_words(rng: random.Random, how_many: int) -> list[str]:
    """Different words of three syllables."""
    words: list[str] = []
    while len(words) < how_many:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        if word not in words:
            words.append(word)
    return words
