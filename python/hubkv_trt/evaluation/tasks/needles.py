# SPDX-License-Identifier: Apache-2.0
"""Facts of one line hidden in prose, after RULER's needle-in-a-haystack tasks (arXiv 2404.06654, section 3.1)."""

from __future__ import annotations

from typing import Any

from ..sample import Question, Sample
from .building import hide, random_of
from .prose import Prose, python_prose
from .words import ADJECTIVES, PLACES, numbers

_QUESTIONS = 6


def passkey(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """The access codes of six places; each is asked for."""
    rng = random_of("passkey", tokens, index, seed)
    places, codes = rng.sample(PLACES, _QUESTIONS), numbers(rng, _QUESTIONS)
    needles = [f"Remember: the access code of the {p} is {c}." for p, c in zip(places, codes, strict=True)]
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), codes, "passkey")
    questions = tuple(
        Question(f"What is the access code of the {p}?", (c,), f"The access code of the {p} is")
        for p, c in zip(places, codes, strict=True)
    )
    return Sample("passkey", index, context, questions)


def multi_key(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Numbers of twelve keys, each of two words that other keys have, too; six are asked for."""
    rng = random_of("multi_key", tokens, index, seed)
    keys = [f"{a} {p}" for a in rng.sample(ADJECTIVES, 3) for p in rng.sample(PLACES, 4)]
    rng.shuffle(keys)
    values = numbers(rng, len(keys))
    needles = [f"The special number of the {k} is {v}." for k, v in zip(keys, values, strict=True)]
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), values, "multi_key")
    questions = tuple(
        Question(f"What is the special number of the {k}?", (v,), f"The special number of the {k} is")
        for k, v in rng.sample(list(zip(keys, values, strict=True)), _QUESTIONS)
    )
    return Sample("multi_key", index, context, questions)


def multi_value(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Four keys with two values each, on lines of their own; both are asked for, NLL is of the first."""
    rng = random_of("multi_value", tokens, index, seed)
    places, values = rng.sample(PLACES, 4), numbers(rng, 8)
    lines = [(p, v) for i, p in enumerate(places) for v in values[2 * i : 2 * i + 2]]
    rng.shuffle(lines)
    needles = [f"One of the access codes of the {p} is {v}." for p, v in lines]
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), values, "multi_value")
    questions = tuple(
        Question(
            f"Which access codes of the {place} are mentioned in the text?",
            tuple(v for p, v in lines if p == place),
            f"The access codes of the {place} are",
            metric="all",
            max_tokens=40,
        )
        for place in places
    )
    return Sample("multi_value", index, context, questions)
