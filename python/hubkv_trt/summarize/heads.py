# SPDX-License-Identifier: Apache-2.0
"""Attention heads as this package reads them: a cache, queries that it may look at, and queries that come later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import require

EMPTY = -1e30
"""Row bias of a row that stands for nothing. Finite: a part of a softmax that holds only such rows stays a number."""


@dataclass(frozen=True)
class Heads:
    """H heads over the same number of tokens.

    Attributes:
        name: of the case, for tables.
        queries: float32 [H, T, D], of the cached tokens themselves: what a method may look at.
        later: float32 [H, E, D], on which errors are measured. They attend to all T tokens.
        keys: float32 [H, T, D].
        values: float32 [H, T, D].
        scale: of the logits.
        causal: token i's own query saw the tokens 0..i only.
    """

    name: str
    queries: Tensor
    later: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    causal: bool

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.keys.shape[1]


def logits(queries: Tensor, keys: Tensor, scale: float, causal: bool = False) -> Tensor:
    """[H, R, D], [H, N, D] -> scale * q.k float32 [H, R, N]; with ``causal`` (R = N) -inf where the key is later."""
    found = torch.matmul(queries * scale, keys.transpose(-1, -2))
    if causal:
        size = found.shape[-1]
        require(found.shape[-2] == size, "queries", tuple(queries.shape), f"as many as the {size} keys")
        found.masked_fill_(torch.ones(size, size, dtype=torch.bool, device=found.device).triu_(1), -torch.inf)
    return found


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the logarithm of its denominator.

    Args:
        queries: [H, R, D].
        keys: [H, N, D].
        values: [H, N, D].
        scale: of the logits.
        bias: [H, N], added to the logits; None is 0.

    Returns:
        Outputs [H, R, D] and log sum_n exp(scale * q.k_n + bias_n) [H, R]; zeros and -inf where N is 0.
    """
    if keys.shape[1] == 0:
        return torch.zeros_like(queries), queries.new_full(queries.shape[:-1], -torch.inf)
    found = logits(queries, keys, scale)
    if bias is not None:
        found += bias.unsqueeze(-2)
    log_mass = found.logsumexp(-1)
    return torch.matmul((found - log_mass.unsqueeze(-1)).exp_(), values), log_mass


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [H, N, D] at index int64 [H, n] -> [H, n, D]."""
    return rows.gather(1, index.unsqueeze(-1).expand(*index.shape, rows.shape[-1]))
