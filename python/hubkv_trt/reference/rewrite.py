# SPDX-License-Identifier: Apache-2.0
"""rewrite by indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import rows


def rewrite_into(
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
    k_rows: NDArray[Any],
    v_rows: NDArray[Any],
    positions: NDArray[np.int32],
    row_bias: NDArray[np.float32] | None,
) -> None:
    """Writes k_rows and v_rows [K', D], positions [K'] and row_bias [K']; as ``ops.rewrite_into``, for right tables.

    Args:
        num_compact_rows: not read: the old segment's head offsets say it.
        tail_base: not read: candidate_positions say it.
    """
    num_kv_heads = (len(head_offsets) - 1) // num_layers
    sizes = (num_layers, num_kv_heads, page_tokens, page_base, k_rows.shape[1], k_rows.dtype)
    first = 0
    for number, (k, v, bias) in enumerate(rows(arena, segments, block_table, tail_tokens, *sizes)):
        for row in range(head_offsets[number], head_offsets[number + 1]):
            index = indices[row]
            there = 0 <= index < len(k)
            k_rows[row], v_rows[row] = (k[index], v[index]) if there else (0, 0)
            positions[row] = candidate_positions[first + index] if there else 0
            if row_bias is not None:
                row_bias[row] = bias[index] if there else -np.inf
        first += len(k)
