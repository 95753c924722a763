# SPDX-License-Identifier: Apache-2.0
"""compact: the kept rows, byte for byte, from any strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hubkv_trt import ops, reference
from ragged_cache import as_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_rows(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Rows of random bits, NaN among them: compact may not touch them."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(rng.integers(0, 256, count, np.uint8)).view(dtype).reshape(shape)


def random_selection(layers: int, heads: int, num_tokens: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    scores = torch.rand(layers, heads, num_tokens, generator=torch.Generator().manual_seed(seed))
    return ops.select(scores, 1, rows)


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(as_numpy(x) if isinstance(x, Tensor) else x).view(np.uint8)


def check(k: list[Tensor], v: list[Tensor], positions: Tensor, head_offsets: Tensor) -> None:
    got = ops.compact(k, v, positions, head_offsets)
    layers = [[as_numpy(x) for x in rows] for rows in (k, v)]
    want = reference.compact(*layers, positions.numpy(), head_offsets.numpy())
    for rows, expected in zip(got, want, strict=True):
        assert rows.shape == (len(positions), k[0].shape[2])
        assert rows.dtype == k[0].dtype
        assert np.array_equal(bits(rows), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 128, 256])
def test_equals_oracle(dtype: torch.dtype, head_dim: int) -> None:
    k, v = ([random_rows(dtype, 3, 50, head_dim, seed=10 * i + j) for i in range(2)] for j in range(2))
    check(k, v, *random_selection(2, 3, 50, 111))


@pytest.mark.parametrize("rows", [0, 1, 2 * 3 * 40])
def test_no_rows_and_all_rows(rows: int) -> None:
    k, v = ([random_rows(torch.float32, 3, 40, 16, seed=10 * i + j) for i in range(2)] for j in range(2))
    check(k, v, *random_selection(2, 3, 40, rows))


def test_one_token_one_head() -> None:
    check(
        [random_rows(torch.float16, 1, 1, 8)],
        [random_rows(torch.float16, 1, 1, 8, seed=1)],
        *random_selection(1, 1, 1, 1),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype) -> None:
    """Token-major rows, slices of a fused projection, and k and v with strides of their own."""
    layers, heads, num_tokens, head_dim = 3, 2, 70, 24
    fused = [random_rows(dtype, num_tokens, 7 * head_dim, seed=i) for i in range(layers)]
    k = [x[:, 2 * head_dim : 4 * head_dim].unflatten(1, (heads, head_dim)).transpose(0, 1) for x in fused]
    v = [x[:, 5 * head_dim :].unflatten(1, (heads, head_dim)).transpose(0, 1) for x in fused]
    selection = random_selection(layers, heads, num_tokens, 200)
    check(k, v, *selection)
    check(k, [x.contiguous() for x in v], *selection)
    check([x[:, ::2] for x in k], v=[x[:, 1::2] for x in v], positions=selection[0] % 35, head_offsets=selection[1])
    expanded = [x[:1].expand(heads, -1, -1) for x in k]
    check(expanded, v, *selection)


def test_one_call_equals_a_call_per_layer() -> None:
    k, v = ([random_rows(torch.bfloat16, 2, 60, 64, seed=10 * i + j) for i in range(4)] for j in range(2))
    positions, offsets = random_selection(4, 2, 60, 222)
    together = ops.compact(k, v, positions, offsets)
    for layer in range(4):
        part = offsets[2 * layer : 2 * layer + 3]
        rows = slice(int(part[0]), int(part[-1]))
        alone = ops.compact(k[layer : layer + 1], v[layer : layer + 1], positions[rows], part - part[0])
        for x, y in zip(together, alone, strict=True):
            assert np.array_equal(bits(x[rows]), bits(y))


def test_many_layers() -> None:
    k, v = ([random_rows(torch.float16, 1, 9, 8, seed=1000 * i + j) for i in range(300)] for j in range(2))
    check(k, v, *random_selection(300, 1, 9, 999))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_any_alignment(dtype: torch.dtype, head_dim: int, offset: int) -> None:
    """Rows that begin between the boundaries of vectors."""
    size = 2 * 40 * head_dim

    def shifted(seed: int) -> Tensor:
        return random_rows(dtype, size + offset, seed=seed)[offset:].view(2, 40, head_dim)

    check([shifted(1), shifted(2)], [shifted(3), shifted(4)], *random_selection(2, 2, 40, 77))


def test_into_an_arena() -> None:
    k, v = ([random_rows(torch.float16, 2, 30, 40, seed=10 * i + j) for i in range(2)] for j in range(2))
    positions, offsets = random_selection(2, 2, 30, 55)
    arena = torch.full((20_000,), 7, dtype=torch.uint8)
    size = 55 * 40 * 2
    k_rows, v_rows = (arena[at : at + size].view(torch.float16).view(55, 40) for at in (256, 8192))
    ops.compact_into(k, v, positions, offsets, k_rows, v_rows)
    for rows, expected in zip((k_rows, v_rows), ops.compact(k, v, positions, offsets), strict=True):
        assert np.array_equal(bits(rows), bits(expected))
    outside = torch.ones(20_000, dtype=torch.bool)
    outside[256 : 256 + size] = False
    outside[8192 : 8192 + size] = False
    assert bool((arena[outside] == 7).all())


def test_positions_outside_give_zero_rows() -> None:
    k, v = ([random_rows(torch.float32, 1, 7, 8, seed=j)] for j in range(2))
    positions = torch.tensor([-1, 0, 7, 6, 2**31 - 1, -(2**31)], dtype=torch.int32)
    offsets = torch.tensor([0, 6])
    check(k, v, positions, offsets)
    k_rows, _ = ops.compact(k, v, positions, offsets)
    assert [bool(row.any()) for row in k_rows] == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 9],
        [-4, 3, 6],
        [0, 7, 3],
        [6, 6, 6],
        [2**62, 1, 2**63 - 1],
        [-(2**63), 2**63 - 1, -(2**63)],
        [5, 4, 3],
    ],
)
def test_wrong_offsets_stay_inside(offsets: list[int]) -> None:
    k, v = ([random_rows(torch.float32, 2, 5, 8, seed=j)] for j in range(2))
    guarded = torch.full((2, 6 + 64, 8), 7.0)
    inside = guarded[:, 32:38]
    ops.compact_into(k, v, torch.arange(6, dtype=torch.int32) % 5, torch.tensor(offsets), inside[0], inside[1])
    assert bool((guarded[:, :32] == 7).all())
    assert bool((guarded[:, 38:] == 7).all())


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_thread_count_changes_nothing(threads: int) -> None:
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        k, v = ([random_rows(torch.float16, 2, 500, 128, seed=10 * i + j) for i in range(3)] for j in range(2))
        check(k, v, *random_selection(3, 2, 500, 1999))
    finally:
        ops.set_num_threads(before)


K = [torch.zeros(2, 5, 8), torch.zeros(2, 5, 8)]
POSITIONS, OFFSETS = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("k", "v", "positions", "offsets", "message"),
    [
        ([], [], POSITIONS, OFFSETS, "k"),
        (K, K[:1], POSITIONS, OFFSETS, "2 and 1 layers"),
        ([K[0], torch.zeros(2, 6, 8)], K, POSITIONS, OFFSETS, r"k\[1\]: shape \[2, 6, 8\]"),
        (K, [K[0], torch.zeros(2, 5, 16)], POSITIONS, OFFSETS, r"v\[1\]: shape \[2, 5, 16\]"),
        (K, [K[0].half(), K[1]], POSITIONS, OFFSETS, r"v\[0\]: .*float16"),
        ([K[0], torch.zeros(5, 2, 8).transpose(0, 1)], K, POSITIONS, OFFSETS, r"k\[1\]: strides"),
        ([torch.zeros(2, 8, 5).mT] * 2, K, POSITIONS, OFFSETS, r"k\[0\]: strides"),
        ([torch.zeros(5, 8)], [torch.zeros(5, 8)], POSITIONS, OFFSETS, r"k\[0\]: shape \[5, 8\]"),
        ([torch.zeros(2, 5, 12)] * 2, [torch.zeros(2, 5, 12)] * 2, POSITIONS, OFFSETS, "D: 12"),
        ([torch.zeros(2, 5, 264)] * 2, [torch.zeros(2, 5, 264)] * 2, POSITIONS, OFFSETS, "D: 264"),
        ([torch.zeros(2, 5, 8).double()] * 2, [torch.zeros(2, 5, 8).double()] * 2, POSITIONS, OFFSETS, "k: dtype"),
        (K, K, POSITIONS.long(), OFFSETS, "positions: dtype torch.int64"),
        (K, K, POSITIONS, OFFSETS.int(), "head_offsets: dtype torch.int32"),
        (K, K, POSITIONS, OFFSETS[:4], r"head_offsets: shape \[4\]"),
    ],
)
def test_refuses(k, v, positions, offsets, message) -> None:
    with pytest.raises(ValueError, match=message):
        ops.compact(k, v, positions, offsets)


@pytest.mark.parametrize(
    ("k_rows", "v_rows", "message"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 8), r"k_rows: shape \[3, 8\]"),
        (torch.zeros(4, 8), torch.zeros(4, 16), r"v_rows: shape \[4, 16\]"),
        (torch.zeros(4, 8), torch.zeros(4, 8).half(), "v_rows: dtype torch.float16"),
        (torch.zeros(8, 8)[::2], torch.zeros(4, 8), "k_rows: strides"),
    ],
)
def test_refuses_outputs(k_rows: Tensor, v_rows: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.compact_into(K, K, POSITIONS, OFFSETS, k_rows, v_rows)
