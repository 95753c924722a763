# SPDX-License-Identifier: Apache-2.0
"""append, one row after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import pages


def append(
    k_new: NDArray[Any],
    v_new: NDArray[Any],
    arena: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    tail_lengths: NDArray[np.int32],
    new_lengths: NDArray[np.int32] | None,
    page_tokens: int,
    page_base: int,
) -> None:
    """Writes k_new and v_new [L, B, Tq, Hkv, D] to the tail pages; a slot without a page is not written."""
    num_layers, batch, num_new, num_kv_heads, head_dim = k_new.shape
    all_pages = pages(arena, page_base, num_layers, num_kv_heads, page_tokens, head_dim, k_new.dtype)
    for b in range(batch):
        new = num_new if new_lengths is None else int(np.clip(new_lengths[b], 0, num_new))
        for t in range(new):
            index, slot = divmod(int(tail_lengths[b]) + t, page_tokens)
            if not 0 <= index < block_table.shape[1] or not 0 <= block_table[b, index] < len(all_pages):
                continue
            page = all_pages[block_table[b, index]]
            page[:, 0, :, slot] = k_new[:, b, t]
            page[:, 1, :, slot] = v_new[:, b, t]
