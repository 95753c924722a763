# SPDX-License-Identifier: Apache-2.0
"""select: exactly the K largest of each group, equal to a stable sort whatever the values are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hubkv_trt import HubKVConfig, ModelConfig, Scope, ops, reference
from hubkv_trt.config import budget


def both(refined: np.ndarray, num_groups: int, rows_per_group: int) -> tuple[np.ndarray, np.ndarray]:
    """What the library gives, after it was found equal to the oracle."""
    refined = np.asarray(refined, np.float32)
    positions, head_offsets = ops.select(torch.from_numpy(refined), num_groups, rows_per_group)
    want_positions, want_offsets = reference.select(refined, num_groups, rows_per_group)
    assert positions.dtype == torch.int32
    assert head_offsets.dtype == torch.int64
    assert np.array_equal(head_offsets.numpy(), want_offsets)
    assert np.array_equal(positions.numpy(), want_positions)
    return positions.numpy(), head_offsets.numpy()


def check_properties(refined: np.ndarray, num_groups: int, rows_per_group: int) -> None:
    """The statement of the stage, without a sort."""
    positions, offsets = both(refined, num_groups, rows_per_group)
    layers, heads, num_tokens = refined.shape
    kept = np.zeros((layers * heads, num_tokens), bool)
    for head in range(layers * heads):
        rows = positions[offsets[head] : offsets[head + 1]]
        assert np.all(np.diff(rows) > 0)
        kept[head, rows] = True
    values = np.where(np.isnan(refined), -np.inf, refined).reshape(num_groups, -1)
    kept = kept.reshape(num_groups, -1)
    assert np.all(kept.sum(axis=1) == rows_per_group)
    for group, mask in zip(values, kept, strict=True):
        if mask.any() and not mask.all():
            worst = group[mask].min()
            assert worst >= group[~mask].max()
            # Of the values equal to the worst that is kept, the first ones are kept.
            ties = mask[group == worst]
            assert np.array_equal(ties, np.arange(len(ties)) < ties.sum())


VALUES = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3.4028234663852886e38]),
    st.integers(0, 3).map(float),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)))
def test_equals_oracle_on_anything(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    layers, heads, _ = shape
    size = math.prod(shape)
    values = data.draw(st.lists(VALUES, min_size=size, max_size=size))
    num_groups = data.draw(st.sampled_from([g for g in range(1, layers * heads + 1) if layers * heads % g == 0]))
    rows = data.draw(st.integers(0, size // num_groups))
    check_properties(np.array(values, np.float32).reshape(shape), num_groups, rows)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3000)),
    distinct=st.sampled_from([1, 2, 17, 1000, 2**30]),
    scope=st.sampled_from(["model", "layer", "head"]),
    fraction=st.floats(0, 1),
    protected=st.floats(0, 1),
)
@example(seed=0, shape=(4, 4, 3000), distinct=2, scope="model", fraction=0.5, protected=0.0)
def test_equals_oracle_with_ties(seed, shape, distinct, scope, fraction, protected) -> None:
    rng = np.random.default_rng(seed)
    refined = (rng.integers(0, distinct, shape) / distinct - 0.25).astype(np.float32)
    refined[:, :, : int(shape[2] * protected * 0.3)] = np.inf
    refined[rng.random(shape) < 0.01] = np.nan
    num_groups = {"model": 1, "layer": shape[0], "head": shape[0] * shape[1]}[scope]
    both(refined, num_groups, int(fraction * refined.size / num_groups))


@pytest.mark.parametrize("rows", [0, 1, 2, 499, 500, 501, 999, 1000])
@pytest.mark.parametrize("value", [0.5, np.inf, -np.inf, np.nan, 0.0, -0.0])
def test_all_values_equal_keep_the_first(rows: int, value: float) -> None:
    positions, offsets = both(np.full((2, 2, 250), value, np.float32), 1, rows)
    assert np.array_equal(positions, np.arange(rows) % 250)
    assert np.array_equal(offsets, np.minimum(np.arange(5) * 250, rows))


def test_zeros_of_either_sign_are_equal() -> None:
    positions, _ = both(np.array([[[0.0, -0.0, -1.0, -0.0, 0.0, -1e-45]]], np.float32), 1, 3)
    assert positions.tolist() == [0, 1, 3]


def test_nan_ranks_as_minus_infinity() -> None:
    positions, _ = both(np.array([[[np.nan, -np.inf, -3e38, -np.nan, 1.0]]], np.float32), 1, 3)
    assert positions.tolist() == [0, 2, 4]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 1_000_003), (36, 8, 4096), (2, 8, 65_536), (7, 3, 4097)])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.9, 0.9999999])
def test_large(shape: tuple[int, int, int], ratio: float) -> None:
    refined = np.random.default_rng(1).random(shape, np.float32)
    refined[:, :, : shape[2] // 50] = np.inf
    for groups in {1, shape[0]}:
        pairs = refined.size // groups
        both(refined, groups, pairs - math.floor(ratio * pairs))


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_any_alignment(offset: int, groups: int) -> None:
    """Scores that begin between the boundaries of vectors."""
    memory = torch.from_numpy(np.random.default_rng(3).random(offset + 6 * 4099, np.float32).round(3))
    refined = memory[offset:].view(3, 2, 4099)
    positions, offsets = ops.select(refined, groups, 1000)
    want_positions, want_offsets = both(refined.numpy(), groups, 1000)
    assert np.array_equal(positions.numpy(), want_positions)
    assert np.array_equal(offsets.numpy(), want_offsets)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    refined = np.round(np.random.default_rng(2).random((4, 4, 20_000), np.float32), 2)
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        for groups in (1, 4, 16):
            both(refined, groups, refined.size // groups // 3)
    finally:
        ops.set_num_threads(before)


MODEL = ModelConfig(
    "llama", 10, 32, 32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=100_000
)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 49, 50, 333, 2000])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75, 0.999999, np.nextafter(1.0, 0.0)])
def test_budget_keeps_what_is_protected(scope: Scope, num_tokens: int, ratio: float) -> None:
    """refine and select with the budget of a request: the protected are kept, also where they are more than K."""
    config = HubKVConfig(scope=scope)
    b = budget(MODEL, config, num_tokens, ratio)
    scores = np.random.default_rng(num_tokens).random((3, 2, num_tokens), np.float32)
    refined, _ = ops.refine(
        torch.from_numpy(scores),
        torch.tensor([config.alpha(ratio)], dtype=torch.float32),
        torch.tensor([config.window(num_tokens)], dtype=torch.int32),
        config.nms_kernel,
        config.penalty_factor,
        config.head_weight_temperature,
        config.min_head_weight,
        config.max_head_weight,
        config.sink_tokens,
    )
    positions, offsets = both(refined.numpy(), b.num_groups, b.rows_per_group)
    assert len(positions) == offsets[-1] == b.num_rows
    assert 0 < b.num_rows <= 6 * num_tokens
    window = config.window(num_tokens)
    protected = {*range(min(4, num_tokens)), *range(num_tokens - window, num_tokens)}
    for head in range(6):
        assert protected <= set(positions[offsets[head] : offsets[head + 1]].tolist())
    if ratio == 0:
        assert b.num_rows == 6 * num_tokens
        assert b.effective_ratio == 0


@pytest.mark.parametrize(
    ("refined", "groups", "rows", "message"),
    [
        (torch.rand(2, 8), 1, 1, r"refined: shape \[2, 8\]"),
        (torch.rand(2, 2, 8).double(), 1, 1, "refined: dtype torch.float64"),
        (torch.rand(2, 8, 2).mT, 1, 1, "refined: strides"),
        (torch.rand(2, 2, 8), 3, 1, "num_groups: 3"),
        (torch.rand(2, 2, 8), 0, 1, "num_groups: 0"),
        (torch.rand(2, 2, 8), -1, 1, "num_groups: -1"),
        (torch.rand(2, 2, 8), 2, 17, "K: 17"),
        (torch.rand(2, 2, 8), 2, -1, "K: -1"),
        (torch.rand(2, 2, 0), 2, 0, "T: 0"),
    ],
)
def test_refuses(refined: torch.Tensor, groups: int, rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.select(refined, groups, rows)
