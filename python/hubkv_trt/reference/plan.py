# SPDX-License-Identifier: Apache-2.0
"""plan: cut every head's compact rows into items of at most rows_per_item."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .rows import view

GRANULE = 16


def plan(
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    num_layers: int,
    num_kv_heads: int,
    capacity: int,
    min_rows_per_item: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """work int32 [L, capacity, 4] (sequence, KV head, first row, rows) and work_count int32 [L].

    The order of a layer's items is this reading's own; what every reading keeps is which rows an item may hold: at most
    :func:`rows_per_item`, each row of each head in exactly one item.

    Args:
        arena: uint8 [bytes].
        segments: int64 [B, 4], of right tables.
        capacity: items per layer, >= B*Hkv.
        min_rows_per_item: >= 1.
    """
    counts = head_rows(arena, segments, num_layers, num_kv_heads)
    work = np.zeros((num_layers, capacity, 4), np.int32)
    work_count = np.zeros(num_layers, np.int32)
    for layer in range(num_layers):
        size = rows_per_item(counts[:, layer], capacity, min_rows_per_item)
        items = [
            (sequence, head, first, min(size, rows - first))
            for (sequence, head), rows in np.ndenumerate(counts[:, layer])
            for first in range(0, int(rows), size)
        ]
        work_count[layer] = len(items)
        work[layer, : len(items)] = np.array(items, np.int32).reshape(-1, 4)
    return work, work_count


def head_rows(
    arena: NDArray[np.uint8], segments: NDArray[np.int64], num_layers: int, num_kv_heads: int
) -> NDArray[np.int64]:
    """Compact rows of every head, [B, L, Hkv]."""
    counts = np.zeros((len(segments), num_layers, num_kv_heads), np.int64)
    for sequence, (k, v, table, _) in enumerate(segments.tolist()):
        if min(k, v, table) >= 0:
            offsets = view(arena, table, (num_layers * num_kv_heads + 1,), np.int64)
            counts[sequence] = np.diff(offsets).reshape(num_layers, num_kv_heads)
    return counts


def rows_per_item(counts: NDArray[np.int64], capacity: int, min_rows_per_item: int) -> int:
    """The smallest multiple of 16, >= min_rows_per_item, for which rows per head [...] make at most capacity items."""
    size = -(-min_rows_per_item // GRANULE) * GRANULE
    while int(np.sum(-(-counts // size))) > capacity:
        size += GRANULE
    return size
