# SPDX-License-Identifier: Apache-2.0
"""attend: equal to dense attention over the same rows, however they are cut, batched, spread over threads, appended."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubkv_trt import ops
from ragged_cache import RaggedCache, new_rows, random_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED: list[tuple[int | None, int]] = [(70, 20), (None, 5), (0, 0), (33, 0), (None, 0), (5, 70)]


def check(cache: RaggedCache, num_new: int, group: int, tolerance: float | None = None, **options) -> Tensor:
    """The library's output, after it was found equal to the oracle in every layer."""
    for layer in range(cache.num_layers):
        rows = new_rows(cache, num_new, group, seed=layer + 1)
        out = cache.attend(*rows, layer=layer, **options)
        assert out.shape == rows[0].shape
        assert out.dtype == cache.dtype
        assert out.is_contiguous()
        oracle_options = {k: v for k, v in options.items() if k in ("new_lengths", "scale")}
        want = cache.oracle(*rows, layer=layer, **oracle_options)
        limit = TOLERANCE[cache.dtype] if tolerance is None else tolerance
        np.testing.assert_allclose(out.double().numpy(), want, rtol=limit, atol=limit)
    return out


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("num_new", [1, 5])
def test_equals_oracle(dtype: torch.dtype, head_dim: int, num_new: int) -> None:
    check(random_cache(sequences=MIXED, head_dim=head_dim, dtype=dtype), num_new, 3)


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_oracle_for_every_group(group: int, dtype: torch.dtype) -> None:
    cache = random_cache(sequences=[(90, 20), (None, 3)], num_layers=1, head_dim=64, dtype=dtype, row_bias=True)
    for num_new in (1, 2, 7):
        check(cache, num_new, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_new", [1, 2, 17])
def test_equals_oracle_with_row_bias(dtype: torch.dtype, num_new: int) -> None:
    cache = random_cache(sequences=MIXED, head_dim=80, dtype=dtype, row_bias=True)
    check(cache, num_new, 4)
    cache.segments[3, 3] = -1  # one sequence without
    check(cache, num_new, 4)


@pytest.mark.parametrize("num_new", [16, 33, 130])
def test_equals_oracle_for_many_new_tokens(num_new: int) -> None:
    check(random_cache(sequences=[(100, 40), (None, 0)], num_layers=1), num_new, 3)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_equals_oracle_for_page_sizes(page_tokens: int) -> None:
    cache = random_cache(sequences=[(9, 50), (None, 64), (None, 1)], page_tokens=page_tokens)
    for num_new in (1, 3):
        check(cache, num_new, 2)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 255, 256, 257, 3000])
@pytest.mark.parametrize("row_bias", [False, True])
def test_equals_oracle_however_rows_are_cut(rows: int, row_bias: bool) -> None:
    cache = random_cache(sequences=[(rows, 2)], num_layers=1, num_kv_heads=3, row_bias=row_bias, seed=rows)
    for capacity, rows_per_item in ((3, 16), (10, 16), (1000, 16), (1000, 10_000)):
        check(cache, 1, 4, capacity=capacity, rows_per_item=rows_per_item)
        check(cache, 3, 4, capacity=capacity, rows_per_item=rows_per_item)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_new", [1, 6])
def test_new_lengths(dtype: torch.dtype, num_new: int) -> None:
    cache = random_cache(sequences=MIXED, dtype=dtype)
    lengths = ints(*[n % (num_new + 1) for n in range(6)])
    out = check(cache, num_new, 2, new_lengths=lengths)
    for row, length in zip(out, lengths.tolist(), strict=True):
        assert not bool(row[length:].any())
    check(cache, num_new, 2, new_lengths=ints(-1, num_new + 1, 2**31 - 1, -(2**31), 1, 0))


