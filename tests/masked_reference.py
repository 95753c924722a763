# SPDX-License-Identifier: Apache-2.0
"""transformers with some KV pairs of a prefix masked out, head by head: what a compacted cache must equal."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

NAME = "masked_reference"


def kept_mask(positions: np.ndarray, head_offsets: np.ndarray, shape: tuple[int, int, int]) -> torch.Tensor:
    """bool [L, Hkv, T] of a compact segment's rows."""
    num_layers, num_kv_heads, num_tokens = shape
    mask = torch.zeros(num_layers * num_kv_heads, num_tokens, dtype=torch.bool)
    for head, (first, last) in enumerate(itertools.pairwise(head_offsets)):
        mask[head, torch.from_numpy(positions[first:last].astype(np.int64))] = True
    return mask.view(num_layers, num_kv_heads, num_tokens)


@torch.no_grad()
def masked_logits(model: Any, token_ids: list[int], kept: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """Logits float32 [N, V] of a text whose first T tokens were compressed.

    The first T tokens attend to all before them, as a prefill does. Tokens from ``first`` on see, of the first T, in
    each head the kept ones only.

    Args:
        model: a transformers causal LM.
        token_ids: N >= T.
        kept: bool [L, Hkv, T].
        first: T or more; None: T.
    """
    size, num_tokens = len(token_ids), kept.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool).tril()

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        visible = causal.repeat(key.shape[1], 1, 1)  # [Hkv, N, N]
        visible[:, num_tokens if first is None else first :, :num_tokens] &= kept[module.layer_idx][:, None]
        group = query.shape[1] // key.shape[1]
        key, value, visible = (x.repeat_interleave(group, -3) for x in (key, value, visible))
        weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
