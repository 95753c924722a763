# SPDX-License-Identifier: Apache-2.0
"""attend: dense float64 softmax over the gathered rows of each head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import pages, view, widen


def attend(
    q: NDArray[Any],
    k_new: NDArray[Any],
    v_new: NDArray[Any],
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    block_table: NDArray[np.int32],
    tail_lengths: NDArray[np.int32],
    new_lengths: NDArray[np.int32] | None,
    work: NDArray[np.int32],
    work_count: NDArray[np.int32],
    layer: int,
    num_layers: int,
    page_tokens: int,
    page_base: int,
    scale: float,
) -> NDArray[np.float64]:
    """Attention of the new tokens, float64 [B, Tq, Hq, D]; not rounded to the dtype of q.

    Args:
        q: [B, Tq, Hq, D], float32, float16, or uint16 holding bfloat16 bits.
        k_new: [B, Tq, Hkv, D].
        v_new: [B, Tq, Hkv, D].
        work: not read: this reading attends to all rows, however they are cut.
        work_count: not read.

    The rest is as for ``ops.attend``; the tables must be right.
    """
    batch, num_new, num_heads, head_dim = q.shape
    num_kv_heads = k_new.shape[2]
    scale = scale or 1 / np.sqrt(head_dim)
    queries = widen(q).reshape(batch, num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = np.zeros(queries.shape)
    for b in range(batch):
        new = num_new if new_lengths is None else int(np.clip(new_lengths[b], 0, num_new))
        for h in range(num_kv_heads):
            k, v, bias = cached_rows(
                arena,
                segments[b],
                block_table[b],
                int(tail_lengths[b]),
                layer,
                num_layers,
                num_kv_heads,
                h,
                page_tokens,
                page_base,
                head_dim,
                q.dtype,
            )
            k = np.concatenate([k, widen(k_new[b, :new, h])])
            v = np.concatenate([v, widen(v_new[b, :new, h])])
            bias = np.concatenate([bias, np.zeros(new)])
            before = len(k) - new
            for t in range(new):
                seen = before + t + 1
                logits = scale * queries[b, t, h] @ k[:seen].T + bias[:seen]
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                out[b, t, h] = weights / weights.sum(axis=1, keepdims=True) @ v[:seen]
    return out.reshape(q.shape)


def cached_rows(
    arena: NDArray[np.uint8],
    segment: NDArray[np.int64],
    page_table: NDArray[np.int32],
    tail_length: int,
    layer: int,
    num_layers: int,
    num_kv_heads: int,
    head: int,
    page_tokens: int,
    page_base: int,
    head_dim: int,
    dtype: Any,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Keys [n, D], values [n, D] and bias [n] of a sequence's compact rows and tail in one layer and head."""
    tail = np.arange(tail_length)
    all_pages = pages(arena, page_base, num_layers, num_kv_heads, page_tokens, head_dim, dtype)
    in_tail = all_pages[page_table[tail // page_tokens], layer, :, head, tail % page_tokens]  # [n, 2, D]
    k, v, bias = widen(in_tail[:, 0]), widen(in_tail[:, 1]), np.zeros(tail_length)
    k_offset, v_offset, table, bias_offset = segment.tolist()
    if min(k_offset, v_offset, table) >= 0:
        first, last = view(arena, table, (num_layers * num_kv_heads + 1,), np.int64)[layer * num_kv_heads + head :][:2]
        k = np.concatenate([widen(view(arena, k_offset, (last, head_dim), dtype)[first:]), k])
        v = np.concatenate([widen(view(arena, v_offset, (last, head_dim), dtype)[first:]), v])
        row_bias = view(arena, bias_offset, (last,), np.float32)[first:] if bias_offset >= 0 else np.zeros(last - first)
        bias = np.concatenate([row_bias, bias])
    return k, v, bias
