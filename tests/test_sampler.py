# SPDX-License-Identifier: Apache-2.0
"""Sampling: the right distribution, the documented order, and a seeded sequence that does not see its batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.runtime import sampler
from hubkv_trt.runtime.sampler import SamplingParams, sample


def draw(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> list[int]:
    """``count`` tokens from the same logits [V] by one generator, one call each."""
    generator = random.Random(seed)
    return [int(sample(logits[None], [params], [generator])[0]) for _ in range(count)]


def expected_set(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that top-k and then top-p leave, by the definition."""
    scaled = (logits.double() - logits.max()) / params.temperature
    order = sorted(range(len(logits)), key=lambda t: (-float(logits[t]), t))
    order = order[: params.top_k or None]
    weights = np.array([math.exp(float(scaled[t])) for t in order])
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    return {t for t, mass in zip(order, before, strict=True) if mass < params.top_p}


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, -1.0, 4.9]])
    tokens, valid = sample(logits, [SamplingParams()] * 2, [random.Random(0)] * 2)
    assert tokens.tolist() == [1, 0]
    assert valid.tolist() == [True, True]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, top_k=4, top_p=0.8),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5, 0.5])
    keep = expected_set(logits, params)
    weights = np.array([math.exp(float(x) / params.temperature) if t in keep else 0.0 for t, x in enumerate(logits)])
    wanted = weights / weights.sum()
    count = 4000
    seen = np.bincount(draw(logits, params, count), minlength=len(logits)) / count
    assert set(np.flatnonzero(seen)) == keep
    np.testing.assert_allclose(seen, wanted, atol=4 * 0.5 / math.sqrt(count))  # four standard deviations


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 40), st.integers(0, 12), st.floats(0.05, 1.0), st.booleans(), st.integers(0, 999))
def test_only_tokens_inside_top_k_then_top_p_are_drawn(size: int, k: int, p: float, ties: bool, seed: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    params = SamplingParams(temperature=1.3, top_k=k, top_p=p)
    # the border of the nucleus may fall between equal running sums: leave it out
    keep = expected_set(logits, params)
    near = expected_set(logits, SamplingParams(temperature=1.3, top_k=k, top_p=min(1.0, p * (1 + 1e-9))))
    assert keep <= set(near)
    assert set(draw(logits, params, 60, seed)) <= near


def test_a_nucleus_wider_than_the_candidates_is_found() -> None:
    """Nearly flat logits over a large vocabulary: the nucleus holds far more tokens than are ranked at first."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 1e-3
    params = SamplingParams(temperature=1.0, top_p=0.5)
    keep = expected_set(logits, params)
    assert 9_000 < len(keep) < 11_000
    tokens = draw(logits, params, 40)
    assert set(tokens) <= keep
    ranks = {t: r for r, t in enumerate(sorted(keep, key=lambda t: -float(logits[t])))}
    assert max(ranks[t] for t in tokens) > 5_000  # not only the first candidates


def test_equal_logits_at_the_border_keep_the_lower_ids() -> None:
    logits = torch.zeros(5000)
    assert set(draw(logits, SamplingParams(temperature=1.0, top_k=3), 100)) == {0, 1, 2}
    assert set(draw(logits, SamplingParams(temperature=1.0, top_p=4 / 5000), 100)) == {0, 1, 2, 3}


def test_a_seeded_sequence_does_not_see_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(6, 3000, generator=generator) * 3 for _ in range(20)]
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(temperature=0.8, top_k=50, seed=12),
        SamplingParams(temperature=1.2, top_p=0.9, seed=13),
        SamplingParams(temperature=1.5, top_k=2000, top_p=0.99, seed=14),
        SamplingParams(temperature=0.7, seed=11),
    ]
    together_generators = [random.Random(p.seed) for p in kinds]
    together = torch.stack([sample(logits, kinds, together_generators)[0] for logits in steps])
    for row, params in enumerate(kinds):
        own = random.Random(params.seed)
        alone = [int(sample(logits[row : row + 1], [params], [own])[0]) for logits in steps]
        assert together[:, row].tolist() == alone
    assert len(set(together[:, 1].tolist())) > 3


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([1.0, 1.001, -3.0e38, 0.9])
    assert set(draw(logits, SamplingParams(temperature=1e-9), 20)) == {1}
    assert set(draw(logits, SamplingParams(temperature=1e-9, top_p=0.5, top_k=2), 20)) == {1}


def test_rows_that_cannot_be_sampled_are_told_apart() -> None:
    bad = [math.nan, math.inf, -math.inf]
    logits = torch.zeros(5, 8)
    logits[1, 3] = bad[0]
    logits[2, 3] = bad[1]
    logits[3, :] = bad[2]
    logits[4, 3] = bad[2]  # one impossible token is no fault
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)):
        tokens, valid = sample(logits, [params] * 5, [random.Random(i) for i in range(5)])
        assert valid.tolist() == [True, False, False, False, True]
        assert bool(((tokens >= 0) & (tokens < 8)).all())
        assert int(tokens[4]) != 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", "x"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("bad_words", ("a", "")),
        ("bad_words", 3 * (b"x",)),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_tokens", -1),
        ("min_tokens", 257),  # more than max_tokens
        ("min_tokens", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("presence_penalty", -1e39),
        ("frequency_penalty", math.inf),
        ("frequency_penalty", "1"),
        ("return_log_probs", 1),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def test_stop_may_be_one_text() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=1.1, top_p=0.9),
    SamplingParams(temperature=0.6, top_k=700, top_p=0.95),
    SamplingParams(temperature=2.0, top_p=0.999),
]


def mixed_logits() -> torch.Tensor:
    logits = torch.randn(len(MIXED), 5000, generator=torch.Generator().manual_seed(2)) * 2
    return (logits * 16).round() / 16  # with ties


@pytest.mark.parametrize("seed", range(4))
def test_ranking_all_tokens_gives_the_tokens_of_the_candidates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device ranks all of them, as it cannot look whether the candidates suffice without a wait."""
    few, _ = sample(mixed_logits(), MIXED, [random.Random(seed + i) for i in range(len(MIXED))])
    monkeypatch.setattr(sampler, "_CANDIDATES", 5000)
    every, _ = sample(mixed_logits(), MIXED, [random.Random(seed + i) for i in range(len(MIXED))])
    assert torch.equal(few, every)


def test_what_is_drawn_comes_to_the_host_and_stays_for_the_next_step() -> None:
    logits = mixed_logits()
    logits[0] = torch.nan
    wanted, valid = sample(logits, MIXED, [random.Random(i) for i in range(len(MIXED))])
    drawn = sampler.draw(logits, MIXED, [random.Random(i) for i in range(len(MIXED))])
    assert drawn.tokens == wanted.tolist()
    assert drawn.valid == valid.tolist() == [False] + [True] * 5
    assert drawn.next_tokens.dtype == torch.int32
    assert drawn.next_tokens.tolist() == [[t] for t in drawn.tokens]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_tokens_are_the_same() -> None:
    logits = mixed_logits()
    wanted, _ = sample(logits, MIXED, [random.Random(i) for i in range(len(MIXED))])
    there = logits.cuda()
    sample(there, MIXED, [random.Random(i) for i in range(len(MIXED))])  # page-locked memory is there now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, valid = sample(there, MIXED, [random.Random(i) for i in range(len(MIXED))])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens.cpu(), wanted)
    assert bool(valid.cpu().all())
