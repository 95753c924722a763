# SPDX-License-Identifier: Apache-2.0
"""TOVA (arXiv 2401.06104): what the last token of the prompt looks at."""

from __future__ import annotations

import torch

from ..models.scoring import LayerStates
from .attention import window_attention


class TOVAScorer:
    """Attention that a key gets from the last token, mean over all query heads: the same score in every KV head.

    The last token itself scores 1, the maximum (and is protected besides: ``Scorer.observed``). Values lie in [0, 1].

    Args:
        scale: of the attention logits, 1/sqrt(D).
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        num_tokens, heads, _ = states.keys.shape
        scores = torch.zeros(num_tokens, device=states.keys.device)
        for head in range(heads):
            scores += window_attention(states.queries[-1:], states.keys, head, self._scale).sum((0, 1))
        scores /= states.queries.shape[1]
        scores[-1] = 1.0
        return scores.expand(heads, num_tokens)
