# SPDX-License-Identifier: Apache-2.0
"""The stages as one would write them in torch: the peer of benchmarks/stages.py. Same results, checked there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hubkv_trt.config import HubKVConfig


def refine(scores: torch.Tensor, alpha: float, window: int, c: HubKVConfig) -> torch.Tensor:
    """[L, Hkv, T] float32 -> refined [L, Hkv, T] float32, with max_pool1d and element-wise operations."""
    pooled = F.max_pool1d(scores, c.nms_kernel, stride=1, padding=c.nms_kernel // 2)
    q = torch.where(scores >= pooled, scores, c.penalty_factor * scores)
    free = scores[..., c.sink_tokens : scores.shape[-1] - window]
    std, mean = torch.std_mean(free, dim=-1, correction=0)
    spread = std / (mean + 1e-6)
    beta = (spread / spread.mean(dim=-1, keepdim=True)).pow(c.head_weight_temperature)
    beta = beta.clamp(c.min_head_weight, c.max_head_weight)[..., None]
    refined = scores + alpha * (beta * q - scores)
    refined[..., : c.sink_tokens] = torch.inf
    refined[..., scores.shape[-1] - window :] = torch.inf
    return refined


def select(refined: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, Hkv, T], K -> positions int32 [K], head_offsets int64 [L*Hkv + 1]: topk over all, then sorted by index."""
    num_layers, num_heads, num_tokens = refined.shape
    kept = torch.topk(refined.flatten(), rows, sorted=False).indices.sort().values
    counts = torch.bincount(kept // num_tokens, minlength=num_layers * num_heads)
    offsets = torch.zeros(num_layers * num_heads + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return (kept % num_tokens).int(), offsets


def flat_rows(positions: torch.Tensor, head_offsets: torch.Tensor, num_layers: int) -> list[torch.Tensor]:
    """Per layer the kept rows as indices into [T*Hkv]: what index_select needs; made once, outside of any timing."""
    num_heads = (len(head_offsets) - 1) // num_layers
    heads = torch.repeat_interleave(head_offsets.diff())
    flat = positions.long() * num_heads + heads % num_heads
    return [flat[head_offsets[i * num_heads] : head_offsets[(i + 1) * num_heads]] for i in range(num_layers)]


def compact(
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    index: Sequence[torch.Tensor],
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
) -> None:
    """Per layer k, v [T, Hkv, D] -> k_rows, v_rows [K, D], with index_select into the place."""
    start = 0
    for k_layer, v_layer, rows in zip(k, v, index, strict=True):
        stop = start + len(rows)
        torch.index_select(k_layer.flatten(0, 1), 0, rows, out=k_rows[start:stop])
        torch.index_select(v_layer.flatten(0, 1), 0, rows, out=v_rows[start:stop])
        start = stop


def pad_rows(
    rows: torch.Tensor, head_offsets: torch.Tensor, num_layers: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[K, D] -> per layer (padded [Hkv, longest head of the layer, D], mask bool [Hkv, longest])."""
    num_heads = (len(head_offsets) - 1) // num_layers
    layers = []
    for i in range(num_layers):
        offsets = head_offsets[i * num_heads : (i + 1) * num_heads + 1].tolist()
        longest = max(stop - start for start, stop in itertools.pairwise(offsets))
        padded = rows.new_zeros(num_heads, longest, rows.shape[-1])
        mask = torch.zeros(num_heads, longest, dtype=torch.bool, device=rows.device)
        for head, (start, stop) in enumerate(itertools.pairwise(offsets)):
            padded[head, : stop - start] = rows[start:stop]
            mask[head, : stop - start] = True
        layers.append((padded, mask))
    return layers


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [B, Hq, 1, D], padded k and v [B, Hkv, longest, D], mask [B, Hq, 1, longest] -> [B, Hq, 1, D]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
