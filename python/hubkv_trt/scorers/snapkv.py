# SPDX-License-Identifier: Apache-2.0
"""SnapKV (arXiv 2404.14469): what the last tokens of the prompt look at."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..config import Scorer
from ..models.scoring import LayerStates
from .attention import window_attention

KERNEL = 5


class SnapKVScorer:
    """Attention that a key gets from the last tokens: mean over them, smoothed over 5 neighbours, mean over the group.

    The softmax runs over all keys that a query sees. The observed tokens themselves score 1, the maximum (and are
    protected besides: ``Scorer.observed``). Values lie in [0, 1] as they are.

    Args:
        scale: of the attention logits, 1/sqrt(D).
        window: how many last tokens observe.
        kernel: k, odd; width of the average.
    """

    def __init__(self, scale: float, window: int = Scorer.SNAPKV.observed, kernel: int = KERNEL) -> None:
        self._scale, self._window, self._kernel = scale, window, kernel

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        num_tokens, heads, _ = states.keys.shape
        scores = torch.ones(heads, num_tokens, device=states.keys.device)
        seen = num_tokens - self._window
        if seen <= 0:
            return scores
        queries = states.queries[seen:]
        for head in range(heads):
            weights = window_attention(queries, states.keys, head, self._scale)[..., :seen].mean(1)  # [G, seen]
            smooth = F.avg_pool1d(weights[None], self._kernel, 1, self._kernel // 2)[0]  # beyond the ends: zeros
            scores[head, :seen] = smooth.mean(0)
        return scores
