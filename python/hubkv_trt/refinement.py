# SPDX-License-Identifier: Apache-2.0
"""The refine stage with the parameters of a configuration, and a discount of this project's own before it.

HubKV's refinement knows two kinds of tokens, hubs and others, and takes the same share from all others. Where scores of
one height stand side by side, as those of a number's digits, that tears apart what is of use only together.
``prominent`` takes the more, the farther a token stands below its neighbours. Measured beside HubKV in docs/quality.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .config import HubKVConfig


def refine(scores: Tensor, alpha: Tensor, window: Tensor, hubkv: HubKVConfig) -> tuple[Tensor, Tensor]:
    """Scores float32 [L, Hkv, T] as ``hubkv`` refines them, and how many were no numbers: what ``ops.refine`` gives."""
    if hubkv.prominence:
        scores = prominent(scores, hubkv.nms_kernel, hubkv.prominence)
    return ops.refine(
        scores.contiguous(), alpha, window, hubkv.nms_kernel, hubkv.penalty_factor, hubkv.head_weight_temperature,
        hubkv.min_head_weight, hubkv.max_head_weight, hubkv.sink_tokens,
    )  # fmt: skip


def prominent(scores: Tensor, kernel: int, strength: float) -> Tensor:
    """Scores times their share of the largest score near them, to a power.

        z_t = s_t * (s_t / max of s_j over |j - t| <= (kernel - 1) / 2) ^ strength

    A window maximum, O(T * k), a division, and for strengths 1, 2 and 3 products alone.

    Args:
        scores: float32 [L, Hkv, T]; below 0 they count as 0. A score that is no number stays, and is near to none.
        kernel: k, tokens of the window, odd; 1 changes nothing (of scores >= 0).
        strength: 0 changes nothing; below 0, down to -1, tokens are lifted towards the largest one near them.

    Returns:
        float32 [L, Hkv, T], >= 0 where scores are numbers.
    """
    kernel = min(kernel, 2 * scores.shape[-1] - 1)  # all of the text
    finite = scores.isfinite()
    values = torch.where(finite, scores, 0).clamp_min_(0)
    best = F.max_pool1d(values, kernel, stride=1, padding=kernel // 2)
    lowered = torch.where(values > 0, values * (values / best) ** strength, 0)
    return torch.where(finite, lowered, scores)
