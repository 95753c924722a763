# SPDX-License-Identifier: Apache-2.0
"""A sample that the tiny models take, and how measurements are compared."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hubkv_trt.evaluation.results import Cell
from hubkv_trt.evaluation.sample import Question, Sample

TEXT = "The code of the red door is 7214. Nobody knows the code of the blue one. " * 4
QUESTIONS = ("Which door?", "Code?", "What does nobody know, and of which door?")


def sample(task: str = "doors", index: int = 0) -> Sample:
    asked = tuple(Question(text, ("7214", "blue"), "It is", max_tokens=6) for text in QUESTIONS)
    return Sample(task, index, TEXT + str(index), (*asked, Question("Repeat it.", (TEXT[:40],), metric="none")))


def assert_alike(cells: Iterable[Cell], others: Iterable[Cell]) -> None:
    """Equal but for the bits that depend on what shares a pass."""
    for a, b in zip(cells, others, strict=True):
        assert (a.key, a.rows) == (b.key, b.rows)
        assert [x.text for x in a.answers] == [x.text for x in b.answers]
        assert [x.nll for x in a.answers] == pytest.approx([x.nll for x in b.answers], abs=1e-3)
        assert [x.kl for x in a.answers] == pytest.approx([x.kl for x in b.answers], abs=1e-4)
