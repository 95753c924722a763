# SPDX-License-Identifier: Apache-2.0
"""append: the new rows at their slots, and no byte elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hubkv_trt import ops, reference
from ragged_cache import RaggedCache, as_numpy, new_rows, random_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(cache: RaggedCache, num_new: int, new_lengths: Tensor | None = None) -> None:
    """The library writes the bytes that the oracle writes: all of the arena is compared."""
    _, k, v = new_rows(cache, num_new, 1, layers=cache.num_layers)
    got, want = cache.arena.clone(), cache.arena.clone().numpy()
    sizes = (cache.page_tokens, cache.page_base)
    ops.append(k, v, got, cache.block_table, cache.tail_lengths, new_lengths, *sizes)
    reference.append(
        as_numpy(k),
        as_numpy(v),
        want,
        cache.block_table.numpy(),
        cache.tail_lengths.numpy(),
        None if new_lengths is None else new_lengths.numpy(),
        *sizes,
    )
    assert np.array_equal(got.numpy(), want)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("num_new", [1, 2, 19])
def test_equals_oracle(dtype: torch.dtype, head_dim: int, num_new: int) -> None:
    cache = random_cache(sequences=[(5, 0), (None, 15), (3, 33)], head_dim=head_dim, dtype=dtype)
    check(cache, num_new)
    check(cache, num_new, ints(0, num_new, num_new // 2))


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_page_sizes(page_tokens: int) -> None:
    check(random_cache(sequences=[(None, 7), (2, 50)], page_tokens=page_tokens, max_pages=80 // page_tokens), 21)


@pytest.mark.parametrize("lengths", [(-1, 5), (2**31 - 1, 0), (-(2**31), 99)])
def test_new_lengths_are_bounded(lengths: tuple[int, int]) -> None:
    check(random_cache(sequences=[(None, 7), (None, 3)]), 4, ints(*lengths))


@pytest.mark.parametrize("pages", [(-1, 0, 1), (0, 10**6, 1), (5, -(2**31), 2**31 - 1)])
def test_slots_without_a_page_are_not_written(pages: tuple[int, ...]) -> None:
    cache = random_cache(sequences=[(None, 14)], max_pages=3)
    cache.block_table[0] = ints(*pages)
    check(cache, 3)
    check(cache, 33)
    check(cache, 100)  # past the last column


def test_no_pages_at_all() -> None:
    check(random_cache(sequences=[(4, 0), (None, 0)], max_pages=0), 2)


@pytest.mark.parametrize("tails", [(-1, 40), (2**31 - 1, 3), (-(2**31), 2**31 - 2)])
def test_wrong_tail_lengths_write_nothing_wrong(tails: tuple[int, int]) -> None:
    cache = random_cache(sequences=[(None, 1), (None, 1)])
    cache.tail_lengths[:] = ints(*tails)
    check(cache, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_any_alignment(dtype: torch.dtype, offset: int) -> None:
    """New rows that begin between the boundaries of vectors."""
    cache = random_cache(sequences=[(None, 7), (None, 20)], head_dim=72, dtype=dtype)
    _, k, v = new_rows(cache, 3, 1, layers=cache.num_layers)
    got, want = cache.clone(), cache.clone()
    shifted = [torch.cat([torch.zeros(offset, dtype=dtype), x.flatten()])[offset:].view(x.shape) for x in (k, v)]
    got.append(*shifted)
    want.append(k, v)
    assert torch.equal(got.arena, want.arena)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        check(random_cache(sequences=[(None, i) for i in range(9)], num_layers=8, num_kv_heads=8, head_dim=128), 9)
    finally:
        ops.set_num_threads(before)


ROWS = torch.zeros(2, 3, 4, 2, 8)
ARENA = torch.zeros(100_000, dtype=torch.uint8)
TABLE, TAILS = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_new": ROWS[0]}, r"k_new: shape \[3, 4, 2, 8\]"),
        ({"k_new": ROWS.transpose(2, 3)}, "k_new: strides"),
        ({"v_new": ROWS.half()}, "v_new: dtype torch.float16"),
        ({"v_new": ROWS[:1]}, r"v_new: shape \[1, 3, 4, 2, 8\]"),
        ({"k_new": ROWS.double(), "v_new": ROWS.double()}, "k_new: dtype torch.float64"),
        ({"k_new": ROWS[..., :4].clone(), "v_new": ROWS[..., :4].clone()}, "D: 4"),
        ({"k_new": ROWS[:, :, :0], "v_new": ROWS[:, :, :0]}, "Tq: 0"),
        ({"arena": ARENA.int()}, "arena: dtype torch.int32"),
        ({"block_table": TABLE[:2]}, r"block_table: shape \[2, 5\]"),
        ({"block_table": TABLE.long()}, "block_table: dtype torch.int64"),
        ({"tail_lengths": TAILS[:2]}, r"tail_lengths: shape \[2\]"),
        ({"new_lengths": TAILS[:2]}, r"new_lengths: shape \[2\]"),
        ({"new_lengths": TAILS.float()}, "new_lengths: dtype torch.float32"),
        ({"page_tokens": 0}, "P: 0"),
        ({"page_base": -16}, "pageBase: -16"),
        ({"page_base": 8}, "pageBase: 8"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    arguments = {
        "k_new": ROWS,
        "v_new": ROWS,
        "arena": ARENA,
        "block_table": TABLE,
        "tail_lengths": TAILS,
        "new_lengths": None,
        "page_tokens": 16,
        "page_base": 0,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        ops.append(**arguments)
    assert not bool(ARENA.any())
