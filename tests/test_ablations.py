# SPDX-License-Identifier: Apache-2.0
"""The family's other methods: parameters that change nothing, small oracles, and what all have in common."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import hubkv_trt
from hubkv_trt import HubKVConfig, ablations, ops
from hubkv_trt.ablations import Scored, head_statistics, marginal_gain, redundancy, smoothing, spectrum
from hubkv_trt.ablations.facility_location import greedy_gains, stochastic_greedy
from hubkv_trt.ablations.placebo import placebo
from hubkv_trt.config import PRESETS, Budget
from hubkv_trt.reference.refine import hubs
from hubkv_trt.refinement import prominent

SCORES = sorted({*PRESETS, *ablations.ATTEMPTS, "placebo"})


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape, np.float32))


def hole(scores: torch.Tensor) -> torch.Tensor:
    """With values that are no numbers, some of them side by side."""
    scores = scores.clone()
    scores[0, 0, 20:31] = torch.nan
    scores[-1, -1, 33] = torch.inf
    scores[-1, 0, 35] = -torch.inf
    return scores


# ---- what all have in common -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 2, 120)])
def test_scores_are_finite_where_they_were_and_protected_ones_infinite(name: str, shape: tuple[int, int, int]) -> None:
    hubkv = HubKVConfig(window_ratio=0.1)
    scores = hole(uniform(*shape)) if shape[2] > 40 else uniform(*shape)
    z = ablations.refined_scores(name, scores, hubkv, 0.9)
    assert z.shape == scores.shape
    assert z.dtype == torch.float32
    num_tokens = shape[2]
    protected = torch.zeros(num_tokens, dtype=torch.bool)
    protected[: hubkv.sink_tokens] = True
    protected[num_tokens - hubkv.window(num_tokens) :] = True
    assert torch.isposinf(z[..., protected]).all()
    inner, before = z[..., ~protected], scores[..., ~protected]
    assert inner[before.isfinite()].isfinite().all()
    broken = ~before.isfinite()
    assert torch.equal(inner[broken].view(torch.int32), before[broken].view(torch.int32))


@pytest.mark.parametrize("name", SCORES)
def test_the_same_twice_and_only_from_the_scores(name: str) -> None:
    scores = uniform(2, 3, 90)
    before = scores.clone()
    first = ablations.refined_scores(name, scores, HubKVConfig(), 0.8, seed=5)
    assert torch.equal(scores, before)
    assert torch.equal(first, ablations.refined_scores(name, scores, HubKVConfig(), 0.8, seed=5))


@pytest.mark.parametrize("name", SCORES)
def test_nothing_removed_is_nothing_refined(name: str) -> None:
    scores = uniform(2, 3, 60)
    z = ablations.refined_scores(name, scores, HubKVConfig(sink_tokens=0, window_ratio=0.0), 0.0)
    assert torch.equal(z, scores)


@pytest.mark.parametrize("name", ablations.NAMES)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_kept_rows_fill_the_budget(name: str, groups: int) -> None:
    hubkv = HubKVConfig(sink_tokens=2, window_ratio=0.05)
    scores = uniform(2, 3, 80)
    budget = Budget(groups, 480 // groups // 5, 480)
    positions, offsets = ablations.kept_rows(name, scores, hubkv, budget, 0.8)
    assert len(positions) == offsets[-1] == budget.num_rows
    assert torch.equal(offsets[:: 6 // groups].diff(), torch.full((groups,), budget.rows_per_group))
    for head in range(6):
        kept = positions[offsets[head] : offsets[head + 1]].tolist()
        assert kept == sorted(set(kept))
        assert {0, 1, 76, 77, 78, 79} <= set(kept)


def test_presets_are_the_refine_stage() -> None:
    scores = uniform(2, 3, 300)
    for name in PRESETS:
        hubkv = HubKVConfig.from_preset(name)
        if hubkv.prominence:
            continue
        z, _ = ops.refine(
            scores, torch.tensor([hubkv.alpha(0.9)]), torch.tensor([hubkv.window(300)], dtype=torch.int32),
            hubkv.nms_kernel, hubkv.penalty_factor, hubkv.head_weight_temperature, hubkv.min_head_weight,
            hubkv.max_head_weight, hubkv.sink_tokens,
        )  # fmt: skip
        assert torch.equal(ablations.refined_scores(name, scores, HubKVConfig(), 0.9), z)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="ablation: 'best' is not one of fastkvzip, "):
        ablations.refined_scores("best", uniform(1, 1, 9), HubKVConfig(), 0.5)
    with pytest.raises(ValueError, match="ablation: 'head_budget_waterfill' is not one of"):
        ablations.refined_scores("head_budget_waterfill", uniform(1, 1, 9), HubKVConfig(), 0.5)
    with pytest.raises(ValueError, match="ablation: 'best' is not one of"):
        ablations.kept_rows("best", uniform(1, 1, 9), HubKVConfig(), Budget(1, 4, 9), 0.5)
    with pytest.raises(ValueError, match=r"scores: .* is not float32 \[L, Hkv, T\]"):
        ablations.refined_scores("cma", uniform(3, 9), HubKVConfig(), 0.5)
    with pytest.raises(ValueError, match=r"scores: .* is not float32 \[L, Hkv, T\]"):
        ablations.refined_scores("cma", uniform(1, 3, 9).double(), HubKVConfig(), 0.5)
    scored = Scored.of(uniform(1, 3, 9))
    for call, message in (
        (lambda: smoothing.community_smoothing(scored, 4), "kernel: 4 is not an odd number"),
        (lambda: spectrum.low_rank_spectrum(scored, 0), "rank: 0 is not an integer >= 1"),
        (lambda: spectrum.residual_svd(scored, blend=1.5), "blend: 1.5 is not in"),
        (lambda: spectrum.layerwise_residual_svd(scored, max_blend=-1), "max_blend: -1 is not in"),
        (lambda: redundancy.cma(scored, reach=0), "reach: 0 is not an integer >= 1"),
        (lambda: redundancy.cma(scored, tau=0.0), "tau: 0.0 is not > 0"),
        (lambda: marginal_gain.prominence(scored, kernel=2), "kernel: 2 is not an odd number"),
        (lambda: marginal_gain.prominence(scored, strength=-2), "strength: -2 is not >= -1"),
        (lambda: marginal_gain.diminishing_returns(scored, rows=0), "rows: 0 is not an integer >= 1"),
        (lambda: marginal_gain.diminishing_returns(scored, strength=-1), "strength: -1 is not >= 0"),
        (lambda: marginal_gain.head_agreement(scored, strength=2), "strength: 2 is not in"),
        (lambda: stochastic_greedy(scored, candidates=0), "candidates: 0 is not an integer >= 1"),
        (lambda: greedy_gains(scored, nms_kernel=2), "nms_kernel: 2 is not an odd number"),
        (lambda: greedy_gains(scored, penalty_factor=2.0), "penalty_factor: 2.0 is not in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_serving_path_does_not_import_them() -> None:
    package = Path(hubkv_trt.__file__).parent
    for folder in ("runtime", "models", "graph", "engine", "scorers", "integrations", "reference"):
        for file in (package / folder).rglob("*.py"):
            assert "ablations" not in file.read_text(), file


# ---- parameters that change nothing ----------------------------------------------------------------------------------

IDENTITIES = {
    "smoothing": lambda s: smoothing.community_smoothing(s, kernel=1),
    "variance": lambda s: head_statistics.variance_calibration(s, power=0),
    "bottleneck": lambda s: head_statistics.information_bottleneck(s, strength=0),
    "streaming": lambda s: redundancy.streaming_submodular(s, strength=0),
    "cma": lambda s: redundancy.cma(s, strength=0),
    "adaptive cma": lambda s: redundancy.adaptive_tau_cma(s, strength=0),
    "spectrum": lambda s: spectrum.low_rank_spectrum(s, rank=3),
    "residual": lambda s: spectrum.residual_svd(s, rank=1, blend=0),
    "layerwise": lambda s: spectrum.layerwise_residual_svd(s, rank=1, max_blend=0),
    "bottleneck svd": lambda s: spectrum.bottleneck_svd(s, strength=0, rank=3),
    "prominence": lambda s: marginal_gain.prominence(s, strength=0),
    "prominence of one": lambda s: marginal_gain.prominence(s, kernel=1),
    "diminishing returns": lambda s: marginal_gain.diminishing_returns(s, strength=0),
    "agreement": lambda s: marginal_gain.head_agreement(s, strength=0),
    "greedy": lambda s: greedy_gains(s, penalty_factor=1.0),
    "greedy of one": lambda s: greedy_gains(s, nms_kernel=1),
    "stochastic greedy": lambda s: stochastic_greedy(s, penalty_factor=1.0),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str) -> None:
    scored = Scored.of(hole(uniform(2, 3, 50)))
    assert torch.equal(IDENTITIES[name](scored), scored.values)


# ---- each against a small oracle -------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_the_window() -> None:
    scores = hole(uniform(2, 2, 60))
    z = smoothing.community_smoothing(Scored.of(scores), 5)
    for layer, head, t in [(1, 0, 0), (1, 1, 59), (1, 0, 30), (0, 0, 19), (0, 0, 18), (1, 1, 34)]:
        window = scores[layer, head, max(0, t - 2) : t + 3]
        assert float(z[layer, head, t]) == pytest.approx(float(window[window.isfinite()].mean()), rel=1e-6)
    assert float(z.std()) < float(scores[scores.isfinite()].std())


def test_variance_weighs_heads() -> None:
    scores = hole(uniform(2, 2, 60))
    z = head_statistics.variance_calibration(Scored.of(scores))
    for head in scores.flatten(0, 1), z.flatten(0, 1):
        assert len(head) == 4
    for s, got in zip(scores.flatten(0, 1), z.flatten(0, 1), strict=True):
        ok = s.isfinite()
        np.testing.assert_allclose(got[ok], s[ok] * s[ok].double().var(correction=0), rtol=1e-5)


def test_bottleneck_removes_what_heads_share() -> None:
    scores = uniform(2, 3, 40)
    z = head_statistics.information_bottleneck(Scored.of(scores), 1.0)
    np.testing.assert_allclose(z.mean(1), 0, atol=1e-6)
    same = scores[:, :1].expand(-1, 3, -1).contiguous()
    np.testing.assert_allclose(head_statistics.information_bottleneck(Scored.of(same), 0.25), 0.75 * same, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2])
def test_spectrum_is_the_truncated_svd(rank: int) -> None:
    scores = uniform(3, 4, 70)
    z = spectrum.low_rank_spectrum(Scored.of(scores), rank)
    for layer, got in zip(scores.double().numpy(), z.numpy(), strict=True):
        u, sigma, v = np.linalg.svd(layer, full_matrices=False)
        np.testing.assert_allclose(got, (u[:, :rank] * sigma[:rank]) @ v[:rank], atol=1e-6)


def test_blends_lie_between_scores_and_spectrum() -> None:
    scored = Scored.of(uniform(4, 3, 40))
    low = spectrum.low_rank_spectrum(scored, 1)
    np.testing.assert_allclose(spectrum.residual_svd(scored, 1, 0.5), (scored.values + low) / 2, atol=1e-6)
    z = spectrum.layerwise_residual_svd(scored, 1, 1.0)
    moved = [float(torch.norm(z[i] - scored.values[i]) / torch.norm(low[i] - scored.values[i])) for i in range(4)]
    np.testing.assert_allclose(moved, [0.25, 0.5, 0.75, 1.0], rtol=1e-5)
    np.testing.assert_allclose(
        spectrum.bottleneck_svd(scored, 0.5, 1),
        spectrum.low_rank_spectrum(Scored.of(head_statistics.information_bottleneck(scored, 0.5)), 1),
    )


@pytest.mark.parametrize("tau", [4.0, torch.tensor([[0.5, 3.0], [9.0, 1e4]])])
def test_redundancy_is_a_causal_mean(tau: float | torch.Tensor) -> None:
    s = uniform(2, 2, 30)
    got = redundancy.causal_redundancy(s, 6, tau)
    taus = torch.as_tensor(tau).expand(2, 2).numpy()
    for layer, head, t in np.ndindex(2, 2, 30):
        w = np.exp(-np.arange(1, 7) / taus[layer, head])
        want = sum(w[d - 1] * s[layer, head, t - d] for d in range(1, 7) if t >= d) / w.sum()
        assert float(got[layer, head, t]) == pytest.approx(float(want), rel=1e-5, abs=1e-7)


def test_penalties_grow_with_strength() -> None:
    scored = Scored.of(uniform(2, 3, 100))
    for attempt in (redundancy.streaming_submodular, redundancy.cma, redundancy.adaptive_tau_cma):
        steps = [attempt(scored, strength=strength) for strength in (0.0, 0.3, 0.9, 2.0)]
        for weaker, stronger in itertools.pairwise(steps):
            assert (stronger <= weaker).all()
        assert (steps[-1] >= 0).all()
        assert torch.equal(steps[-1][..., 0], scored.values[..., 0])  # nothing came before
    assert (redundancy.cma(scored, strength=5.0) > 0).sum() > (
        redundancy.streaming_submodular(scored, strength=5.0) > 0
    ).sum()


def test_tau_is_the_geometric_mean_of_the_distances_of_hubs() -> None:
    scores = torch.full((1, 3, 60), 0.1)
    scores -= torch.arange(60) * 1e-4  # no ties
    scores[0, 0, [9, 19, 29, 39, 49, 59]] = 1.0
    scores[0, 0, 0] = 0.9
    scores[0, 2] = 0.0
    tau = redundancy.hub_distance(Scored.of(scores), 61)
    positions = np.flatnonzero(hubs(scores.numpy(), 61)[0, 0])
    assert float(tau[0, 0]) == pytest.approx(np.exp(np.log(np.diff(positions)).mean()), rel=1e-6) == 10
    assert tau[0, 1] == 60  # one hub
    assert tau[0, 2] == 1  # all are


def test_prominence_spares_what_stands_high() -> None:
    scores = torch.tensor([0.1, 0.2, 0.8, 0.8, 0.4, 0.1, 0.0]).view(1, 1, 7)
    scored = Scored.of(scores)
    z = marginal_gain.prominence(scored, kernel=3, strength=1.0)[0, 0]
    np.testing.assert_allclose(z, [0.05, 0.05, 0.8, 0.8, 0.2, 0.025, 0.0], rtol=1e-6)
    lifted = marginal_gain.prominence(scored, kernel=3, strength=-1.0)[0, 0]
    np.testing.assert_allclose(lifted, [0.2, 0.8, 0.8, 0.8, 0.8, 0.4, 0.0], rtol=1e-6)


def test_returns_diminish_within_a_head_and_keep_its_order() -> None:
    scores = uniform(2, 3, 80)
    z = marginal_gain.diminishing_returns(Scored.of(scores), rows=10, strength=0.5)
    assert torch.equal(z.argsort(-1), scores.argsort(-1))
    head = scores[1, 2]
    for t in (0, 40, int(head.argmax())):
        larger = int((head > head[t]).sum())
        assert float(z[1, 2, t]) == pytest.approx(float(head[t]) / (1 + larger / 10) ** 0.5, rel=1e-5)


def test_heads_agree_when_nothing_of_their_own_is_left() -> None:
    scores = hole(uniform(2, 2, 50))
    mean = torch.where(scores.isfinite(), scores, torch.nan).nanmean((0, 1))
    same = marginal_gain.head_agreement(Scored.of(scores), strength=1.0)
    np.testing.assert_allclose(same, mean.expand(2, 2, -1), rtol=1e-5)
    half = marginal_gain.head_agreement(Scored.of(scores), strength=0.5)
    np.testing.assert_allclose(half[0, 1], (scores[0, 1] + mean) / 2, rtol=1e-5)


# ---- the placebo -----------------------------------------------------------------------------------------------------


def test_placebo_discounts_as_many_and_elsewhere() -> None:
    hubkv = HubKVConfig(head_weight_temperature=0.0, gate_power=0.0, sink_tokens=4, window_ratio=0.1)
    scores = uniform(2, 3, 400)
    refined = ablations.refined_scores("fastkvzip_nms", scores, hubkv, 0.9)
    z = placebo(scores, hubkv, 0.9, seed=1)
    kept = lambda x: (x == scores) & x.isfinite()  # noqa: E731
    assert torch.equal(kept(z).sum(-1), kept(refined).sum(-1))
    assert not torch.equal(kept(z), kept(refined))
    assert not torch.equal(kept(placebo(scores, hubkv, 0.9, seed=2)), kept(z))
    assert torch.equal(kept(z) | (z == 0.5 * scores) | z.isinf(), torch.ones_like(z, dtype=torch.bool))


def test_placebo_without_hubs_to_move_is_refine() -> None:
    """k = 1 makes every token a hub: only head weights and gate are left, and they are those of the refine stage."""
    scores = hole(uniform(3, 4, 500)) ** 2
    hubkv = HubKVConfig(nms_kernel=1)
    z, _ = ops.refine(
        scores, torch.tensor([hubkv.alpha(0.7)]), torch.tensor([10], dtype=torch.int32), 1, 0.5, 0.5, 0.8, 1.2, 4
    )
    got = placebo(scores, hubkv, 0.7)
    assert torch.equal(got.view(torch.int32), z.view(torch.int32))


# ---- our own preset --------------------------------------------------------------------------------------------------


def test_the_preset_is_the_idea() -> None:
    scores, name = uniform(2, 3, 300), "prominence_k5_s2"
    z = ablations.refined_scores(name, scores, HubKVConfig(), 0.9)
    want = marginal_gain.prominence(Scored.of(scores), kernel=5, strength=2.0)
    inner = z.isfinite()
    assert 0.5 < inner.float().mean() < 1
    assert torch.equal(z[inner], want[inner])
    head = scores[1, 1]
    for t in (40, int(head.argmax()), 200):
        best = head[t - 2 : t + 3].max()
        assert float(z[1, 1, t]) == float(head[t] * (head[t] / best) ** 2)


def test_a_window_wider_than_the_text_is_the_text() -> None:
    scores = uniform(1, 2, 9)
    assert torch.equal(prominent(scores, 2**31 - 1, 1.0), scores * (scores / scores.amax(-1, keepdim=True)))


def test_prominence_leaves_what_is_no_number_to_the_refine_stage() -> None:
    scores = hole(uniform(2, 2, 60))
    z = prominent(scores, 5, 2.0)
    broken = ~scores.isfinite()
    assert torch.equal(z[broken].view(torch.int32), scores[broken].view(torch.int32))
    assert z[~broken].isfinite().all()
