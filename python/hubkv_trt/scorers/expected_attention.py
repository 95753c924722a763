# SPDX-License-Identifier: Apache-2.0
"""Expected attention (arXiv 2510.00636): what queries like those of the prompt will look at from the next positions."""

from __future__ import annotations

import numpy as np
import torch

from ..models.scoring import LayerStates

NUM_SINKS = 4
NUM_FUTURE = 512
_BLOCK = 512  # tokens whose unrotated queries exist at the same time


class ExpectedAttentionScorer:
    """The attention that a Gaussian query expects to pay, times the size of the value it would fetch.

    The queries of a head before RoPE are taken for samples of a normal distribution (mean m, covariance C; without the
    first tokens). R is the average of the rotations to the next positions, with mean R m and covariance R C R^T:

        logit(k) = k . R m / sqrt(D) + k^T R C R^T k / (2 D)

    The value of a KV pair is softmax over tokens, mean over the group, times the Euclidean norm of v; the first tokens
    are left out of it. Map: x -> x / (1 + x), strictly increasing, from [0, inf) into [0, 1). The first tokens score 1.

    Args:
        inv_freq: float32 [D/2], of ``rope_frequencies``.
        attention_factor: that RoPE multiplies queries and keys with.
        num_sinks: first tokens, outliers that are left out and kept.
        num_future: positions behind the prompt that are averaged over.
    """

    def __init__(
        self,
        inv_freq: np.ndarray,
        attention_factor: float = 1.0,
        num_sinks: int = NUM_SINKS,
        num_future: int = NUM_FUTURE,
    ) -> None:
        self._inv_freq = torch.from_numpy(np.asarray(inv_freq, np.float32))
        self._factor = attention_factor
        self._num_sinks, self._num_future = num_sinks, num_future

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        """As ``LayerScorer.score``."""
        num_tokens, heads, dim = states.keys.shape
        scores = torch.ones(heads, num_tokens, device=states.keys.device)
        if num_tokens <= self._num_sinks:
            return scores
        mean, covariance = self._future_queries(states.queries)
        group = mean.shape[0] // heads
        for head in range(heads):
            keys = states.keys[self._num_sinks :, head].float()
            weights = torch.zeros(keys.shape[0], device=keys.device)
            for q in range(head * group, (head + 1) * group):
                logits = keys @ mean[q] / dim**0.5 + ((keys @ covariance[q]) * keys).sum(-1) / (2 * dim)
                weights += torch.softmax(logits, 0)
            norms = torch.linalg.vector_norm(states.values[self._num_sinks :, head], dim=-1, dtype=torch.float32)
            value = weights / group * norms
            scores[head, self._num_sinks :] = value / (1 + value)
        return scores

    def _future_queries(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated [T, Hq, D] -> mean [Hq, D] and covariance [Hq, D, D] at the next positions, float32."""
        num_tokens, num_heads, dim = queries.shape
        total = queries.new_zeros(num_heads, dim, dtype=torch.float64)
        products = queries.new_zeros(num_heads, dim, dim, dtype=torch.float64)
        for start in range(self._num_sinks, num_tokens, _BLOCK):
            rotated = queries[start : start + _BLOCK].float()
            cos, sin = self._turns(start, rotated.shape[0], rotated.device)
            # RoPE undone: turned back, and divided by its factor.
            block = _rotate(rotated, cos[:, None], -sin[:, None]).div_(self._factor).transpose(0, 1)
            total += block.sum(1, dtype=torch.float64)
            products += block.transpose(1, 2) @ block
        count = num_tokens - self._num_sinks
        mean = total / count
        covariance = products / count - mean[:, :, None] * mean[:, None, :]
        cos, sin = (self._factor * x.mean(0) for x in self._turns(num_tokens, self._num_future, queries.device))
        mean, covariance = mean.float(), covariance.float()
        covariance = _rotate(_rotate(covariance, cos, sin).transpose(1, 2), cos, sin)
        return _rotate(mean, cos, sin), covariance

    def _turns(self, first: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [count, D] of the positions from ``first`` on."""
        angles = torch.arange(first, first + count, device=device).float()[:, None] * self._inv_freq.to(device)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[..., D] rotated by halves."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
