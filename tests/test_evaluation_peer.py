# SPDX-License-Identifier: Apache-2.0
"""kvpress's own pipeline gives our answers on the same samples, for the methods that both have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.config import Scorer
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.evaluation.peer import describe, peer_answers
from hubkv_trt.evaluation.sample import Sample
from hubkv_trt.evaluation.tasks import TASKS

RATIO = 0.6  # answers differ from the full cache's, and protection is below the budget


def short(sample: Sample) -> Sample:
    """Two of its questions, and answers of few tokens: transformers takes its time."""
    questions = tuple(dataclasses.replace(q, max_tokens=9) for q in sample.questions[:2])
    return dataclasses.replace(sample, questions=questions)


def test_the_same_answers(demo_engine: Path, demo_reference: Any) -> None:
    engine = load_engine(demo_engine, verify=False)
    tokenizer = engine.load_tokenizer()
    samples = [short(TASKS[task](tokenizer, 300, 0, 1)) for task in ("passkey", "key_value")]
    scorers = [Scorer.FASTKVZIP, Scorer.KVZIP, Scorer.SNAPKV]
    answers = list(peer_answers(engine, demo_reference, samples, scorers, RATIO))
    assert len(answers) == 3 * 2 * 2
    assert len({a.ours for a in answers if a.index == 0}) > 4  # methods and questions have answers of their own
    assert all(a.same for a in answers), describe(answers)
    assert "| kvzip | 4 | 4 |" in describe(answers)


def test_what_has_no_peer(demo_engine: Path, demo_reference: Any) -> None:
    engine = load_engine(demo_engine, verify=False)
    with pytest.raises(ValueError, match="peer: 'random' is not a method that kvpress has"):
        next(peer_answers(engine, demo_reference, [], [Scorer.RANDOM], RATIO))
