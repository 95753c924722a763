# SPDX-License-Identifier: Apache-2.0
"""held_out_loss: dense float64 softmaxes over the gathered keys, and a sum for each level."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import rows as head_rows
from .rows import view, widen
from .score_window import softmax

LEVELS = 32


def held_out_loss(
    q: NDArray[Any],
    ranking: NDArray[np.float32],
    candidate_positions: NDArray[np.int32],
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    block_table: NDArray[np.int32],
    tail_tokens: int,
    tail_length: int,
    num_kv_heads: int,
    page_tokens: int,
    page_base: int,
    sink_tokens: int,
    scale: float,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """loss float64 [L*Hkv, 33], not rounded, and rows int32 [L*Hkv, 33]; as ``ops.held_out_loss``. The tables must be
    right.
    """
    num_layers, num_queries, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    scale = scale or 1 / np.sqrt(head_dim)
    sizes = (num_layers, num_kv_heads, page_tokens, page_base, head_dim, q.dtype)
    heads = head_rows(arena, segments, block_table, tail_length, *sizes)
    table = int(segments[0, 2])
    old = view(arena, table, (len(heads) + 1,), np.int64) if table >= 0 else np.zeros(len(heads) + 1, np.int64)
    loss = np.zeros((len(heads), LEVELS + 1))
    rows = np.zeros((len(heads), LEVELS + 1), np.int32)
    later = tail_length - tail_tokens  # tail tokens that are no candidates; the last of them are the queries' own
    unseen = np.arange(later) > later - num_queries + np.arange(num_queries)[:, None]
    for number, (k, _, bias) in enumerate(heads):
        layer, head = divmod(number, num_kv_heads)
        count = int(old[number + 1] - old[number]) + tail_tokens
        entries = slice(int(old[number]) + number * tail_tokens, int(old[number]) + number * tail_tokens + count)
        protected = candidate_positions[entries] < sink_tokens
        level = levels(ranking[entries], protected)
        queries = widen(q[layer, :, head * group : (head + 1) * group]).reshape(num_queries * group, head_dim)
        logits = scale * queries @ widen(k).T + bias
        logits[:, count:][np.repeat(unseen, group, axis=0)] = -np.inf
        weights = softmax(logits)[:, :count]
        for b in range(LEVELS):
            lost = ~protected & (level >= b)
            loss[number, b] = (weights[:, lost].sum(axis=1) ** 2).mean()
            rows[number, b] = count - int(lost.sum())
        rows[number, LEVELS] = count
    return loss, rows


def levels(ranking: NDArray[np.float32], protected: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of the candidates of one head, in float32 as the kernels."""
    values = np.where(np.isnan(ranking), np.float32(-np.inf), ranking)
    best = values[~protected].max(initial=np.float32(-np.inf))
    if not np.isfinite(best):
        return np.full(len(values), LEVELS - 1)
    with np.errstate(over="ignore", invalid="ignore"):
        below = np.floor(np.float32(2) * (best - values))
    return np.where(below < LEVELS - 1, np.maximum(below, 0), LEVELS - 1).astype(np.int64)
