# SPDX-License-Identifier: Apache-2.0
"""Real text alone: how well it is continued, and how well it is repeated. Both are measured by NLL only."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from ..sample import Question, Sample
from .building import longest, random_of
from .prose import Prose, python_prose

_CONTINUED_TOKENS = 128
_PASSAGES = 6
_LEAD_WORDS = 8
_REPEATED_WORDS = 32


def continuation(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Plain text, to be continued by the (up to) 128 tokens that come next in its source, with the space before.

    Raises:
        ValueError: the prose has no ``index`` + 1 stretches of that length; samples of one seed share no text.
    """
    words = _stretch("continuation", tokenizer, tokens, _CONTINUED_TOKENS, index, seed, prose or python_prose())
    context = longest(tokenizer, tokens, lambda n: "".join(words[:n]).rstrip(), len(words), "continuation")
    cut = len(context.split())
    space = words[cut - 1][len(words[cut - 1].rstrip()) :]
    behind = [space, *words[cut:]]
    answer = longest(tokenizer, _CONTINUED_TOKENS, lambda n: "".join(behind[:n]).rstrip(), len(behind), "continuation")
    return Sample("continuation", index, context, (Question("", (answer,), metric="none"),), chat=False)


def reconstruction(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Real text, of which six passages spread over it are to be repeated: 32 words, given the 8 before them.

    Raises:
        ValueError: as ``continuation``, or the text is too short for the passages.
    """
    words = _stretch("reconstruction", tokenizer, tokens, 0, index, seed, prose or python_prose())
    context = longest(tokenizer, tokens, lambda n: "".join(words[:n]).rstrip(), len(words), "reconstruction")
    words = words[: len(context.split())]
    share = len(words) // _PASSAGES
    room = share - _LEAD_WORDS - _REPEATED_WORDS
    if room < 0:
        raise ValueError(
            f"tokens: {tokens} is too short for reconstruction, whose passages take about 400; ask for more"
        )
    rng = random_of("reconstruction", tokens, index, seed)
    questions = []
    for passage in range(_PASSAGES):
        start = _unique_start(context, words, [passage * share + i for i in range(room + 1)], rng)
        lead, answer = (
            " ".join("".join(part).split())
            for part in (words[start : start + _LEAD_WORDS], words[start + _LEAD_WORDS :][:_REPEATED_WORDS])
        )
        asked = f'Repeat the text above, word for word, from where it says "{lead}"'
        questions.append(Question(asked, (answer,), lead, metric="none"))
    return Sample("reconstruction", index, context, tuple(questions))


def _unique_start(context: str, words: list[str], starts: list[int], rng: random.Random) -> int:
    """One of the starts whose first words stand in the text once; any, where there is none."""
    flat = " ".join(context.split())
    rng.shuffle(starts)
    for start in starts:
        if flat.count(" ".join("".join(words[start : start + _LEAD_WORDS]).split())) == 1:
            return start
    return starts[0]


def _stretch(
    task: str, tokenizer: Any, tokens: int, more_tokens: int, index: int, seed: int, prose: Prose
) -> list[str]:
    """Words, each with the space or line end behind it, of about ``tokens`` + ``more_tokens`` tokens at least.

    The prose is cut into stretches that begin at a paragraph; a seed puts them in an order.
    """
    starts = prose.starts(tokenizer)
    longest_paragraph = max(b - a for a, b in itertools.pairwise(starts))
    stride = tokens + more_tokens + 2 * longest_paragraph
    slots = starts[-1] // stride
    if index >= slots:
        raise ValueError(
            f"samples: sample {index} of {task}: the text has {slots} stretches of {tokens} tokens; ask for fewer or "
            "shorter samples, or give more text with --text"
        )
    slot = random.Random(f"{task}/{seed}/{tokens}").sample(range(slots), slots)[index]
    first = next(i for i, start in enumerate(starts) if start >= slot * stride)
    last = next(
        (i for i, start in enumerate(starts) if start >= (slot + 1) * stride - longest_paragraph), len(starts) - 1
    )
    return re.findall(r"\S+\s*", "\n".join(prose.paragraphs[first:last]))
