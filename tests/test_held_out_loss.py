# SPDX-License-Identifier: Apache-2.0
"""held_out_loss: what heads lose by keeping fewer candidates, by queries that did not rank them."""

from __future__ import annotations

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
TAIL, TAIL_TOKENS = 60, 32


def arguments(
    decoding: DecodingCache, q: Tensor, ranking: Tensor | None = None, sink_tokens: int = SINKS, scale: float = 0.0
) -> list:
    """Of the op, with candidates that are ranked by the first two queries unless a ranking is given."""
    early = decoding.score_arguments(q[:, :2].contiguous(), sink_tokens=sink_tokens)
    _, transformed, places, _ = ops.score_window(*early)
    cache = decoding.cache
    sizes = (decoding.tail_tokens, int(cache.tail_lengths[0]), cache.num_kv_heads, cache.page_tokens, cache.page_base)
    return [q, transformed if ranking is None else ranking, places, *decoding.tables, *sizes, sink_tokens, scale]


def check(decoding: DecodingCache, q: Tensor, *changes, **options) -> tuple[Tensor, Tensor]:
    """What the library gives, after it was found equal to the oracle: losses within a tolerance, rows exactly."""
    inputs = arguments(decoding, q, *changes, **options)
    got = ops.held_out_loss(*inputs)
    want = reference.held_out_loss(*[as_numpy(x) if isinstance(x, Tensor) else x for x in inputs])
    assert [x.dtype for x in got] == [torch.float32, torch.int32]
    np.testing.assert_allclose(got[0].double().numpy(), want[0], rtol=2e-5, atol=1e-7)
    assert np.array_equal(got[1].numpy(), want[1])
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_equals_oracle(dtype: torch.dtype, head_dim: int) -> None:
    decoding = decoding_cache(40, TAIL, TAIL_TOKENS, dtype=dtype, head_dim=head_dim, row_bias=True)
    loss, rows = check(decoding, decoding.queries(9, 3))
    assert (loss.diff(dim=1) <= 0).all()
    assert (rows.diff(dim=1) >= 0).all()
    assert not loss[:, -1].any()
    assert (loss[:, 0] > 0).any()
    assert rows[:, -1].sum() == decoding.num_candidates


@pytest.mark.parametrize(("window", "group"), [(1, 1), (1, 16), (28, 3), (11, 3), (33, 2), (70, 1)])
def test_windows_and_groups(window: int, group: int) -> None:
    decoding = decoding_cache(70, 24 + window, 24, head_dim=24, num_kv_heads=1)
    q = decoding.queries(window, group)
    generator = torch.Generator().manual_seed(2)
    check(decoding, q, 3 * torch.randn(decoding.num_candidates, generator=generator), scale=0.3)


@pytest.mark.parametrize(
    ("rows", "tail", "tail_tokens"), [(None, 40, 33), (30, 5, 0), (0, 20, 15), (0, 5, 0), (2, 9, 1)]
)
def test_segment_or_tail_alone(rows: int | None, tail: int, tail_tokens: int) -> None:
    decoding = decoding_cache(rows, tail, tail_tokens, head_dim=16)
    check(decoding, decoding.queries(5, 2))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 90),
    tail_tokens=st.integers(0, 40),
    between=st.integers(0, 20),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.integers(2, 12),
    sinks=st.sampled_from([0, 4, 50, 10**6]),
    page_tokens=st.sampled_from([1, 5, 16]),
    spread=st.sampled_from([0.0, 1.0, 5.0, 1e30]),
)
def test_equals_oracle_on_anything(
    seed, rows, tail_tokens, between, layers, heads, group, window, sinks, page_tokens, spread
) -> None:
    decoding = decoding_cache(
        rows,
        tail_tokens + between + window,
        tail_tokens,
        seed=seed,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=16,
        page_tokens=page_tokens,
        row_bias=seed % 2 == 0,
    )
    generator = torch.Generator().manual_seed(seed % 2**31)
    ranking = spread * torch.randn(decoding.num_candidates, generator=generator)
    check(decoding, decoding.queries(window, group, seed % 1000), ranking, sink_tokens=sinks)


