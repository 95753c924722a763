# SPDX-License-Identifier: Apache-2.0
"""Budget allocators: exact sums, protected rows, and the order that each rule promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import ops, reference
from hubkv_trt.ablations.head_budgets import HEAD_BUDGETS, allocate, select_rows


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape, np.float32))


@pytest.mark.parametrize("name", HEAD_BUDGETS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_sum_to_the_budget(name: str, data: st.DataObject) -> None:
    layers, heads, tokens = (data.draw(st.integers(1, n)) for n in (3, 4, 30))
    refined = uniform(layers, heads, tokens, seed=data.draw(st.integers(0, 99))) ** data.draw(st.sampled_from([1, 8]))
    if data.draw(st.booleans()):
        refined[0] = data.draw(st.sampled_from([0.0, 0.5, -0.5, float("nan"), float("-inf")]))
    refined[..., : data.draw(st.integers(0, tokens))] = torch.inf
    groups = data.draw(st.sampled_from([1, layers, layers * heads]))
    floor = torch.isposinf(refined).sum(-1)
    pairs = layers * heads * tokens // groups
    k = data.draw(st.integers(int(floor.view(groups, -1).sum(1).max()), pairs))
    rows = allocate(name, refined, groups, k)
    assert torch.equal(rows.view(groups, -1).sum(1), torch.full((groups,), k))
    assert (floor <= rows).all()
    assert (rows <= tokens).all()
    positions, offsets = select_rows(refined, rows)
    assert torch.equal(offsets.diff(), rows.flatten())
    assert len(positions) == groups * k


def test_rows_follow_the_weights() -> None:
    """Mass 1 : 2 : 5 above two protected rows, in a budget that rounds: 10 = 2 + 2 + 2 + 4 * (1, 2, 5) / 8."""
    refined = torch.full((1, 3, 20), 0.1) * torch.tensor([1.0, 2.0, 5.0])[:, None]
    refined[..., :2] = torch.inf
    assert allocate("head_budget_waterfill", refined, 1, 10).tolist() == [[3, 3, 4]]
    assert allocate("head_budget_waterfill", refined, 1, 6 + 16).tolist() == [[4, 6, 12]]
    # The third is full at 20; the others share the rest 1 : 2.
    assert allocate("head_budget_waterfill", refined, 1, 6 + 18 + 12).tolist() == [[6, 10, 20]]


def test_weights_are_their_formulas() -> None:
    x = uniform(4, 200) ** torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None]
    weights = {name: rule(x.double(), torch.ones_like(x, dtype=torch.bool)) for name, rule in HEAD_BUDGETS.items()}
    for head, s in enumerate(x.double().numpy()):
        p = s / s.sum()
        c, spread = s.std() / (s.mean() + 1e-6), np.exp(-(p * np.log(p)).sum())
        want = {"waterfill": s.sum(), "selectivity": c, "entropy": spread, "hybrid": np.sqrt(c * spread)}
        for name, value in want.items():
            assert float(weights[f"head_budget_{name}"][head]) == pytest.approx(value, rel=1e-9)
    # From flat to peaked: selectivity rises; mass and spread fall.
    assert (weights["head_budget_selectivity"].diff() > 0).all()
    assert (weights["head_budget_entropy"].diff() < 0).all()
    assert (weights["head_budget_waterfill"].diff() < 0).all()


@pytest.mark.parametrize("name", HEAD_BUDGETS)
def test_equal_heads_share_equally_and_the_first_take_the_rest(name: str) -> None:
    refined = uniform(1, 1, 50).expand(2, 3, -1).contiguous()
    assert allocate(name, refined, 1, 62).flatten().tolist() == [11, 11, 10, 10, 10, 10]


@pytest.mark.parametrize("per_head", [0, 1, 7, 40])
def test_the_same_rows_for_every_head_are_select(per_head: int) -> None:
    refined = (uniform(2, 3, 40) * 8).round() / 8  # many ties
    refined[0, 0, 3:9] = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, 0.0, -0.0])
    rows = torch.full((2, 3), per_head)
    for got, want in zip(select_rows(refined, rows), ops.select(refined, 6, per_head), strict=True):
        assert torch.equal(got, want)
    want = reference.select(refined.numpy(), 6, per_head)
    assert np.array_equal(select_rows(refined, rows)[0].numpy(), want[0])


def test_wrong_input_is_refused() -> None:
    refined = uniform(1, 2, 10)
    refined[..., :3] = torch.inf
    with pytest.raises(ValueError, match="head budget: 'head_budget_magic' is not one of head_budget_waterfill"):
        allocate("head_budget_magic", refined, 1, 10)
    with pytest.raises(ValueError, match=r"rows_per_group: 5 is not in 6\.\.20"):
        allocate("head_budget_entropy", refined, 1, 5)
    with pytest.raises(ValueError, match=r"rows_per_group: 21 is not in 6\.\.20"):
        allocate("head_budget_entropy", refined, 1, 21)
