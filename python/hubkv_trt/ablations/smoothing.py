# SPDX-License-Identifier: Apache-2.0
"""Community smoothing: neighbouring tokens share their scores, as if what stands together belonged together."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..config import require
from .scored import Scored


def community_smoothing(scored: Scored, kernel: int = 5) -> Tensor:
    """The mean over the window of each token, the part of it inside the text (``CommunitySmoothFastKVzipPress``).

        z_t = mean of s_j over |j - t| <= (kernel - 1) / 2

    Args:
        scored: the scores; those that are no numbers are left out of the means.
        kernel: tokens of the window, odd; 1 changes nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    require(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd number >= 1")
    if kernel == 1:
        return scored.values
    total, count = (
        F.avg_pool1d(x, kernel, stride=1, padding=kernel // 2) for x in (scored.values, scored.finite.float())
    )
    return total / count.clamp_min(0.5 / kernel)  # where no score of the window is a number, neither is the token's
