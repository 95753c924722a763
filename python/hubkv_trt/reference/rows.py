# SPDX-License-Identifier: Apache-2.0
"""Rows of K and V in NumPy, which has no bfloat16: there, an array of uint16 holds bfloat16 bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def widen(rows: NDArray[Any]) -> NDArray[np.float64]:
    """float32, float16 or uint16 (bfloat16 bits) -> float64, exactly."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return rows.astype(np.float64)


def view(arena: NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """The array of that shape and dtype at a byte offset of the arena; writing to it writes to the arena."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return arena[offset : offset + size].view(dtype).reshape(shape)


def pages(
    arena: NDArray[np.uint8],
    page_base: int,
    num_layers: int,
    num_kv_heads: int,
    page_tokens: int,
    head_dim: int,
    dtype: DTypeLike,
) -> NDArray[Any]:
    """All whole pages of the arena from page_base on, [pages, L, 2, Hkv, P, D]."""
    shape = (num_layers, 2, num_kv_heads, page_tokens, head_dim)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return view(arena, page_base, (max(arena.size - page_base, 0) // size, *shape), dtype)
