# SPDX-License-Identifier: Apache-2.0
"""How well predicted scores rank KV pairs, against the teacher's."""

from __future__ import annotations

import torch


def _ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks from 0, equal values sharing their mean rank. x [n] -> float64 [n]."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() + 1) / 2)[inverse]


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's rank correlation of two tensors of one shape, over all their elements; 0 where one is constant."""
    ra, rb = _ranks(a.flatten()), _ranks(b.flatten())
    ra, rb = ra - ra.mean(), rb - rb.mean()
    norm = (ra.norm() * rb.norm()).item()
    return (ra @ rb).item() / norm if norm else 0.0


def overlap(predicted: torch.Tensor, target: torch.Tensor, ratio: float) -> float:
    """The share of the KV pairs kept by the target at compression ratio r that the prediction keeps too.

    Args:
        predicted, target: scores of one shape; all elements compete (budget scope ``model``).
        ratio: r in [0, 1); K = N - floor(r*N) pairs are kept. Chance gives 1 - r.
    """
    num_kept = target.numel() - int(ratio * target.numel())
    kept = torch.zeros(target.numel(), dtype=torch.bool)
    kept[target.flatten().topk(num_kept).indices] = True
    return kept[predicted.flatten().topk(num_kept).indices].float().mean().item()