@pytest.mark.parametrize("scale", [0.0, 0.03, 1.0, 20.0])
@pytest.mark.parametrize("num_new", [1, 4])
def test_scales(scale: float, num_new: int) -> None:
    """A large scale makes the softmax pick one row: float32 logits of 1e3 are good to about 1e-4."""
    cache = random_cache(sequences=MIXED, num_layers=1)
    check(cache, num_new, 2, scale=scale, tolerance=1e-5 if scale < 2 else 2e-3)


@pytest.mark.parametrize("num_new", [1, 4])
def test_extreme_logits(num_new: int) -> None:
    """Logits of 1e5 and more: no overflow, and the largest takes all."""
    cache = random_cache(sequences=[(200, 30), (30, 0)], num_layers=1, key_scale=1e6)
    check(cache, num_new, 2)


def test_row_bias_is_the_logarithm_of_a_multiplicity() -> None:
    """A row with bias log(n) counts as n equal rows; one with a very low bias as none."""
    once = random_cache(sequences=[(40, 0)], num_layers=1, num_kv_heads=1, row_bias=True, seed=5)
    k, v, table, bias = once.segments[0].tolist()
    rows = int(once.arena[table + 8 : table + 16].view(torch.int64))
    once.arena[bias : bias + 4 * rows].view(torch.float32)[:] = 0
    once.arena[bias : bias + 4].view(torch.float32)[:] = float(np.log(rows - 1))
    thrice = once.clone()
    # The same as rows - 1 copies of row 0 under no bias, and row 1 switched off.
    once.arena[bias + 4 : bias + 4 * rows].view(torch.float32)[:] = -1e30
    for offset in (k, v):
        copies = thrice.arena[offset : offset + rows * 256].view(torch.float32).view(rows, 64)
        copies[1:] = copies[0]
    thrice.arena[bias : bias + 4].view(torch.float32)[:] = -1e30
    fresh = new_rows(once, 2, 3)
    torch.testing.assert_close(once.attend(*fresh), thrice.attend(*fresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_new", [1, 3, 20])
def test_row_bias_of_minus_infinity_removes_the_row(num_new: int) -> None:
    """Also where it removes all rows of a head, or all that a work item holds."""
    cache = random_cache(sequences=[(120, 0), (50, 3)], num_layers=1, row_bias=True, seed=2)
    without = cache.clone()
    without.segments[1, :3] = -1
    for sequence, table_and_bias in enumerate(cache.segments[:, 2:].tolist()):
        table, start = table_and_bias
        rows = int(cache.arena[table + 16 : table + 24].view(torch.int64))
        bias = cache.arena[start : start + 4 * rows].view(torch.float32)
        bias[:] = -torch.inf if sequence == 1 else torch.where(torch.rand(rows) < 0.5, -torch.inf, bias)
    fresh = new_rows(cache, num_new, 3)
    out = check(cache, num_new, 3)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(cache.attend(*fresh)[1], without.attend(*fresh)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_permuted_batch_and_threads_change_no_bit(dtype: torch.dtype, num_new: int, threads: int) -> None:
    cache = random_cache(sequences=[*MIXED, (400, 90)], dtype=dtype, row_bias=True)
    rows = new_rows(cache, num_new, 4)
    lengths = ints(*[min(num_new, 1 + n % 3) for n in range(7)])
    out = cache.attend(*rows, new_lengths=lengths)
    order = [3, 6, 0, 5, 1, 4, 2]
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        permuted = cache.take(order).attend(*[x[order] for x in rows], new_lengths=lengths[order])
    finally:
        ops.set_num_threads(before)
    assert torch.equal(permuted.view(torch.uint8), out[order].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_equals_at_once(dtype: torch.dtype) -> None:
    """Extending by six tokens equals extending by one six times, and by four and two, with append between."""
    cache = random_cache(sequences=[(50, 13), (None, 0), (20, 31)], dtype=dtype)
    q, k, v = new_rows(cache, 6, 3, layers=cache.num_layers)
    at_once = torch.stack([cache.attend(q[n], k[n], v[n], layer=n) for n in range(cache.num_layers)])
    for steps in ([1] * 6, [4, 2]):
        now, parts, first = cache.clone(), [], 0
        for step in steps:
            part = [x[:, :, first : first + step].contiguous() for x in (q, k, v)]
            parts.append(torch.stack([now.attend(*(x[n] for x in part), layer=n) for n in range(cache.num_layers)]))
            now = now.append(*part[1:])
            first += step
        torch.testing.assert_close(torch.cat(parts, dim=2), at_once, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("scope", ["model", "layer", "head"])
def test_compacted_equals_masked_dense(num_new: int, ratio: float, scope: str) -> None:
    """select, compact, attend equals torch's attention over all of the prompt with the evicted pairs masked."""
    layers, heads, group, num_tokens, head_dim = 2, 3, 2, 150, 40
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(layers, heads, num_tokens, generator=generator)
    k, v = (torch.randn(layers, heads, num_tokens, head_dim, generator=generator) for _ in range(2))
    q = torch.randn(1, num_new, heads * group, head_dim, generator=generator)
    k_new, v_new = (torch.randn(1, num_new, heads, head_dim, generator=generator) for _ in range(2))
    groups = {"model": 1, "layer": layers, "head": layers * heads}[scope]
    pairs = scores.numel() // groups
    positions, offsets = ops.select(scores, groups, pairs - int(ratio * pairs))
    k_rows, v_rows = ops.compact(list(k), list(v), positions, offsets)

    parts = [x.view(torch.uint8).flatten() for x in (k_rows, v_rows, offsets)]
    starts = np.cumsum([0, *[-(-len(x) // 256) * 256 for x in parts]]).tolist()
    arena = torch.zeros(starts[-1], dtype=torch.uint8)
    for start, part in zip(starts, parts, strict=False):
        arena[start : start + len(part)] = part
    cache = RaggedCache(
        arena,
        torch.tensor([[*starts[:3], -1]]),
        torch.zeros(1, 0, dtype=torch.int32),
        ints(0),
        layers,
        heads,
        head_dim,
        torch.float32,
        16,
        0,
    )
    for layer in range(layers):
        mask = torch.zeros(heads, num_new, num_tokens + num_new, dtype=torch.bool)
        for head in range(heads):
            first, last = offsets[layer * heads + head :][:2].tolist()
            mask[head, :, positions[first:last].long()] = True
        mask[:, :, num_tokens:] = torch.ones(num_new, num_new).tril().bool()
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            *(
                torch.cat([x[layer], n[0].transpose(0, 1)], dim=1).repeat_interleave(group, dim=0)[None]
                for x, n in ((k, k_new), (v, v_new))
            ),
            attn_mask=mask.repeat_interleave(group, dim=0)[None],
        )
        out = cache.attend(q, k_new, v_new, layer=layer)
        torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "num_new"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_slices_of_a_fused_projection(dtype: torch.dtype, batch: int, num_new: int) -> None:
    cache = random_cache(sequences=[(20, 5)] * batch, num_layers=1, dtype=dtype)
    fused = torch.randn(batch * num_new, 8 * 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, k, v = (x.view(batch, num_new, -1, 64) for x in fused.split([4 * 64, 2 * 64, 2 * 64], dim=1))
    assert not q.is_contiguous() or batch * num_new == 1
    out = cache.attend(q, k, v)
    assert torch.equal(out, cache.attend(q.contiguous(), k.contiguous(), v.contiguous()))
    np.testing.assert_allclose(out.double(), cache.oracle(q, k, v), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_segment_with_an_absent_part_is_no_segment() -> None:
    rows = new_rows(random_cache(sequences=[(30, 4)]), 2, 2)
    want = random_cache(sequences=[(30, 4)])
    want.segments[:] = -1
    for part in range(3):
        cache = random_cache(sequences=[(30, 4)])
        cache.segments[0, part] = -1
        assert torch.equal(cache.attend(*rows), want.attend(*rows))


@settings(max_examples=120, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 90)), st.integers(0, 50)), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    group=st.integers(1, 16),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    num_new=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    row_bias=st.booleans(),
    seed=st.integers(0, 10**6),
    page_tokens=st.integers(1, 40),
    spare=st.integers(0, 40),
    rows_per_item=st.integers(1, 100),
)
def test_equals_oracle_on_anything(
    sequences, heads, group, head_dim, num_new, dtype, row_bias, seed, page_tokens, spare, rows_per_item
) -> None:
    cache = random_cache(
        sequences=sequences,
        num_layers=1,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        row_bias=row_bias,
        seed=seed,
        page_tokens=page_tokens,
    )
    check(cache, num_new, group, capacity=len(sequences) * heads + spare, rows_per_item=rows_per_item)


def arguments(**changes: object) -> dict[str, object]:
    cache = random_cache(sequences=[(9, 3), (None, 2)])
    q, k, v = new_rows(cache, 3, 2)
    work, work_count = cache.plan()
    return {
        "q": q,
        "k_new": k,
        "v_new": v,
        "arena": cache.arena,
        "segments": cache.segments,
        "block_table": cache.block_table,
        "tail_lengths": cache.tail_lengths,
        "new_lengths": None,
        "work": work,
        "work_count": work_count,
        "layer": 0,
        "num_layers": 2,
        "page_tokens": 16,
        "page_base": cache.page_base,
        "scale": 0.0,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 2}, "layer: 2"),
        ({"layer": -1}, "layer: -1"),
        ({"num_layers": 3}, r"work: shape \[2, \d+, 4\]"),
        ({"page_tokens": 0}, "P: 0"),
        ({"page_base": -16}, "pageBase: -16"),
        ({"scale": float("nan")}, "scale: -?nan"),
        ({"q": torch.zeros(2, 3, 3, 64)}, "Hq: 3"),
        ({"q": torch.zeros(2, 3, 34, 64)}, "34|17"),
        ({"q": torch.zeros(2, 3, 0, 64)}, "Hq: 0"),
        ({"q": torch.zeros(2, 3, 4, 32)}, r"k_new: shape \[2, 3, 2, 64\]"),
        ({"q": torch.zeros(2, 3, 256)}, r"q: shape \[2, 3, 256\]"),
        ({"q": torch.zeros(2, 3, 4, 64).half()}, "float16"),
        ({"q": torch.zeros(2, 4, 3, 64).transpose(1, 2)}, "q: strides"),
        ({"q": torch.zeros(2, 6, 4, 64)[:, ::2]}, None),
        ({"q": torch.zeros(4, 3, 4, 64)[::2]}, "q: strides"),
        ({"k_new": torch.zeros(2, 2, 2, 64)}, r"k_new: shape \[2, 2, 2, 64\]"),
        ({"v_new": torch.zeros(2, 3, 1, 64)}, r"v_new: shape \[2, 3, 1, 64\]"),
        ({"arena": torch.zeros(9)}, "arena: dtype torch.float32"),
        ({"segments": torch.zeros(1, 4, dtype=torch.int64)}, r"segments: shape \[1, 4\]"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table: shape \[3, 1\]"),
        ({"tail_lengths": torch.zeros(2)}, "tail_lengths: dtype torch.float32"),
        ({"new_lengths": torch.zeros(1, dtype=torch.int32)}, r"new_lengths: shape \[1\]"),
        ({"work": torch.zeros(2, 3, 4, dtype=torch.int32)}, "capacity: 3"),
        ({"work_count": torch.zeros(1, dtype=torch.int32)}, r"work_count: shape \[1\]"),
    ],
)
def test_refuses(changes: dict[str, object], message: str | None) -> None:
    if message is None:  # sequences that are Tq tokens apart with a token stride of two: not refused
        ops.attend(**arguments(**changes))
        return
    with pytest.raises(ValueError, match=message):
        ops.attend(**arguments(**changes))
