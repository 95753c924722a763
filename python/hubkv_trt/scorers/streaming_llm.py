# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM (arXiv 2309.17453): the first tokens, and of the rest the latest."""

from __future__ import annotations

import torch

from ..models.scoring import LayerStates

NUM_SINKS = 4


class StreamingLLMScorer:
    """Position t scores (t + 1) / (T + 1), each of the sinks 1: whatever the budget, sinks and the latest are kept.

    The method itself knows only which positions stay at a given budget; these values give just those at every budget.
    All heads score alike. Tokens keep their positions in the text (the paper renumbers them in the cache).

    Args:
        num_sinks: first tokens that stay.
    """

    def __init__(self, num_sinks: int = NUM_SINKS) -> None:
        self._num_sinks = num_sinks

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        num_tokens, heads, _ = states.keys.shape
        scores = torch.arange(1, num_tokens + 1, device=states.keys.device).float() / (num_tokens + 1)
        scores[: self._num_sinks] = 1.0
        return scores.expand(heads, num_tokens)
