# SPDX-License-Identifier: Apache-2.0
"""Non-negative least squares of few unknowns, exactly, for many heads at once."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_UNKNOWNS = 8
RIDGE = 1e-8


def nonnegative_least_squares(a: Tensor, z: Tensor) -> Tensor:
    """x >= 0 of least ||a x - z||^2.

    The solution is the unconstrained one over the unknowns that are not 0, whichever those are: all 2^m sets of them
    are solved, and the best with no negative unknown is taken. Columns are scaled to length 1 and have a ridge of 1e-8,
    so that equal ones are no division by 0. In float64.

    Args:
        a: [H, R, m], m <= 8; a column of zeros gets x = 0.
        z: [H, R].

    Returns:
        float64 [H, m].
    """
    a, z = a.double(), z.double()
    count = a.shape[-1]
    length = a.norm(dim=1)
    unit = a / torch.where(length > 0, length, 1.0).unsqueeze(1)
    gram, target = unit.transpose(1, 2) @ unit, (unit.transpose(1, 2) @ z.unsqueeze(-1)).squeeze(-1)
    bits = torch.arange(count, device=a.device)
    sets = ((torch.arange(1 << count, device=a.device).unsqueeze(-1) >> bits) & 1).double()  # [2^m, m]
    both = sets.unsqueeze(-1) * sets.unsqueeze(-2)
    system = gram.unsqueeze(1) * both + torch.diag_embed(1 - sets + RIDGE)
    x = torch.linalg.solve(system, (target.unsqueeze(1) * sets).unsqueeze(-1)).squeeze(-1)  # [H, 2^m, m]
    cost = ((x.unsqueeze(-2) @ gram.unsqueeze(1)).squeeze(-2) * x).sum(-1) - 2 * (x * target.unsqueeze(1)).sum(-1)
    best = cost.masked_fill((x < 0).any(-1), torch.inf).argmin(-1)  # the empty set is always among them
    x = x.gather(1, best.view(-1, 1, 1).expand(-1, 1, count)).squeeze(1)
    return torch.where(length > 0, x / torch.where(length > 0, length, 1.0), 0.0)
