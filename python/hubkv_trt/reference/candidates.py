# SPDX-License-Identifier: Apache-2.0
"""The candidates of a compression while decoding, head by head, and how they rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import pages, view


def rows(
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    block_table: NDArray[np.int32],
    tail_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    page_tokens: int,
    page_base: int,
    head_dim: int,
    dtype: Any,
) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]]:
    """Per head (layer*Hkv + KV head) keys [n, D], values [n, D] and bias [n]: compact rows, then tail tokens."""
    k_offset, v_offset, table, bias_offset = segments[0].tolist()
    heads = num_layers * num_kv_heads
    offsets = view(arena, table, (heads + 1,), np.int64) if table >= 0 else np.zeros(heads + 1, np.int64)
    num_rows = int(offsets[-1])
    k_rows = view(arena, max(k_offset, 0), (num_rows, head_dim), dtype)
    v_rows = view(arena, max(v_offset, 0), (num_rows, head_dim), dtype)
    bias = view(arena, bias_offset, (num_rows,), np.float32) if bias_offset >= 0 else np.zeros(num_rows, np.float32)
    all_pages = pages(arena, page_base, num_layers, num_kv_heads, page_tokens, head_dim, dtype)
    tail = np.arange(tail_tokens)
    in_tail = all_pages[block_table[0, tail // page_tokens], :, :, :, tail % page_tokens]  # [n, L, 2, Hkv, D]
    result = []
    for number in range(heads):
        layer, head = divmod(number, num_kv_heads)
        old = slice(int(offsets[number]), int(offsets[number + 1]))
        k = np.concatenate([k_rows[old], in_tail[:, layer, 0, head]])
        v = np.concatenate([v_rows[old], in_tail[:, layer, 1, head]])
        result.append((k, v, np.concatenate([bias[old], np.zeros(tail_tokens, np.float32)])))
    return result


def ranking(values: NDArray[np.float32], protected: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices of one head's candidates from first to last: the protected by index, then the larger value, then the
    lower index.
    """
    key = np.where(np.isnan(values), -np.inf, values.astype(np.float64))
    return np.lexsort((np.arange(len(values)), np.where(protected, 0, -key), ~protected))
