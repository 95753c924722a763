# SPDX-License-Identifier: Apache-2.0
"""The greedy oracle: pinned to all sets of tiny texts, and to the properties that facility location promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from hubkv_trt import HubKVConfig
from hubkv_trt.ablations import Scored, refine_stage
from hubkv_trt.ablations.facility_location import (
    coverage,
    greedy,
    greedy_gains,
    local_coverage,
    local_weights,
    stochastic_greedy,
)


def weights_of(kind: str, num_tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "any":
        return rng.random((num_tokens, num_tokens)) ** 3
    return local_weights(rng.random(num_tokens) ** 2, 5, 0.5)


CASES = [(kind, t, seed) for kind in ("any", "local") for t in (1, 5, 9) for seed in range(4)]


@pytest.mark.parametrize(("kind", "num_tokens", "seed"), CASES)
def test_greedy_reaches_its_share_of_the_best_set(kind: str, num_tokens: int, seed: int) -> None:
    w = weights_of(kind, num_tokens, seed)
    for count in range(num_tokens + 1):
        order, gains = greedy(w, count)
        best = max(coverage(w, np.array(s, np.int64)) for s in itertools.combinations(range(num_tokens), count))
        found = coverage(w, order)
        assert found == pytest.approx(gains.sum(), abs=1e-12)
        assert (1 - 1 / math.e) * best <= found + 1e-12
        assert found <= best + 1e-12
    if num_tokens:
        assert coverage(w, greedy(w, 1)[0]) == max(coverage(w, np.array([j])) for j in range(num_tokens))


@pytest.mark.parametrize(("kind", "num_tokens", "seed"), CASES)
def test_each_step_takes_the_largest_gain(kind: str, num_tokens: int, seed: int) -> None:
    w = weights_of(kind, num_tokens, seed)
    order, gains = greedy(w, num_tokens)
    assert sorted(order) == list(range(num_tokens))
    assert np.all(np.diff(gains) <= 1e-12)  # submodular: gains never rise
    for step in range(num_tokens):
        before = coverage(w, order[:step])
        others = [coverage(w, np.append(order[:step], j)) - before for j in order[step:]]
        assert gains[step] == pytest.approx(max(others), abs=1e-12)


@pytest.mark.parametrize("kind", ["any", "local"])
def test_coverage_is_monotone_and_submodular(kind: str) -> None:
    w = weights_of(kind, 6, 1)
    subsets = [np.array(s, np.int64) for n in range(6) for s in itertools.combinations(range(6), n)]
    for small, large in itertools.product(subsets, subsets):
        if not set(small) <= set(large):
            continue
        for j in set(range(6)) - set(large):
            gain_small = coverage(w, np.append(small, j)) - coverage(w, small)
            gain_large = coverage(w, np.append(large, j)) - coverage(w, large)
            assert gain_small + 1e-12 >= gain_large >= -1e-12


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 40])
@pytest.mark.parametrize(("kernel", "gamma"), [(5, 0.5), (7, 0.2), (3, 0.0), (1, 0.5), (5, 1.0)])
def test_heads_at_once_equal_the_oracle_of_each(num_tokens: int, kernel: int, gamma: float) -> None:
    scores = np.random.default_rng(num_tokens).random((2, 3, num_tokens), np.float32)
    gains = greedy_gains(Scored.of(torch.from_numpy(scores)), kernel, gamma)
    for head, got in zip(scores.reshape(6, -1), gains.view(6, -1).numpy(), strict=True):
        order, want = greedy(local_weights(head.astype(np.float64), kernel, gamma), num_tokens)
        np.testing.assert_allclose(got[order], want, atol=1e-6)


def test_the_largest_gains_of_all_heads_are_greedy_over_all() -> None:
    scores = torch.from_numpy(np.random.default_rng(3).random((2, 2, 12), np.float32) ** 2)
    gains = greedy_gains(Scored.of(scores)).flatten()
    blocks = np.zeros((48, 48))
    for head, values in enumerate(scores.view(4, 12).double().numpy()):
        blocks[12 * head : 12 * head + 12, 12 * head : 12 * head + 12] = local_weights(values, 5, 0.5)
    order, want = greedy(blocks, 15)
    assert set(gains.argsort(descending=True)[:15].tolist()) == set(order.tolist())
    kept = torch.zeros(48, dtype=torch.bool)
    kept[order] = True
    found = local_coverage(scores, kept.view(2, 2, 12), 5, 0.5)
    assert found == pytest.approx(coverage(blocks, order)) == pytest.approx(want.sum())


def test_a_neighbour_of_a_hub_is_worth_what_refine_says() -> None:
    """One hub among tokens that nothing else covers: its neighbours gain gamma times their score."""
    scores = torch.zeros(1, 1, 21)
    scores[0, 0, [10, 12]] = torch.tensor([0.8, 0.3])
    gains = greedy_gains(Scored.of(scores), 5, 0.5)[0, 0]
    assert float(gains[10]) == pytest.approx(0.8 + 0.5 * 0.3)
    assert float(gains[12]) == pytest.approx(0.5 * 0.3)


def test_one_pass_lies_between_scores_and_greedy() -> None:
    """Scores in clusters: the refinement reaches more of what greedy covers than the scores, and never more than it."""
    rng = np.random.default_rng(5)
    places, heights = rng.integers(0, 400, (4, 60)), rng.random((4, 60))
    near = np.exp(-np.abs(np.arange(400) - places[..., None]) / 2) * heights[..., None]
    scores = torch.from_numpy((near.max(1) * (1 + 0.1 * rng.random((4, 400)))).astype(np.float32))[None]
    hubkv = HubKVConfig.from_preset("fastkvzip_nms", sink_tokens=0, window_ratio=0.0)

    def reached(values: torch.Tensor) -> float:
        kept = torch.zeros(1600, dtype=torch.bool)
        kept[values.flatten().topk(160).indices] = True
        return local_coverage(scores, kept.view(1, 4, 400), 5, 0.5)

    base, refined = reached(scores), reached(refine_stage(scores, hubkv, 0.9))
    best = reached(greedy_gains(Scored.of(scores), 5, 0.5))
    assert base + 0.02 * best < refined <= best


def test_more_candidates_come_closer_to_greedy() -> None:
    scored = Scored.of(torch.from_numpy(np.random.default_rng(0).random((2, 4, 150), np.float32) ** 4))

    def reached(gains: torch.Tensor) -> float:
        kept = torch.zeros_like(gains, dtype=torch.bool)
        kept.scatter_(2, gains.topk(20).indices, True)
        return local_coverage(scored.values, kept, 5, 0.5)

    exact = reached(greedy_gains(scored))
    few, many = (reached(stochastic_greedy(scored, candidates=n)) for n in (1, 400))
    assert few < many <= exact + 1e-6
    assert many > 0.95 * exact
    assert np.isfinite(few)


def test_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"count: 4 is not in 0..T = 3"):
        greedy(np.ones((3, 3)), 4)
