# SPDX-License-Identifier: Apache-2.0
"""rewrite: the kept candidates of segment and tail as a new segment, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding_cache import SINKS, DecodingCache, decoding_cache
from hubkv_trt import ops
from ragged_cache import as_numpy, new_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def selection(decoding: DecodingCache, share: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """candidate_positions, and indices and head_offsets that keep about that share of each head, at random."""
    _, _, places, offsets = ops.score_window(*decoding.score_arguments(decoding.queries(1, 1)))
    scores = torch.rand(places.numel(), generator=torch.Generator().manual_seed(seed))
    counts = (offsets.diff() * share).round().to(torch.int32)
    return places, *ops.select_ragged(scores, places, offsets, counts, int(counts.sum()), SINKS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 256])
@pytest.mark.parametrize("row_bias", [False, True])
def test_equals_oracle(dtype: torch.dtype, head_dim: int, row_bias: bool) -> None:
    decoding = decoding_cache(dtype=dtype, head_dim=head_dim, row_bias=row_bias)
    for share in (0.0, 0.3, 1.0):
        decoding.rewrite(*selection(decoding, share), bias=row_bias)


@pytest.mark.parametrize(("rows", "tail", "tail_tokens"), [(None, 40, 33), (30, 0, 0), (0, 20, 16), (2, 3, 1)])
@pytest.mark.parametrize("page_tokens", [1, 5, 16])
def test_segment_or_tail_alone(rows: int | None, tail: int, tail_tokens: int, page_tokens: int) -> None:
    decoding = decoding_cache(rows, tail, tail_tokens, head_dim=16, page_tokens=page_tokens)
    decoding.rewrite(*selection(decoding, 0.6))


def test_large() -> None:
    decoding = decoding_cache(rows=900, tail=300, tail_tokens=256, num_layers=3, row_bias=True)
    decoding.rewrite(*selection(decoding, 0.5))


def rewritten(decoding: DecodingCache, places: Tensor, indices: Tensor, offsets: Tensor) -> DecodingCache:
    """The sequence with the new segment in place of the old one and without the tail tokens that were candidates, as a
    runtime makes it: double-buffered in the same arena, whole pages given back.
    """
    k, v, positions, bias = decoding.rewrite(places, indices, offsets)
    cache = decoding.cache
    parts, table, end = [], [], -(-cache.arena.numel() // 256) * 256
    for x in (k, v, offsets, bias):
        data = x.contiguous().view(torch.uint8).flatten()
        table.append(end)
        parts.append((end, data))
        end += -(-data.numel() // 256) * 256
    arena = torch.zeros(end, dtype=torch.uint8)
    arena[: cache.arena.numel()] = cache.arena
    for at, data in parts:
        arena[at : at + data.numel()] = data
    gone = decoding.tail_tokens // cache.page_tokens
    assert gone * cache.page_tokens == decoding.tail_tokens
    new = replace(
        cache,
        arena=arena,
        segments=torch.tensor([table]),
        block_table=cache.block_table[:, gone:].contiguous(),
        tail_lengths=cache.tail_lengths - decoding.tail_tokens,
    )
    return DecodingCache(new, positions, 0, decoding.tail_base + decoding.tail_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rewrite_of_everything_changes_no_attention(dtype: torch.dtype) -> None:
    decoding = decoding_cache(dtype=dtype, row_bias=True)
    places, indices, offsets = selection(decoding, 1.0)
    after = rewritten(decoding, places, indices, offsets)
    rows = new_rows(decoding.cache, 2, 3)
    for layer in range(2):
        want, got = (x.attend(*rows, layer=layer).float() for x in (decoding.cache, after.cache))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_rewrite_attends_as_a_mask_does() -> None:
    """What was evicted, masked out by a bias of -inf in place: the layouts `rewrite` and `mask` are interchangeable."""
    decoding = decoding_cache(row_bias=True)
    whole = rewritten(decoding, *selection(decoding, 1.0))
    places, indices, offsets = selection(decoding, 0.4)
    after = rewritten(decoding, places, indices, offsets)
    at = int(whole.cache.segments[0, 3])
    bias = whole.cache.arena[at : at + 4 * whole.positions.numel()].view(torch.float32)
    head_rows = whole.cache.arena[int(whole.cache.segments[0, 2]) :][: 8 * 5].view(torch.int64)
    kept = torch.zeros(len(bias), dtype=torch.bool)
    for head in range(4):
        kept[head_rows[head] + indices[offsets[head] : offsets[head + 1]].long()] = True
    bias[~kept] = -torch.inf
    rows = new_rows(decoding.cache, 2, 3)
    for layer in range(2):
        want, got = (x.attend(*rows, layer=layer) for x in (whole.cache, after.cache))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_second_compression_goes_on_from_the_first() -> None:
    decoding = decoding_cache(row_bias=True)
    after = rewritten(decoding, *selection(decoding, 0.5))
    assert np.all(np.diff(after.positions.numpy()[: int(selection(decoding, 0.5)[2][1])]) > 0)
    again = after.rewrite(*selection(after, 0.5))
    assert again[0].shape[0] <= after.positions.numel() // 2 + 2


def test_indices_outside_give_rows_without_weight() -> None:
    decoding = decoding_cache(head_dim=8, num_layers=1, num_kv_heads=1)
    places, _, _ = selection(decoding, 1.0)
    indices = torch.tensor([-1, 0, 10**6, 2**31 - 1, -(2**31)], dtype=torch.int32)
    k, _, positions, bias = decoding.rewrite(places, indices, torch.tensor([0, 5]))
    assert [bool(row.any()) for row in k] == [False, True, False, False, False]
    assert bias.tolist() == [-torch.inf, 0, -torch.inf, -torch.inf, -torch.inf]
    assert positions.tolist() == [0, int(places[0]), 0, 0, 0]


@pytest.mark.parametrize("offsets", [[0, 3, 9], [-4, 3, 6], [0, 7, 3], [6, 6, 6], [2**62, 1, 2**63 - 1], [5, 4, 3]])
def test_wrong_offsets_stay_inside(offsets: list[int]) -> None:
    decoding = decoding_cache(head_dim=8, num_layers=1)
    places, _, _ = selection(decoding, 1.0)
    cache = decoding.cache
    guarded = torch.full((2, 6 + 64, 8), 7.0)
    inside = guarded[:, 32:38]
    sizes = (decoding.positions.numel(), decoding.tail_tokens, decoding.tail_base, 1, cache.page_tokens)
    ops.rewrite_into(
        places,
        torch.arange(6, dtype=torch.int32),
        torch.tensor(offsets),
        *decoding.tables,
        *(*sizes, cache.page_base, inside[0], inside[1]),
        torch.zeros(6, dtype=torch.int32),
        None,
    )
    assert bool((guarded[:, :32] == 7).all())
    assert bool((guarded[:, 38:] == 7).all())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    decoding = decoding_cache(rows=200, num_layers=4, head_dim=128)
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        decoding.rewrite(*selection(decoding, 0.7))
    finally:
        ops.set_num_threads(before)


def test_pages_that_are_missing_give_rows_without_weight() -> None:
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1, head_dim=8)
    places, indices, offsets = selection(decoding, 1.0)
    cache = decoding.cache
    table = cache.block_table.clone()
    table[0, 1] = 10**6
    sizes = (0, decoding.tail_tokens, decoding.tail_base, 1, cache.page_tokens, cache.page_base)
    k, v = (torch.full((48, 8), 7.0) for _ in "kv")
    positions, bias = torch.full((48,), 7, dtype=torch.int32), torch.full((48,), 7.0)
    inputs = (places, indices, offsets, cache.arena, cache.segments, table)
    ops.rewrite_into(*inputs, *sizes, k, v, positions, bias)
    missing = slice(16, 32)
    assert not k[missing].any()
    assert not v[missing].any()
    assert bool(torch.isneginf(bias[missing]).all())
    assert bool((bias[:16] == 0).all())
    assert np.array_equal(as_numpy(positions[32:]), as_numpy(places[32:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.zeros(3, dtype=torch.int32)}, r"candidate_positions: shape \[3\] is not \["),
        ({1: torch.zeros(9)}, "indices: dtype torch.float32"),
        ({2: torch.zeros(5, dtype=torch.int32)}, "head_offsets: dtype torch.int32"),
        ({2: torch.zeros(1, dtype=torch.int64)}, "num_layers: 2 does not divide the 0 heads"),
        ({3: torch.zeros(9)}, "arena: dtype torch.float32"),
        ({4: torch.zeros(2, 4, dtype=torch.int64)}, r"segments: shape \[2, 4\]"),
        ({5: torch.zeros(5, dtype=torch.int32)}, r"block_table: shape \[5\]"),
        ({6: -1, 0: torch.zeros(4 * 32 - 1, dtype=torch.int32)}, "K: -1"),
        ({6: 0, 7: 100, 0: torch.zeros(400, dtype=torch.int32)}, "tailTokens: 100 is not in 0..80"),
        ({8: -1}, "tailBase: -1"),
        ({9: 3}, "num_layers: 3 does not divide"),
        ({10: 0}, "P: 0"),
        ({11: 8}, "pageBase: 8"),
        ({12: torch.zeros(9, 8, 1)}, r"k_rows: shape \[9, 8, 1\]"),
        ({12: torch.zeros(8, 8)}, r"k_rows: shape \[8, 8\]"),
        ({13: torch.zeros(9, 16)}, r"v_rows: shape \[9, 16\]"),
        ({13: torch.zeros(9, 8).half()}, "v_rows: dtype torch.float16"),
        ({14: torch.zeros(8, dtype=torch.int32)}, r"positions: shape \[8\]"),
        ({15: torch.zeros(8)}, r"row_bias: shape \[8\]"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    decoding = decoding_cache(head_dim=8)
    places, _, _ = selection(decoding, 1.0)
    cache = decoding.cache
    sizes = (decoding.positions.numel(), decoding.tail_tokens, decoding.tail_base, 2, cache.page_tokens)
    arguments = [
        places,
        torch.zeros(9, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int64),
        *decoding.tables,
        *(*sizes, cache.page_base, torch.zeros(9, 8), torch.zeros(9, 8)),
        torch.zeros(9, dtype=torch.int32),
        torch.zeros(9),
    ]
    for index, value in changes.items():
        arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.rewrite_into(*arguments)
