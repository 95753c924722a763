# SPDX-License-Identifier: Apache-2.0
"""TensorRT's attention and rotary embedding. Semantics: the operators' reference of TensorRT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention_input(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *others: Tensor) -> Tensor:
    """Softmax attention [B, Hq, S, D] over [B, Hkv, Skv, D] in float32; query head h reads KV head h // (Hq / Hkv).

    A TensorRT attention is two layers, this one and its output; it has no scale. Which keys a query sees: those that
    the mask allows (bool), or by ``causal_kind``: with UPPER_LEFT query i sees keys 0..i, with LOWER_RIGHT the last
    query sees all. A mask of floats is added to the logits.
    """
    a = layer.attention
    if any(x is not None for x in others) or a.norm_op.name != "SOFTMAX":
        raise NotImplementedError(f"{a.name}: attention with lengths or quantization, or without softmax")
    if getattr(a, "query_form", None) != getattr(a, "key_value_form", None):
        raise NotImplementedError(f"{a.name}: attention over packed tokens")
    heads, num_queries, num_keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    logits = q.float() @ k.transpose(2, 3)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    visible = visible.tril({"NONE": num_keys, "UPPER_LEFT": 0, "LOWER_RIGHT": num_keys - num_queries}[causal_kind(a)])
    if mask is not None and mask.dtype is torch.bool:
        visible = visible & mask
    elif mask is not None:
        logits = logits + mask
    return logits.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def causal_kind(attention: Any) -> str:
    """``NONE``, ``UPPER_LEFT`` or ``LOWER_RIGHT``; before TensorRT 11 there is but a flag, for UPPER_LEFT."""
    if hasattr(attention, "causal_kind"):
        return str(attention.causal_kind.name)
    return "UPPER_LEFT" if attention.causal else "NONE"


def attention_output(layer: Any, x: Tensor) -> Tensor:
    return x


def rotary_embedding(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [B, H, S, D]: pairs (i, i + D/2), or neighbours where it is interleaved, turned by the angles of the tables.

    Tables are [B, S, D/2], or [positions, D/2] and read at ``positions`` [B, S].
    """
    if layer.rotary_embedding_dim not in (0, x.shape[3]):
        raise NotImplementedError(f"{layer.name}: rotary embedding of a part of the head")
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if layer.interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


LAYERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "ATTENTION_INPUT": ("IAttentionInputLayer", attention_input),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", attention_output),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", rotary_embedding),
}
