# SPDX-License-Identifier: Apache-2.0
"""Early attempts that read one number a head, or one number a token of all heads of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .scored import Scored


def variance_calibration(scored: Scored, power: float = 1.0) -> Tensor:
    """Scores times the variance of their head (``VarianceCalibratedFastKVzipPress``).

        z_ht = s_ht * var_h ^ power,   var_h over all tokens of the head, the protected ones too

    Args:
        scored: the scores.
        power: 0 changes nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    if power == 0:
        return scored.values
    n = scored.finite.sum(-1, keepdim=True).clamp_min(1)
    values = scored.values.double()
    mean = values.sum(-1, keepdim=True) / n
    variance = torch.where(scored.finite, (values - mean).square(), 0).sum(-1, keepdim=True) / n
    return (values * variance**power).float()


def information_bottleneck(scored: Scored, strength: float = 0.5) -> Tensor:
    """Scores less what all heads of the layer agree on (``InfoBottleneckFastKVzipPress``).

        z_ht = s_ht - strength * mean over the layer's heads g of s_gt

    Args:
        scored: the scores; those that are no numbers are left out of the means.
        strength: 0 changes nothing.

    Returns:
        float32 [L, Hkv, T], also below 0.
    """
    prior = scored.values.sum(1, keepdim=True) / scored.finite.sum(1, keepdim=True).clamp_min(1)
    return scored.values - strength * prior
