# SPDX-License-Identifier: Apache-2.0
"""Reference queries: those of the prompt's own tokens, moved to where the queries that come later will stand."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_REFERENCES = 64
"""R at most."""


def reference_queries(queries: Tensor, inv_freq: Tensor, count: int = MOST_REFERENCES) -> Tensor:
    """Queries of tokens spread evenly over a prompt, as if they came right after it.

    Token i's query was rotated for position i. Its i-th reference is rotated by the way that is missing to position
    T + i: rotations add up. A query of the middle of the prompt would otherwise look at the keys behind it from in
    front, as no query of a causal model ever does.

    Args:
        queries: [T, Hq, D], rotated for the positions 0..T-1.
        inv_freq: float32 [D/2], of the model's RoPE.
        count: of references at most.

    Returns:
        float32 [R, Hq, D], R = min(T, count).
    """
    num_tokens = queries.shape[0]
    size = min(num_tokens, count)
    tokens = torch.linspace(0, num_tokens - 1, size, device=queries.device).round().long()
    way = num_tokens + torch.arange(size, device=queries.device) - tokens
    angles = way.float().unsqueeze(-1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    cos, sin = (torch.cat(pair, -1).unsqueeze(1) for pair in ((cos, cos), (-sin, sin)))
    chosen = queries[tokens].float()
    return chosen * cos + chosen.roll(chosen.shape[-1] // 2, -1) * sin


def by_kv_head(queries: Tensor, num_kv_heads: int) -> Tensor:
    """[R, Hq, D] -> [Hkv, G*R, D]: the queries of all heads that share a KV head are its references."""
    size, _, head_dim = queries.shape
    return queries.view(size, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
