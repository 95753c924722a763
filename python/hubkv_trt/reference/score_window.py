# SPDX-License-Identifier: Apache-2.0
"""score_window: dense float64 softmaxes over the gathered keys, and the transforms as their formulas stand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import rows
from .rows import view, widen


def score_window(
    q: NDArray[Any],
    positions: NDArray[np.int32],
    arena: NDArray[np.uint8],
    segments: NDArray[np.int64],
    block_table: NDArray[np.int32],
    tail_tokens: int,
    tail_base: int,
    num_kv_heads: int,
    page_tokens: int,
    page_base: int,
    score: str,
    pool_kernel: int,
    mix: float,
    sink_tokens: int,
    scale: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32], NDArray[np.int64]]:
    """raw and transformed, float64 [N] and not rounded; candidate_positions int32 [N], candidate_offsets int64
    [L*Hkv + 1]. Arguments as for ``ops.score_window``; the tables must be right.
    """
    num_layers, num_queries, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    scale = scale or 1 / np.sqrt(head_dim)
    sizes = (num_layers, num_kv_heads, page_tokens, page_base, head_dim, q.dtype)
    heads = rows(arena, segments, block_table, tail_tokens, *sizes)
    table = int(segments[0, 2])
    old = view(arena, table, (len(heads) + 1,), np.int64) if table >= 0 else np.zeros(len(heads) + 1, np.int64)
    parts: list[tuple[NDArray[Any], ...]] = []
    for number, (k, _, bias) in enumerate(heads):
        layer, head = divmod(number, num_kv_heads)
        places = np.concatenate([positions[old[number] : old[number + 1]], tail_base + np.arange(tail_tokens)])
        queries = widen(q[layer, :, head * group : (head + 1) * group]).reshape(num_queries * group, head_dim)
        importance = softmax(scale * queries @ widen(k).T + bias).mean(axis=0)
        with np.errstate(divide="ignore"):
            raw = np.log(importance)
        if score == "snapkv":
            transformed = pooled(raw, places < sink_tokens, pool_kernel // 2)
        elif score == "rkv":
            transformed = without_redundancy(importance, widen(k), mix)
        else:
            transformed = raw
        parts.append((raw, transformed, places.astype(np.int32)))
    counts = [len(raw) for raw, *_ in parts]
    raw, transformed, places = (np.concatenate(x) for x in zip(*parts, strict=True))
    return raw, transformed, places, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    if logits.shape[-1] == 0:
        return logits
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def pooled(raw: NDArray[np.float64], protected: NDArray[np.bool_], reach: int) -> NDArray[np.float64]:
    """The largest value within reach, protected candidates aside."""
    open_values = np.where(protected, -np.inf, raw)
    best = [open_values[max(0, i - reach) : i + reach + 1].max() for i in range(len(raw))]
    return np.where(protected, raw, np.array(best, np.float64).reshape(raw.shape))


def without_redundancy(importance: NDArray[np.float64], keys: NDArray[np.float64], mix: float) -> NDArray[np.float64]:
    """The logarithm of R-KV's score as a share, from all pairs of keys [n, D]."""
    n = len(importance)
    if n == 0:
        return importance
    norms = np.linalg.norm(keys, axis=1, keepdims=True)
    unit = np.divide(keys, norms, out=np.zeros_like(keys), where=norms > 0)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, 0)
    mean = cosines.sum(axis=1) / max(n - 1, 1)
    s = mix * importance - (1 - mix) * softmax(mean)
    s = s - s.min()
    share = s / s.sum() if s.sum() > 0 else s
    return np.log(share + 1e-10)
