# SPDX-License-Identifier: Apache-2.0
"""Uniform random scores: what any other scorer has to beat."""

from __future__ import annotations

import torch

from ..models.scoring import LayerStates


class RandomScorer:
    """Uniform in [0, 1), independent over heads and tokens; prompts of equal length get equal scores.

    Args:
        seed: layer l draws from a generator seeded with seed + l.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        num_tokens, heads, _ = states.keys.shape
        device = states.keys.device
        generator = torch.Generator(device).manual_seed(self._seed + states.layer)
        return torch.rand(heads, num_tokens, generator=generator, device=device)
