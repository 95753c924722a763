# SPDX-License-Identifier: Apache-2.0
"""Is an answer right."""

from __future__ import annotations

import re
from collections import Counter

from .sample import Question

_ARTICLES = {"a", "an", "the"}


def score(question: Question, text: str) -> float:
    """0..1: how right a generated text is, by the question's metric (``sample.Question``)."""
    if question.metric == "all":
        return float(all(contains(text, answer) for answer in question.answers))
    if question.metric == "f1":
        return max(f1(text, answer) for answer in question.answers)
    return float(any(contains(text, answer) for answer in question.answers))


def contains(text: str, answer: str) -> bool:
    """Whether the answer stands in the text as a word or words of its own; case does not count."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words, without articles and punctuation (as SQuAD has it)."""
    found, wanted = _words(text), _words(answer)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in _ARTICLES]
