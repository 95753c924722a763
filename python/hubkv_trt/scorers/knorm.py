# SPDX-License-Identifier: Apache-2.0
"""KNorm (arXiv 2406.11430): keys of small norm draw attention."""

from __future__ import annotations

import torch

from ..models.scoring import LayerStates


class KNormScorer:
    """n is the Euclidean norm of the key, and less is better: the method's value is -n, of any size below 0.

    Map: -n -> 1 / (1 + n), strictly increasing in -n, into (0, 1].
    """

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        norms = torch.linalg.vector_norm(states.keys, dim=-1, dtype=torch.float32)
        return (1 / (1 + norms)).T
