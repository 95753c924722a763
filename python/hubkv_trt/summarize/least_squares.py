# SPDX-License-Identifier: Apache-2.0
"""Reconstruction: the linear map of queries that is nearest to what a bin answers, and its components as rows."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-6
CUTOFF = 1e-6


def least_squares(queries: Tensor, targets: Tensor, ridge: float = RIDGE, cutoff: float = CUTOFF) -> Tensor:
    """W of least ||Q W - Y||^2 + lambda ||W||^2.

    With Q = U S V^T: W = sum over j of v_j s_j / (s_j^2 + lambda) u_j^T Y, lambda = ridge * s_max^2, over the j with
    s_j > cutoff * s_max. A ridge of 0 gives the Moore-Penrose pseudoinverse, W = pinv(Q) Y. V and S come from the
    eigenvalues of Q^T Q, in float64.

    Args:
        queries: Q [H, R, D].
        targets: Y [H, R, D].
        ridge: relative to the largest squared singular value.
        cutoff: relative to the largest singular value, at least 1e-7; smaller ones count as 0.

    Returns:
        [H, D, D] in the type of the targets; zeros where Q is 0.
    """
    q = queries.double().transpose(-1, -2)
    squares, v = torch.linalg.eigh(q @ q.transpose(-1, -2))
    largest = squares[..., -1:].clamp_min(0)
    kept = (squares > cutoff * cutoff * largest) & (largest > 0)
    inverse = torch.where(kept, 1 / torch.where(kept, squares + ridge * largest, 1.0), 0.0)
    w = v @ (inverse.unsqueeze(-1) * (v.transpose(-1, -2) @ (q @ targets.double())))
    return w.to(targets.dtype)


def low_rank_rows(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compression: the ``rank`` largest components of W = U S V^T as rows of a KV cache.

    Component j becomes k_j = sqrt(S_j) U_j and v_j = sqrt(S_j) V_j: sum over j of (q.k_j) v_j = q U_k S_k V_k^T. The
    paper does not say how S is shared out between the two.

    Args:
        w: [H, D, D].
        rank: k, at most D; components beyond the rank of W are zero rows.

    Returns:
        k and v, [H, rank, D] each.
    """
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    root = s[..., :rank].sqrt()
    return (u[..., :rank] * root.unsqueeze(-2)).transpose(-1, -2), vt[..., :rank, :] * root.unsqueeze(-1)
