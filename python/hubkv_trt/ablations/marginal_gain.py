# SPDX-License-Identifier: Apache-2.0
"""Ideas of this project, not of the paper: other answers to what one more row is worth beside those that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import require
from ..refinement import prominent
from .scored import Scored


def prominence(scored: Scored, kernel: int = 5, strength: float = 0.5) -> Tensor:
    """The discount grows with how far a token stands below the best of its window; HubKV has one for all but the best.

    ``prominent``, which the preset ``prominence_k5_s2`` has in the serving path.

    Args:
        scored: the scores; below 0 they count as 0.
        kernel: tokens of the window, odd.
        strength: 0 changes nothing; below 0, down to -1, tokens are lifted towards the best of their window.

    Returns:
        float32 [L, Hkv, T], >= 0.
    """
    require(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd number >= 1")
    require(strength >= -1, "strength", strength, ">= -1")
    return prominent(scored.values, kernel, strength)


def diminishing_returns(scored: Scored, rows: int = 32, strength: float = 0.25) -> Tensor:
    """A row is worth less the more better ones its head has, wherever they stand: budgets of heads even out.

        z_t = s_t * (1 + n_t / rows) ^ -strength,   n_t = scores of the head that are larger

    The order within a head stays.

    Args:
        scored: the scores; below 0 they count as 0.
        rows: of a head, after which the loss becomes notable.
        strength: 0 changes nothing.

    Returns:
        float32 [L, Hkv, T], >= 0.
    """
    require(rows >= 1, "rows", rows, "an integer >= 1")
    require(strength >= 0, "strength", strength, ">= 0")
    values = scored.values.clamp_min(0)
    ascending = values.sort(-1).values
    larger = values.shape[-1] - torch.searchsorted(ascending, values, right=True)
    return values * (1 + larger / rows) ** -strength


def head_agreement(scored: Scored, strength: float = 0.25) -> Tensor:
    """Scores blended with what all heads of the model think of the token: tokens are kept whole rather than in parts.

        z_lht = (1 - strength) * s_lht + strength * mean over all layers and heads of s_t

    Args:
        scored: the scores; those that are no numbers are left out of the means.
        strength: in [0, 1]; 0 changes nothing, 1 leaves all heads the same scores.

    Returns:
        float32 [L, Hkv, T].
    """
    require(0 <= strength <= 1, "strength", strength, "in [0, 1]")
    mean = scored.values.sum((0, 1)) / scored.finite.sum((0, 1)).clamp_min(1)
    return (1 - strength) * scored.values + strength * mean
