# SPDX-License-Identifier: Apache-2.0
"""merge, one group after the other, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import rows
from .rewrite import rewrite_into
from .rows import widen

LEAST = -1e30


def merge_into(
    logits: NDArray[np.float32],
    candidate_positions: NDArray[np.int32],
    indices: NDArray[np.int32],
    head_offsets: NDArray[np.int64],
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    block_table: NDArray[np.int32],
    num_compact_rows: int,
    tail_tokens: int,
    tail_base: int,
    num_layers: int,
    page_tokens: int,
    page_base: int,
    merged_rows: int,
    k_rows: NDArray[Any],
    v_rows: NDArray[Any],
    positions: NDArray[np.int32],
    row_bias: NDArray[np.float32],
) -> None:
    """As ``ops.merge_into``, for right tables and ascending indices; rows of bfloat16 are cut, not rounded."""
    heads = len(head_offsets) - 1
    num_kv_heads = heads // num_layers
    kept_outputs = [np.zeros((len(indices), *x.shape[1:]), x.dtype) for x in (k_rows, v_rows, positions, row_bias)]
    old = (arena, segments, block_table, num_compact_rows, tail_tokens, tail_base, num_layers, page_tokens, page_base)
    rewrite_into(candidate_positions, indices, head_offsets, *old, *kept_outputs)
    sizes = (num_layers, num_kv_heads, page_tokens, page_base, k_rows.shape[1], k_rows.dtype)
    first = 0
    for head, (k, v, bias) in enumerate(rows(arena, segments, block_table, tail_tokens, *sizes)):
        kept = slice(int(head_offsets[head]), int(head_offsets[head + 1]))
        shift = head * merged_rows
        for new, x in zip((k_rows, v_rows, positions, row_bias), kept_outputs, strict=True):
            new[kept.start + shift : kept.stop + shift] = x[kept]
        evicted = np.setdiff1d(np.arange(len(k)), indices[kept])
        for group in range(merged_rows):
            cut = [len(evicted) * (group + i) // merged_rows for i in range(2)]
            members = evicted[cut[0] : cut[1]]
            members = members[bias[members] > -np.inf]
            to = kept.stop + shift + group
            k_rows[to], v_rows[to], positions[to], row_bias[to] = 0, 0, 0, -np.inf
            if len(members) > 0:
                z = np.maximum(np.nan_to_num(logits[first + members].astype(np.float64), nan=LEAST), LEAST)
                weights = np.exp(z - z.max())
                share = weights / weights.sum()
                k_rows[to] = narrow(share @ widen(k[members]), k_rows.dtype)
                v_rows[to] = narrow(share @ widen(v[members]), v_rows.dtype)
                positions[to] = candidate_positions[first + members[-1]]
                held = share > 0
                row_bias[to] = share[held] @ (bias[members][held] - np.log(share[held]))
        first += len(k)


def narrow(values: NDArray[np.float64], dtype: Any) -> NDArray[Any]:
    """To float32, float16, or the leading half of a float32."""
    if dtype == np.uint16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)
