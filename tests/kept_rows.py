# SPDX-License-Identifier: Apache-2.0
"""Which KV pairs a compact segment holds."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hubkv_trt.config import ModelConfig


def as_mask(positions: torch.Tensor, head_offsets: torch.Tensor, model: ModelConfig, num_tokens: int) -> np.ndarray:
    """bool [L, Hkv, T] of the rows of a segment: positions int32 [K], head_offsets int64 [L*Hkv + 1]."""
    offsets = head_offsets.tolist()
    kept = np.zeros((model.num_rows_per_token, num_tokens), bool)
    for head, (start, stop) in enumerate(itertools.pairwise(offsets)):
        kept[head, positions[start:stop].numpy()] = True
    assert kept.sum() == offsets[-1] == positions.numel()
    return kept.reshape(model.num_layers, model.num_kv_heads, num_tokens)
