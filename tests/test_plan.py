# SPDX-License-Identifier: Apache-2.0
"""plan: every compact row in exactly one item, items no longer than they must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import ops, reference
from hubkv_trt.reference.plan import head_rows, rows_per_item
from ragged_cache import RaggedCache, random_cache


def check(cache: RaggedCache, capacity: int, min_rows: int) -> list[set[tuple[int, ...]]]:
    """The items of each layer, after they were found to be what the header says."""
    work, work_count = ops.plan(cache.arena, cache.segments, cache.num_layers, cache.num_kv_heads, capacity, min_rows)
    assert work.shape == (cache.num_layers, capacity, 4)
    assert work.dtype == work_count.dtype == torch.int32
    counts = head_rows(cache.arena.numpy(), cache.segments.numpy(), cache.num_layers, cache.num_kv_heads)
    layers = []
    for layer in range(cache.num_layers):
        assert 0 <= work_count[layer] <= capacity
        items = work[layer, : work_count[layer]].tolist()
        longest = rows_per_item(counts[:, layer], capacity, min_rows)
        covered = {(b, h): np.zeros(n, int) for (b, h), n in np.ndenumerate(counts[:, layer])}
        for sequence, head, first, rows in items:
            assert 0 < rows <= longest
            assert first + rows <= counts[sequence, layer, head]
            covered[sequence, head][first : first + rows] += 1
        assert all(np.all(n == 1) for n in covered.values())
        layers.append({tuple(item) for item in items})
    want, want_count = reference.plan(
        cache.arena.numpy(), cache.segments.numpy(), cache.num_layers, cache.num_kv_heads, capacity, min_rows
    )
    assert work_count.tolist() == want_count.tolist()
    assert layers == [{tuple(i) for i in want[n, : want_count[n]].tolist()} for n in range(cache.num_layers)]
    return layers


@pytest.mark.parametrize(
    "sequences",
    [
        [(100, 0)],
        [(None, 0)],
        [(0, 0)],
        [(1, 5), (None, 3), (1000, 0), (17, 40)],
        [(50, 1)] * 16,
    ],
)
@pytest.mark.parametrize("spare", [0, 1, 7, 500])
@pytest.mark.parametrize("min_rows", [1, 16, 17, 64, 1000, 10**9, 2**62])
def test_equals_oracle(sequences: list[tuple[int | None, int]], spare: int, min_rows: int) -> None:
    cache = random_cache(sequences=sequences, num_layers=3, head_dim=8)
    capacity = len(sequences) * 2 + spare
    if min_rows > 2**31:  # as one item per head
        layers = check(cache, capacity, 10**6)
        work, work_count = ops.plan(cache.arena, cache.segments, 3, 2, capacity, min_rows)
        assert [{tuple(i) for i in work[n, : work_count[n]].tolist()} for n in range(3)] == layers
    else:
        check(cache, capacity, min_rows)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.one_of(st.none(), st.integers(0, 400)), min_size=1, max_size=6),
    heads=st.integers(1, 4),
    spare=st.integers(0, 60),
    min_rows=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_equals_oracle_on_anything(rows, heads, spare, min_rows, seed) -> None:
    cache = random_cache(
        sequences=[(n, 0) for n in rows], num_layers=2, num_kv_heads=heads, head_dim=8, seed=seed, max_pages=0
    )
    check(cache, len(rows) * heads + spare, min_rows)


def test_capacity_is_used() -> None:
    """One long sequence alone is cut, so that all threads find work."""
    cache = random_cache(sequences=[(5000, 0)], num_layers=1, head_dim=8, seed=4)
    few, many = check(cache, 4, 16)[0], check(cache, 400, 16)[0]
    assert len(few) <= 4
    assert 300 < len(many) <= 400


A, S = torch.zeros(1000, dtype=torch.uint8), torch.full((2, 4), -1)


@pytest.mark.parametrize(
    ("arena", "segments", "layers", "heads", "capacity", "rows", "message"),
    [
        (A, S, 0, 2, 4, 16, "L: 0"),
        (A, S, -1, 2, 4, 16, "L: -1"),
        (A, S, 1, 0, 4, 16, "Hkv: 0"),
        (A, S, 1, 2, 3, 16, "capacity: 3"),
        (A, S, 1, 2, -3, 16, "capacity: -3"),
        (A, S, 1, 2, 4, 0, "minRowsPerItem: 0"),
        (A.int(), S, 1, 2, 4, 16, "arena: dtype torch.int32"),
        (A, S.int(), 1, 2, 4, 16, "segments: dtype torch.int32"),
        (A, S[:, :3].contiguous(), 1, 2, 4, 16, r"segments: shape \[2, 3\]"),
        (A, S[:0], 1, 2, 4, 16, "B: 0"),
        (A, S.t().contiguous().t(), 1, 2, 4, 16, "segments: strides"),
        (A[::2], S, 1, 2, 4, 16, "arena: strides"),
    ],
)
def test_refuses(arena, segments, layers, heads, capacity, rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        ops.plan(arena, segments, layers, heads, capacity, rows)
