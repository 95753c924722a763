# SPDX-License-Identifier: Apache-2.0
"""Selection: which tokens stay as anchors and which go to the recycle bin (doi 10.5281/zenodo.19657329)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import Heads, logits


@dataclass(frozen=True)
class TokenStatistics:
    """Of the attention of the cached tokens among themselves.

    Attributes:
        entropy: float32 [H, T], H(P) = -sum p log p of the weights that each token's own query gives, in nats.
        importance: float32 [H, T], the weight that each token gets, summed over the queries.
    """

    entropy: Tensor
    importance: Tensor

    @property
    def anchor(self) -> Tensor:
        """float32 [H, T], higher stays rather: importance minus entropy, each in standard deviations of its head.

        The paper sends tokens of high entropy and low importance to the bin and does not say how the two are weighed.
        """
        return _standard(self.importance) - _standard(self.entropy)


def token_statistics(heads: Heads) -> TokenStatistics:
    """Entropy and accumulated importance of every token."""
    weights = logits(heads.queries, heads.keys, heads.scale, heads.causal).softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    return TokenStatistics(entropy, weights.sum(-2))


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of scores [H, T], and the others: int64 [H, count] and [H, T - count], each ascending.

    Equal scores: the lower index first.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(-1).values, order[:, count:].sort(-1).values


def _standard(x: Tensor) -> Tensor:
    spread = x.std(-1, correction=0, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / spread.clamp_min(torch.finfo(x.dtype).tiny)
