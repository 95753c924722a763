# SPDX-License-Identifier: Apache-2.0
"""Budget allocators: rows are shared out among heads first, then every head keeps its own best.

Beside ``select``, where all pairs of a group compete. A rule gives every head a weight; rows go to heads in proportion
to it, above those that each must keep and up to those that it has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import require


def mass(inner: Tensor, counted: Tensor) -> Tensor:
    """Sum of the refined scores, those above 0: water that fills heads to one level until they are full."""
    return torch.where(counted, inner, 0).clamp_min(0).sum(-1)


def selectivity(inner: Tensor, counted: Tensor) -> Tensor:
    """c_h = std / (mean + 1e-6) as in refine: heads that single tokens out keep more."""
    n = counted.sum(-1).clamp_min(1)
    x = torch.where(counted, inner, 0)
    mean = x.sum(-1) / n
    deviation = torch.where(counted, x - mean[..., None], 0)
    return ((deviation.square().sum(-1) / n).sqrt() / (mean + 1e-6)).clamp_min(0)


def entropy(inner: Tensor, counted: Tensor) -> Tensor:
    """exp(-sum of p log p), p = scores over their sum: over how many tokens a head's scores are spread."""
    x = torch.where(counted, inner, 0).clamp_min(0)
    total = x.sum(-1, keepdim=True)
    p = x / torch.where(total > 0, total, 1)
    return torch.where(total[..., 0] > 0, torch.special.entr(p).sum(-1).exp(), 0)


def hybrid(inner: Tensor, counted: Tensor) -> Tensor:
    """Geometric mean of selectivity and entropy."""
    return (selectivity(inner, counted) * entropy(inner, counted)).sqrt()


HEAD_BUDGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "head_budget_waterfill": mass,
    "head_budget_selectivity": selectivity,
    "head_budget_entropy": entropy,
    "head_budget_hybrid": hybrid,
}
"""The paper's names of rules: refined scores float64 [heads, T] and which of them count -> weights float64 [heads]."""


def allocate(name: str, refined: Tensor, num_groups: int, rows_per_group: int) -> Tensor:
    """Rows of each head: those that are +inf (protected), and a share of the rest in proportion to the head's weight.

    Args:
        name: of a rule in ``HEAD_BUDGETS``.
        refined: float32 [L, Hkv, T], from ``ops.refine``.
        num_groups: S, groups of heads that share a budget, as in ``ops.select``.
        rows_per_group: K of each group.

    Returns:
        int64 [L, Hkv]: each at most T, and the sum of each group exactly K.

    Raises:
        ValueError: no such rule, or K is less than the protected rows of a group or more than it has.
    """
    require(name in HEAD_BUDGETS, "head budget", name, f"one of {', '.join(HEAD_BUDGETS)}")
    num_layers, num_kv_heads, num_tokens = refined.shape
    groups = refined.double().view(num_groups, -1, num_tokens)
    rows = []
    for inner in groups:
        protected = torch.isposinf(inner)
        weights = HEAD_BUDGETS[name](inner, inner.isfinite())
        rows.append(_share_out(weights, protected.sum(-1), num_tokens, rows_per_group))
    return torch.stack(rows).view(num_layers, num_kv_heads)


def select_rows(refined: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows_h largest of each head; ties, NaN and order as ``ops.select`` has them.

    Args:
        refined: float32 [L, Hkv, T].
        rows: int64 [L, Hkv], each in 0..T.

    Returns:
        positions int32 [K], ascending within a head, and head_offsets int64 [L*Hkv + 1].
    """
    values = torch.where(refined.isnan(), -torch.inf, refined).flatten(0, 1)
    order = values.argsort(dim=1, descending=True, stable=True)
    best = torch.arange(values.shape[1]) < rows.flatten()[:, None]
    kept = torch.zeros_like(best).scatter_(1, order, best)
    offsets = torch.zeros(len(values) + 1, dtype=torch.int64)
    torch.cumsum(rows.flatten(), 0, out=offsets[1:])
    return kept.nonzero()[:, 1].int(), offsets


def _share_out(weights: Tensor, floor: Tensor, cap: int, total: int) -> Tensor:
    """int64 [heads] of sum total, each between floor and cap: floor + level * weight, one level for all, then rounded.

    Rounding takes the integers below and gives what is left to the largest fractions; equal ones: the lower head first.
    Heads of weight 0 get more than their floor only when all others are full.
    """
    least, most = int(floor.sum()), cap * len(weights)
    require(least <= total <= most, "rows_per_group", total, f"in {least}..{most}, from the protected rows to all")
    share, room = torch.zeros_like(weights), (cap - floor).double()
    while (left := total - least - float(share.sum())) > 1e-6:  # every round but the last fills a head
        weight = torch.where(share < room, weights, 0)
        if weight.sum() == 0:
            weight = (share < room).double()
        share = torch.minimum(room, share + left * weight / weight.sum())
    rows = floor + share.add(1e-9).floor().long()
    fraction = torch.where(rows < cap, floor + share - rows, -1.0)
    rows[fraction.argsort(descending=True, stable=True)[: total - int(rows.sum())]] += 1
    return rows
