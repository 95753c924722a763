# SPDX-License-Identifier: Apache-2.0
"""The control of every comparison: HubKV with its hubs at random places."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..config import HubKVConfig
from ..reference.refine import head_weights, hubs
from .scored import Scored


def placebo(scores: Tensor, hubkv: HubKVConfig, ratio: float, seed: int = 0) -> Tensor:
    """``refine`` in which every head has as many hubs as it found, at random among its unprotected positions.

    Discount, head weights and gate are those of ``refine``: what differs is only where the discount falls. What HubKV
    gains over its placebo is due to the hubs; what the placebo gains over the base is not.

    Args:
        scores: float32 [L, Hkv, T].
        hubkv: parameters and protection.
        ratio: r in [0, 1).
        seed: of the places.

    Returns:
        float32 [L, Hkv, T], protected positions +inf.
    """
    scored = Scored.of(scores, hubkv.sink_tokens, hubkv.window(scores.shape[2]))
    inner = scored.inner.numpy()
    is_hub = hubs(scores.numpy(), hubkv.nms_kernel)
    generator = np.random.default_rng(seed)
    is_hub[..., inner] = generator.permuted(is_hub[..., inner], axis=2)
    s = scored.values.numpy()
    beta = head_weights(
        s,
        scored.finite.numpy() & inner,
        np.float32(hubkv.head_weight_temperature),
        np.float32(hubkv.min_head_weight),
        np.float32(hubkv.max_head_weight),
    )
    q = np.where(is_hub, s, np.float32(hubkv.penalty_factor) * s)
    z = s + np.float32(hubkv.alpha(ratio)) * (beta[:, :, None] * q - s)
    return scored.restore(torch.from_numpy(z), scores)
