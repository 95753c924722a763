# SPDX-License-Identifier: Apache-2.0
"""Attention weights of the last tokens of a prompt, one KV head at a time: O(M*T) memory for M of them."""

from __future__ import annotations

import torch


def window_attention(queries: torch.Tensor, keys: torch.Tensor, head: int, scale: float) -> torch.Tensor:
    """Causal attention weights of the last M tokens, for the query heads that share a KV head.

    Args:
        queries: [M, Hq, D], rotated, of the last M of T tokens.
        keys: [T, Hkv, D], rotated.
        head: index of the KV head.
        scale: of the logits.

    Returns:
        float32 [G, M, T]; each row sums to 1.
    """
    num_queries, group = queries.shape[0], queries.shape[1] // keys.shape[1]
    q = queries[:, head * group : (head + 1) * group].transpose(0, 1).float() * scale
    logits = q @ keys[:, head].float().T  # [G, M, T]
    future = torch.ones(num_queries, num_queries, dtype=torch.bool, device=keys.device).triu_(1)
    logits[..., -num_queries:].masked_fill_(future, -torch.inf)
    return torch.softmax(logits, -1)
