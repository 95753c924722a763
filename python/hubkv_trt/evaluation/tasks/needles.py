# SPDX-License-Identifier: Apache-2.0
"""Single facts hidden in prose, after RULER's needle-in-a-haystack tasks (arXiv 2404.06654): passkeys, keys, values."""

from __future__ import annotations

from typing import Any

from ..sample import Question, Sample
from .building import hide, random_of
from .prose import Prose, python_prose
from .words import PLACES, numbers

_QUESTIONS = 6


def passkey(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Access codes of six places; each is asked for."""
    rng = random_of("passkey", tokens, index, seed)
    places, codes = rng.sample(PLACES, _QUESTIONS), numbers(rng, _QUESTIONS)
    needles = [f"Remember: the access code of the {p} is {c}." for p, c in zip(places, codes, strict=True)]
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), codes, "passkey")
    questions = tuple(
        Question(f"What is the access code of the {p}?", (c,), f"The access code of the {p} is")
        for p, c in zip(places, codes, strict=True)
    )
    return Sample("passkey", index, context, questions)
