# SPDX-License-Identifier: Apache-2.0
"""score_window: the importance of cached rows for the last queries, and what each score makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding_cache import SINKS, DecodingCache, decoding_cache
from hubkv_trt import ops, reference
from ragged_cache import as_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCORES = ["vanilla", "snapkv", "rkv"]


def check(decoding: DecodingCache, q: Tensor, score: str = "vanilla", **options) -> tuple[Tensor, ...]:
    """What the library gives, after it was found equal to the oracle: logits within a tolerance, the rest exactly."""
    arguments = decoding.score_arguments(q, score, **options)
    got = ops.score_window(*arguments)
    want = reference.score_window(*[as_numpy(x) if isinstance(x, Tensor) else x for x in arguments])
    assert [x.dtype for x in got] == [torch.float32, torch.float32, torch.int32, torch.int64]
    np.testing.assert_allclose(got[0].double().numpy(), want[0], rtol=1e-5, atol=1e-5)
    # The least of the shares that rkv takes the logarithm of are a few units of float32.
    tolerance = 1e-3 if score == "rkv" else 1e-5
    shares = [np.exp(x) if score == "rkv" else x for x in (got[1].double().numpy(), want[1])]
    np.testing.assert_allclose(*shares, rtol=tolerance, atol=1e-5)
    assert np.array_equal(got[2].numpy(), want[2])
    assert np.array_equal(got[3].numpy(), want[3])
    return got


def heads_of(offsets: Tensor) -> list[slice]:
    return [slice(first, last) for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_equals_oracle(dtype: torch.dtype, score: str, head_dim: int) -> None:
    decoding = decoding_cache(dtype=dtype, head_dim=head_dim, row_bias=True)
    check(decoding, decoding.queries(5, 3), score)


@pytest.mark.parametrize(("window", "group"), [(1, 1), (1, 16), (32, 3), (11, 3), (256, 1), (33, 2)])
def test_windows_and_groups(window: int, group: int) -> None:
    decoding = decoding_cache(rows=70, head_dim=24, num_kv_heads=1)
    check(decoding, decoding.queries(window, group), "snapkv", scale=0.3)


@pytest.mark.parametrize(
    ("rows", "tail", "tail_tokens"), [(None, 40, 33), (30, 0, 0), (0, 20, 16), (0, 0, 0), (2, 3, 1)]
)
@pytest.mark.parametrize("score", SCORES)
def test_segment_or_tail_alone(rows: int | None, tail: int, tail_tokens: int, score: str) -> None:
    decoding = decoding_cache(rows, tail, tail_tokens, head_dim=16)
    check(decoding, decoding.queries(4, 2), score)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 90),
    tail=st.integers(0, 70),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.integers(1, 12),
    score=st.sampled_from(SCORES),
    kernel=st.sampled_from([1, 5, 7, 255]),
    sinks=st.sampled_from([0, 4, 50, 10**6]),
    page_tokens=st.sampled_from([1, 5, 16]),
)
def test_equals_oracle_on_anything(
    seed, rows, tail, layers, heads, group, window, score, kernel, sinks, page_tokens
) -> None:
    decoding = decoding_cache(
        rows,
        tail,
        tail - seed % (tail + 1),
        seed=seed,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=16,
        page_tokens=page_tokens,
        row_bias=seed % 2 == 0,
    )
    check(decoding, decoding.queries(window, group, seed % 1000), score, pool_kernel=kernel, sink_tokens=sinks, mix=0.3)


def test_importance_sums_to_one() -> None:
    decoding = decoding_cache(rows=100)
    raw, _, _, offsets = check(decoding, decoding.queries(8, 2))
    for head in heads_of(offsets):
        assert raw[head].double().exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_order_of_queries_changes_nothing() -> None:
    decoding = decoding_cache()
    q = decoding.queries(9, 3)
    raw = check(decoding, q)[0]
    again = check(decoding, q.flip(1).contiguous())[0]
    torch.testing.assert_close(raw, again, rtol=1e-5, atol=1e-5)


def test_rows_with_bias_minus_infinity_have_no_importance() -> None:
    """A bit mask over rows: they score as if they were not there."""
    decoding = decoding_cache(rows=30, row_bias=True)
    at = int(decoding.cache.segments[0, 3])
    bias = decoding.cache.arena[at : at + 4 * decoding.positions.numel()].view(torch.float32)
    bias[::3] = -torch.inf
    bias[:100] = -torch.inf
    raw, _, _, _ = ops.score_window(*decoding.score_arguments(decoding.queries(4, 2)))
    raw = raw.numpy()
    assert np.isneginf(raw).any()
    want = reference.score_window(
        *[as_numpy(x) if isinstance(x, Tensor) else x for x in decoding.score_arguments(decoding.queries(4, 2))]
    )[0]
    assert np.array_equal(np.isneginf(raw), np.isneginf(want))
    np.testing.assert_allclose(raw[np.isfinite(raw)], want[np.isfinite(want)], rtol=1e-5, atol=1e-5)


def test_alike_keys_are_redundant() -> None:
    """Of keys that are equally important, rkv ranks last those that are like many others."""
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1, head_dim=64)
    pages = decoding.cache.arena[decoding.cache.page_base :]
    keys = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    keys[20:] = keys[20] + 0.01 * keys[20:]
    size = 2 * 16 * 64 * 4
    for page, number in enumerate(decoding.cache.block_table[0, :3].tolist()):
        rows = pages[number * size : number * size + size // 2].view(torch.float32)
        rows[:] = keys[16 * page : 16 * page + 16].flatten()
    q = torch.zeros(1, 3, 1, 64)
    _, transformed, _, _ = check(decoding, q, "rkv", sink_tokens=0)
    assert transformed[:20].min() > transformed[20:].max()


def test_protected_candidates_neither_pool_nor_are_pooled() -> None:
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1)
    decoding = replace(decoding, tail_base=0)
    raw, transformed, places, _ = check(decoding, decoding.queries(3, 1), "snapkv", pool_kernel=5)
    assert torch.equal(raw[:SINKS], transformed[:SINKS])
    assert transformed[SINKS] == raw[SINKS : SINKS + 3].max()
    assert places.tolist() == list(range(48))


def test_pages_that_are_missing_score_nothing() -> None:
    decoding = decoding_cache(rows=None, tail=48, tail_tokens=48, num_layers=1, num_kv_heads=1)
    decoding.cache.block_table[0, 1] = -1
    raw, _, _, _ = ops.score_window(*decoding.score_arguments(decoding.queries(3, 2)))
    assert torch.isneginf(raw).nonzero().flatten().tolist() == list(range(16, 32))
    assert raw[raw.isfinite()].double().exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    decoding = decoding_cache(num_layers=4)
    before = ops.num_threads()
    want = check(decoding, decoding.queries(7, 3), "rkv")
    try:
        ops.set_num_threads(threads)
        got = ops.score_window(*decoding.score_arguments(decoding.queries(7, 3), "rkv"))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    finally:
        ops.set_num_threads(before)


Q = torch.zeros(2, 3, 4, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: Q[0]}, r"q: shape \[3, 4, 64\]"),
        ({0: Q.double()}, "q: dtype torch.float64"),
        ({0: Q.transpose(1, 2)}, "q: strides"),
        ({0: Q[:, :, :3].contiguous()}, "Hq: 3 is not Hkv = 2 times"),
        ({0: Q.repeat(1, 1, 9, 1)}, "Hq: 36"),
        ({0: Q[:, :0]}, "W: 0"),
        ({0: Q.repeat(1, 86, 1, 1)}, "W: 258"),
        ({0: Q[..., :4].contiguous()}, "D: 4"),
        ({1: torch.zeros(3)}, "positions: dtype torch.float32"),
        ({2: torch.zeros(9)}, "arena: dtype torch.float32"),
        ({3: torch.zeros(2, 4, dtype=torch.int64)}, r"segments: shape \[2, 4\]"),
        ({4: torch.zeros(5, dtype=torch.int32)}, r"block_table: shape \[5\]"),
        ({5: -1}, "tailTokens: -1"),
        ({5: 1000}, "tailTokens: 1000 is not in 0..80"),
        ({6: -1}, "tailBase: -1"),
        ({6: 2**31 - 2}, r"tailBase \+ tailTokens"),
        ({7: 0}, "Hkv: 0"),
        ({8: 0}, "P: 0"),
        ({9: 8}, "pageBase: 8"),
        ({10: "h2o"}, "score: 'h2o' is not one of vanilla, snapkv, rkv"),
        ({11: 4}, "poolKernel: 4"),
        ({11: 257}, "poolKernel: 257"),
        ({12: 1.5}, "mix: 1.5"),
        ({12: float("nan")}, "mix: nan"),
        ({13: -1}, "sinkTokens: -1"),
        ({13: 2**40}, "sink_tokens: 1099511627776"),
        ({14: float("inf")}, "scale: inf"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    decoding = decoding_cache()
    arguments = list(decoding.score_arguments(Q, "snapkv"))
    for index, value in changes.items():
        arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.score_window(*arguments)
