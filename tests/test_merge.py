# SPDX-License-Identifier: Apache-2.0
"""merge: evicted candidates as a few rows that keep their log-sum-exp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding_cache import SINKS, TOLERANCES, DecodingCache, decoding_cache, segment_of
from hubkv_trt import ops, reference


def selection(decoding: DecodingCache, share: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """raw and candidate_positions; indices and head_offsets that keep about that share of each head."""
    raw, _, places, offsets = ops.score_window(*decoding.score_arguments(decoding.queries(4, 2)))
    scores = torch.rand(places.numel(), generator=torch.Generator().manual_seed(seed))
    counts = (offsets.diff() * share).round().to(torch.int32)
    return raw, places, *ops.select_ragged(scores, places, offsets, counts, int(counts.sum()), SINKS)


def check(decoding: DecodingCache, share: float, merged: int, seed: int = 0) -> list[Tensor]:
    return decoding.merge(*selection(decoding, share, seed), merged)


def arguments(decoding: DecodingCache, share: float, merged: int) -> tuple[list, list[Tensor]]:
    """Of merge_into: inputs and outputs."""
    raw, places, indices, head_offsets = selection(decoding, share)
    cache = decoding.cache
    sizes = (decoding.positions.numel(), decoding.tail_tokens, decoding.tail_base, cache.num_layers)
    inputs = [raw, places, indices, head_offsets, *decoding.tables, *sizes, cache.page_tokens, cache.page_base, merged]
    return inputs, segment_of(len(indices) + decoding.heads * merged, cache.head_dim, cache.dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [8, 64, 136, 256])
def test_equals_oracle(dtype: torch.dtype, head_dim: int) -> None:
    decoding = decoding_cache(dtype=dtype, head_dim=head_dim, row_bias=True)
    for share, merged in ((0.5, 3), (0.0, 1), (0.9, 40)):
        check(decoding, share, merged)


def test_large_groups() -> None:
    check(decoding_cache(rows=600, tail=300, tail_tokens=288, num_layers=1, row_bias=True), 0.3, 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.one_of(st.none(), st.integers(0, 60)),
    tail=st.integers(0, 50),
    share=st.floats(0, 1),
    merged=st.integers(0, 9),
    page_tokens=st.sampled_from([1, 5, 16]),
)
def test_equals_oracle_on_anything(seed, rows, tail, share, merged, page_tokens) -> None:
    options = {"head_dim": 16, "page_tokens": page_tokens, "row_bias": seed % 2 == 0 and rows is not None}
    decoding = decoding_cache(rows, tail, tail - seed % (tail + 1), seed=seed, **options)
    check(decoding, share, merged, seed)


def test_no_more_than_the_log_sum_exp() -> None:
    """Of any query; and as much for the one whose softmax the weights are."""
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1)
    q = decoding.queries(1, 1, seed=5)
    raw, _, places, _ = ops.score_window(*decoding.score_arguments(q))
    cache = decoding.cache
    nothing = (torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    sizes = (0, 48, decoding.tail_base, 1, cache.page_tokens, cache.page_base, 4)
    k, v, positions, bias = segment_of(4, cache.head_dim, cache.dtype)
    ops.merge_into(raw, places, *nothing, *decoding.tables, *sizes, k, v, positions, bias)
    tables = (x.numpy() for x in decoding.tables)
    ((keys, _, _),) = reference.candidates.rows(*tables, 48, 1, 1, cache.page_tokens, cache.page_base, 64, np.float32)
    keys = torch.from_numpy(keys).double().view(4, 12, 64)
    for seed in range(50):
        other = decoding.queries(1, 1, seed=seed).double().flatten() * (0.1 + seed / 10)
        members = (keys @ other / 8).logsumexp(dim=1)
        assert bool((k.double() @ other / 8 + bias <= members + 1e-4).all())
    own = q.double().flatten()
    torch.testing.assert_close(k.double() @ own / 8 + bias, (keys @ own / 8).logsumexp(dim=1), rtol=1e-5, atol=1e-5)
    assert positions.tolist() == places[11::12].tolist()


def test_a_group_of_one_is_its_row() -> None:
    decoding = decoding_cache(rows=None, tail=16, tail_tokens=16, num_layers=1, num_kv_heads=1)
    k, v, positions, bias = check(decoding, 0.0, 16)
    page = int(decoding.cache.block_table[0, 0])
    size = 2 * 16 * 64 * 4
    data = decoding.cache.arena[decoding.cache.page_base + page * size :][:size].view(torch.float32).view(2, 16, 64)
    torch.testing.assert_close(torch.stack([k, v]), data, rtol=0, atol=0)
    assert positions.tolist() == list(range(decoding.tail_base, decoding.tail_base + 16))
    assert bias.tolist() == [0.0] * 16


def test_equal_rows_merge_without_loss() -> None:
    """n equal rows are one with bias log n, whatever their weights; merged again with others they keep it."""
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1)
    cache = decoding.cache
    cache.arena[cache.page_base :].view(torch.float32)[:] = 0.25
    raw, places = torch.zeros(48), torch.arange(48, dtype=torch.int32)
    nothing = (torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    sizes = (0, 48, decoding.tail_base, 1, cache.page_tokens, cache.page_base, 2)
    k, v, _, bias = segment_of(2, cache.head_dim, cache.dtype)
    ops.merge_into(raw, places, *nothing, *decoding.tables, *sizes, k, v, places[:2].clone(), bias)
    assert bool((k == 0.25).all())
    assert bool((v == 0.25).all())
    torch.testing.assert_close(bias, torch.full((2,), 24.0).log())


def test_rows_that_are_masked_or_missing_do_not_count() -> None:
    decoding = decoding_cache(rows=20, num_layers=1, num_kv_heads=1, head_dim=8, row_bias=True)
    at = int(decoding.cache.segments[0, 3])
    decoding.cache.arena[at : at + 4 * decoding.positions.numel()].view(torch.float32)[:] = -torch.inf
    *_, bias = check(decoding, 0.0, 4)
    assert torch.isneginf(bias).any()
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1, head_dim=8)
    inputs, (k, v, positions, bias) = arguments(decoding, 0.0, 3)
    inputs[6] = torch.full_like(inputs[6], -1)
    ops.merge_into(*inputs, k, v, positions, bias)
    assert not bool(k.any() or v.any() or positions.any())
    assert bool(torch.isneginf(bias).all())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    decoding = decoding_cache(num_layers=4)
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        check(decoding, 0.5, 5)
    finally:
        ops.set_num_threads(before)


@pytest.mark.parametrize("offsets", [[0, 9, 6], [-5, 3, 6], [2**62, -(2**62), 6], [6, 6, 6], [3, 0, 2**63 - 1]])
def test_wrong_offsets_stay_inside(offsets: list[int]) -> None:
    decoding = decoding_cache(head_dim=8, num_layers=1)
    inputs, _ = arguments(decoding, 1.0, 0)
    inputs[2], inputs[3], inputs[-1] = torch.arange(6, dtype=torch.int32), torch.tensor(offsets), 2
    guarded = torch.full((2, 10 + 64, 8), 7.0)
    inside = guarded[:, 32:42]
    ops.merge_into(*inputs, inside[0], inside[1], torch.zeros(10, dtype=torch.int32), torch.zeros(10))
    assert bool((guarded[:, :32] == 7).all())
    assert bool((guarded[:, 42:] == 7).all())


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3), r"logits: shape \[3\]"),
        (0, torch.zeros(3).double(), "logits: dtype torch.float64"),
        (13, -1, r"k_rows: shape|mergedRows: -1"),
        (14, torch.zeros(3, 8), r"k_rows: shape \[3, 8\]"),
        (15, torch.zeros(3, 8), r"v_rows: shape \[3, 8\]"),
        (16, torch.zeros(3, dtype=torch.int32), r"positions: shape \[3\]"),
        (17, torch.zeros(3), r"row_bias: shape \[3\]"),
    ],
)
def test_refuses(index: int, value: object, message: str) -> None:
    inputs, results = arguments(decoding_cache(head_dim=8), 0.5, 2)
    changed = [*inputs, *results]
    changed[index] = value
    with pytest.raises(ValueError, match=message):
        ops.merge_into(*changed)
