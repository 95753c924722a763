# SPDX-License-Identifier: Apache-2.0
"""Penalties, banned tokens and log probabilities: transformers' numbers, step by step, in any batch."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from hubkv_trt.runtime import sampler
from hubkv_trt.runtime.edits import LogitEdits, edit_logits, make_edits
from hubkv_trt.runtime.sampler import SamplingParams, sample

VOCAB = 301
ENDS = (2, 7)


def tokens(count: int, seed: int, below: int = VOCAB) -> list[int]:
    return torch.randint(0, below, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(rows: int, seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4


def edits(prompt: list[int], words: Any = (), **params: Any) -> LogitEdits | None:
    return make_edits(SamplingParams(**params), np.array(prompt, np.int32), ENDS, words)


def grown(edit: LogitEdits | None, output: list[int]) -> LogitEdits | None:
    for token in output:
        assert edit is not None
        edit.append(token)
    return edit


@pytest.mark.parametrize("penalty", [1.3, 0.7, 40.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, output = tokens(50, 1), tokens(200, 2)
    edit, reference = edits(prompt, repetition_penalty=penalty), RepetitionPenaltyLogitsProcessor(penalty)
    for step, token in enumerate(output):
        logits = logits_of(1, step)
        wanted = reference(torch.tensor([prompt + output[:step]]), logits.clone())
        assert torch.equal(edit_logits(logits, [edit]), wanted)
        grown(edit, [token])


def test_presence_and_frequency_count_what_was_generated() -> None:
    prompt, output = tokens(50, 1), tokens(150, 2, below=40)
    edit = edits(prompt, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.25)
    logits = logits_of(1, 3)
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB).float()
    assert counts.max() > 5
    wanted = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([prompt + output]), logits.clone())
    wanted = wanted - (0.5 * (counts > 0) - 0.25 * counts)
    assert torch.equal(edit_logits(logits, [grown(edit, output)]), wanted)
    only_output = edits(prompt, presence_penalty=0.5)
    assert torch.equal(edit_logits(logits, [only_output]), logits)  # the prompt does not count


def test_bad_words_are_those_of_transformers() -> None:
    """Of one to four tokens over few letters, so that they match often, across the border of the prompt too."""
    rng = random.Random(4)
    words = [tuple(rng.randrange(5) for _ in range(length)) for length in (1, 2, 2, 3, 3, 4, 4)]
    reference = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    seen = set()
    for seed in range(6):
        prompt, output = tokens(seed, seed, below=5), tokens(30, seed + 50, below=5)
        edit = edits(prompt, words)
        for step in range(len(output)):
            before = prompt + output[:step]
            logits = logits_of(1, step, size=6)
            found = edit_logits(logits, [edit])
            if before:  # transformers cannot begin with nothing
                assert torch.equal(found, reference(torch.tensor([before]), logits.clone()))
            seen.add(int(found.isinf().sum()))
            grown(edit, output[step : step + 1])
    assert len(seen) >= 3


def test_no_token_ends_a_sequence_before_min_tokens() -> None:
    prompt, output = tokens(9, 1), [t for t in tokens(20, 2) if t not in ENDS]
    edit = edits(prompt, min_tokens=5)
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), 5, list(ENDS))
    for step in range(10):
        logits = logits_of(1, step)
        wanted = reference(torch.tensor([prompt + output[:step]]), logits.clone())
        assert torch.equal(edit_logits(logits, [edit]), wanted)
        assert bool(wanted.isinf().any()) == (step < 5)
        grown(edit, output[step : step + 1])


def test_edits_of_a_batch_are_those_of_each_alone() -> None:
    def rows() -> list[LogitEdits | None]:
        return [
            grown(edits(tokens(90, 1), repetition_penalty=1.1), tokens(40, 2)),
            None,
            grown(edits(tokens(4, 3), [(5,), (9, 11)], frequency_penalty=0.3), [8, 9]),
            grown(edits([], presence_penalty=-2.0, min_tokens=9), []),
            grown(edits([1], [(0,), (300,)]), [3]),
        ]

    logits = logits_of(5, 6)
    before = logits.clone()
    together = edit_logits(logits, rows())
    assert torch.equal(logits, before)
    for row, edit in enumerate(rows()):
        assert torch.equal(together[row : row + 1], edit_logits(logits[row : row + 1], [edit]))
    assert torch.equal(together[1], logits[1])
    assert together[2].isinf().nonzero().flatten().tolist() == [5, 11]
    assert together[3].isinf().nonzero().flatten().tolist() == list(ENDS)
    assert together[4].isinf().nonzero().flatten().tolist() == [0, 300]


def test_whoever_asks_for_nothing_pays_nothing() -> None:
    assert edits(tokens(9, 1)) is None
    assert edits(tokens(9, 1), temperature=1.0, top_p=0.5, min_p=0.1, return_log_probs=True) is None
    logits = logits_of(3, 1)
    assert edit_logits(logits, [None] * 3) is logits
    assert edit_logits(logits, ()) is logits


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 3.4e38},
        {"repetition_penalty": 1.3e-38},
        {"frequency_penalty": 3e38, "presence_penalty": 3e38},
        {"frequency_penalty": -3e38, "presence_penalty": -3e38},
    ],
)
def test_extreme_penalties_leave_a_row_that_can_be_sampled(params: dict[str, float]) -> None:
    edit = grown(edits([3, 4], **params), [5, 6, 6])
    found = edit_logits(logits_of(1, 1).abs(), [edit])
    assert not found.isnan().any()
    for how in (SamplingParams(), SamplingParams(temperature=1.0)):
        assert sample(found, [how], [random.Random(0)])[1].tolist() == [True]
    assert (int(found.argmax()) in {3, 4, 5, 6}) == (min(params.values()) < 1e-30)


def test_a_broken_row_stays_broken() -> None:
    logits = logits_of(2, 1)
    logits[0, 3], logits[1, 3] = math.nan, math.inf
    edit = edits([3], repetition_penalty=2.0)
    assert sample(edit_logits(logits, [edit, None]), [SamplingParams()] * 2, [])[1].tolist() == [False, False]


@pytest.mark.parametrize("cut", [{}, {"top_k": 250}, {"top_p": 0.999}], ids=str)
def test_a_banned_token_is_drawn_at_no_temperature(cut: dict[str, Any]) -> None:
    edit = edits([1], [(token,) for token in range(4, VOCAB)])
    params, generator = SamplingParams(temperature=3e38, **cut), random.Random(0)
    logits = edit_logits(logits_of(1, 1), [edit])
    assert {int(sample(logits, [params], [generator])[0]) for _ in range(60)} == {0, 1, 2, 3}


# ---- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [259, 5000, 49152])
def test_log_probs_are_the_log_softmax_of_the_model_in_any_batch(size: int) -> None:
    """Whatever penalties, temperature and cuts chose the token."""
    logits = logits_of(6, 1, size)
    params = [
        SamplingParams(return_log_probs=True),
        SamplingParams(temperature=2.5, seed=1, return_log_probs=True),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=3, return_log_probs=True),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(repetition_penalty=9.0, return_log_probs=True),
    ]
    best = [int(logits[5].argmax())]
    asked = [make_edits(p, np.array(best), (), ()) for p in params]
    drawn = sampler.draw(logits, params, [random.Random(i) for i in range(6)], asked)
    assert drawn.tokens[5] not in best
    wanted = logits.double().log_softmax(-1)
    assert drawn.log_probs is not None
    for row, (p, token, value) in enumerate(zip(params, drawn.tokens, drawn.log_probs, strict=True)):
        alone = sampler.draw(logits[row : row + 1], [p], [random.Random(row)], asked[row : row + 1])
        assert alone.tokens == [token]
        assert alone.next_tokens.tolist() == [drawn.next_tokens[row].tolist()]
        if p.return_log_probs:
            assert alone.log_probs == [value] == [float(np.float32(value))]
            assert abs(value - float(wanted[row, token])) < 1e-5
        else:
            assert (alone.log_probs, value) == (None, 0.0)


# ---- min_p -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, cut: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, 1.5, 0.5, -2.5]])
    params = SamplingParams(temperature=0.8, min_p=min_p, **cut)
    left = MinPLogitsWarper(min_p)(torch.zeros(1, 1, dtype=torch.long), logits / 0.8)
    wanted = set(left[0].isfinite().nonzero().flatten().tolist())
    if "top_k" in cut:
        wanted &= set(logits[0].topk(4).indices.tolist())
    elif "top_p" in cut:
        probabilities = (logits[0] / 0.8).softmax(-1).sort(descending=True)
        before = probabilities.values.cumsum(-1) - probabilities.values
        wanted &= set(probabilities.indices[before < 0.9].tolist())
    generator = random.Random(0)
    seen = {int(sample(logits, [params], [generator])[0]) for _ in range(600)}
    assert seen == wanted


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_edits_are_the_same() -> None:
    logits = logits_of(3, 6)

    def rows() -> list[LogitEdits | None]:
        return [grown(edits(tokens(90, 1), [(5,)], repetition_penalty=1.1), tokens(40, 2)), None, edits([1], [(0,)])]

    there, asked = logits.cuda(), rows()
    edit_logits(there, asked)  # page-locked memory is there now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = edit_logits(there, asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), edit_logits(logits, asked), rtol=1e-6, atol=0)
