# SPDX-License-Identifier: Apache-2.0
"""Early attempts that take from a score what the tokens before it said already."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..config import require
from ..reference.refine import hubs
from .scored import Scored


def streaming_submodular(scored: Scored, reach: int = 8, tau: float = 4.0, strength: float = 0.5) -> Tensor:
    """Scores less a penalty for what came before (``StreamingSubmodularFastKVzipPress``).

        z_t = max(0, s_t - strength * redundancy_t),   redundancy as in ``causal_redundancy``

    Args:
        scored: the scores.
        reach: tokens before that count.
        tau: how fast their weight fades, in tokens.
        strength: 0 changes nothing (of scores >= 0).

    Returns:
        float32 [L, Hkv, T], >= 0.
    """
    return (scored.values - strength * causal_redundancy(scored.values, reach, tau)).clamp_min(0)


def cma(scored: Scored, reach: int = 8, tau: float = 4.0, strength: float = 1.0) -> Tensor:
    """The penalty as a factor, which leaves the sign alone (``CMAFastKVzipPress``).

        z_t = s_t * exp(-strength * redundancy_t)

    Args:
        scored: the scores.
        reach, tau: as in ``streaming_submodular``.
        strength: 0 changes nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    return scored.values * torch.exp(-strength * causal_redundancy(scored.values, reach, tau))


def adaptive_tau_cma(scored: Scored, reach: int = 32, strength: float = 1.0, nms_kernel: int = 5) -> Tensor:
    """``cma`` whose tau is each head's own (``AdaptiveTauCMAFastKVzipPress``).

        tau_h = geometric mean of the distances between successive hubs of the head

    The walkthrough says that tau comes from a geometric mean, and not of what: the distances are a reading of it.

    Args:
        scored: the scores.
        reach: tokens before that count.
        strength: 0 changes nothing.
        nms_kernel: tokens of the window in which a hub is the largest; odd.

    Returns:
        float32 [L, Hkv, T].
    """
    return scored.values * torch.exp(
        -strength * causal_redundancy(scored.values, reach, hub_distance(scored, nms_kernel))
    )


def causal_redundancy(values: Tensor, reach: int, tau: float | Tensor) -> Tensor:
    """What the tokens before each one scored, the nearer the more.

        redundancy_t = sum over d = 1..reach of w_d * s_(t-d),   w_d = exp(-d / tau), scaled to the sum 1

    Args:
        values: float32 [L, Hkv, T].
        reach: >= 1; tokens before the first score 0.
        tau: > 0, one for all or float32 [L, Hkv].

    Returns:
        float32 [L, Hkv, T].

    Raises:
        ValueError: reach or tau is out of range.
    """
    require(reach >= 1, "reach", reach, "an integer >= 1")
    decay = torch.as_tensor(tau, dtype=torch.float32)
    require(bool((decay > 0).all()), "tau", tau, "> 0")
    weights = torch.softmax(-torch.arange(1, reach + 1) / decay[..., None], -1)  # [reach] or [L, Hkv, reach]
    total = torch.zeros_like(values)
    for distance in range(1, min(reach, values.shape[2] - 1) + 1):
        total[..., distance:] += weights[..., distance - 1, None] * values[..., :-distance]
    return total


def hub_distance(scored: Scored, nms_kernel: int) -> Tensor:
    """Geometric mean of the distances between successive hubs, float32 [L, Hkv]; T for a head with fewer than two."""
    is_hub = hubs(np.where(scored.finite, scored.values, np.float32(-np.inf)), nms_kernel)
    num_layers, num_heads, num_tokens = is_hub.shape
    means = [
        np.exp(np.log(np.diff(positions)).mean()) if len(positions) > 1 else num_tokens
        for positions in map(np.flatnonzero, is_hub.reshape(-1, num_tokens))
    ]
    return torch.tensor(means, dtype=torch.float32).view(num_layers, num_heads)