def test_levels_are_halves_of_a_unit() -> None:
    decoding = decoding_cache(None, 40, 8, num_layers=1, num_kv_heads=1)
    ranking = torch.tensor([9.0, -2.0, 0.0, -0.49, -0.5, -0.51, -15.49, -15.5])
    decoding = DecodingCache(decoding.cache, decoding.positions, 8, 0)
    _, rows = check(decoding, decoding.queries(4, 2), ranking, sink_tokens=1)
    assert rows[0, :3].tolist() == [1, 3, 5]  # the protected one; 0 and -0.49; -0.5 and -0.51
    assert rows[0, 4:6].tolist() == [5, 6]
    assert rows[0, 30:].tolist() == [6, 7, 8]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_rankings_that_say_nothing(value: float) -> None:
    """Where no finite number is the best, all candidates are of the last level; among others, NaN and -inf are."""
    decoding = decoding_cache(20, TAIL, TAIL_TOKENS)
    ranking = torch.full((decoding.num_candidates,), value)
    _, rows = check(decoding, decoding.queries(6, 2), ranking)
    assert torch.equal(rows[:, 1], rows[:, -1] if value == 0.0 else rows[:, 0])
    ranking[::2] = 1.0
    check(decoding, decoding.queries(6, 2), ranking)


def test_later_rows_take_their_share() -> None:
    """What a query sees beside the candidates is no loss: its own token alone can be all that it looks at."""
    decoding = decoding_cache(None, 48, 32, num_layers=1, num_kv_heads=1, head_dim=64)
    size = 2 * 16 * 64 * 4
    page = int(decoding.cache.block_table[0, 2])
    at = decoding.cache.page_base + page * size
    keys = decoding.cache.arena[at : at + size // 2].view(torch.float32).view(16, 64)
    q = keys[None, -3:, None].clone() * 100
    loss, _ = check(decoding, q.contiguous())
    assert loss[0, 0] < 1e-6
    keys[:] = 0
    loss, _ = check(decoding, 0 * q)
    assert loss[0, 0].item() == pytest.approx(np.mean([(32 / n) ** 2 for n in (46, 47, 48)]), rel=1e-5)


def test_pages_that_are_missing_weigh_nothing() -> None:
    decoding = decoding_cache(None, 64, 32, num_layers=1, num_kv_heads=1)
    inputs = arguments(decoding, torch.zeros(1, 4, 1, 64))
    inputs[1] = torch.zeros(32)
    decoding.cache.block_table[0, 1] = -1
    loss, rows = ops.held_out_loss(*inputs)
    assert rows[0, 1] == 32
    want = np.mean([(16 / n) ** 2 for n in (45, 46, 47, 48)])
    assert loss[0, 0].item() == pytest.approx(want, rel=1e-5)
    decoding.cache.block_table[:] = -1
    assert not ops.held_out_loss(*inputs)[0].any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    decoding = decoding_cache(40, TAIL, TAIL_TOKENS, num_layers=4)
    before = ops.num_threads()
    inputs = arguments(decoding, decoding.queries(7, 3))
    want = check(decoding, decoding.queries(7, 3))
    try:
        ops.set_num_threads(threads)
        got = ops.held_out_loss(*inputs)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    finally:
        ops.set_num_threads(before)


Q = torch.zeros(2, 3, 4, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: Q[0]}, r"q: shape \[3, 4, 64\]"),
        ({0: Q.double()}, "q: dtype torch.float64"),
        ({0: Q[:, :, :3].contiguous()}, "Hq: 3 is not Hkv = 2 times"),
        ({0: Q.repeat(1, 1, 9, 1)}, "Hq: 36"),
        ({0: Q[:, :0]}, "W: 0"),
        ({0: Q.repeat(1, 86, 1, 1)}, "W: 258"),
        ({1: torch.zeros(3)}, "candidate_positions: shape"),
        ({1: torch.zeros(3), 2: torch.zeros(3, dtype=torch.int32)}, "K: -"),
        ({2: torch.zeros(9)}, "candidate_positions: dtype torch.float32"),
        ({3: torch.zeros(9)}, "arena: dtype torch.float32"),
        ({4: torch.zeros(2, 4, dtype=torch.int64)}, r"segments: shape \[2, 4\]"),
        ({5: torch.zeros(5, dtype=torch.int32)}, r"block_table: shape \[5\]"),
        ({7: TAIL_TOKENS + 2}, r"tailLength: 34 is not in 35\.\."),
        ({7: 1000}, "tailLength: 1000 is not in"),
        ({8: 0}, "Hkv: 0"),
        ({9: 0}, "P: 0"),
        ({10: 8}, "pageBase: 8"),
        ({11: -1}, "sinkTokens: -1"),
        ({12: float("inf")}, "scale: inf"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    inputs = arguments(decoding_cache(40, TAIL, TAIL_TOKENS), Q)
    for index, value in changes.items():
        inputs[index] = value
    with pytest.raises(ValueError, match=message):
        ops.held_out_loss(*inputs)
