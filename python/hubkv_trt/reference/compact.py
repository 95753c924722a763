# SPDX-License-Identifier: Apache-2.0
"""compact by indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]


def compact(
    k: Sequence[Rows], v: Sequence[Rows], positions: NDArray[np.int32], head_offsets: NDArray[np.int64]
) -> tuple[Rows, Rows]:
    """k_rows and v_rows [K, D]: per layer and head the rows at its positions, zero for a position outside 0..T-1.

    Args:
        k: per layer [Hkv, T, D].
        v: per layer [Hkv, T, D].
        positions: int32 [K].
        head_offsets: int64 [L*Hkv + 1].
    """
    k_rows, v_rows = (np.zeros((len(positions), x[0].shape[2]), x[0].dtype) for x in (k, v))
    compact_into(k, v, positions, head_offsets, k_rows, v_rows)
    return k_rows, v_rows


def compact_into(
    k: Sequence[Rows],
    v: Sequence[Rows],
    positions: NDArray[np.int32],
    head_offsets: NDArray[np.int64],
    k_rows: Rows,
    v_rows: Rows,
) -> None:
    """:func:`compact` that writes to k_rows and v_rows [K, D]."""
    num_kv_heads, num_tokens = k[0].shape[:2]
    for layers, rows in ((k, k_rows), (v, v_rows)):
        for layer, x in enumerate(layers):
            for head in range(num_kv_heads):
                first, last = head_offsets[layer * num_kv_heads + head :][:2]
                for row in range(first, last):
                    inside = 0 <= positions[row] < num_tokens
                    rows[row] = x[head, positions[row]] if inside else 0
