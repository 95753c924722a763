# SPDX-License-Identifier: Apache-2.0
"""Which evicted tokens share a row: weighted k-means over keys and values, all heads at once."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 5
VALUE_WEIGHT = 0.5
"""How far apart two tokens are by their values, against by their keys (each in units of its head's RMS)."""


def cluster(keys: Tensor, values: Tensor, weights: Tensor, count: int, units: tuple[Tensor, Tensor]) -> Tensor:
    """Assigns every token to one of m clusters.

    Starts farthest-first (the heaviest token, then again and again the one of the largest weight times squared distance
    to those chosen), then a few rounds of Lloyd's algorithm. Equal values: the lower index.

    Args:
        keys: float32 [H, T, D].
        values: float32 [H, T, D].
        weights: float32 [H, T], >= 0; tokens of weight 0 shape no cluster.
        count: m, >= 1.
        units: of keys and values (``rms``).

    Returns:
        float32 [H, T, m]: the token's weight at its cluster, 0 elsewhere.
    """
    points = torch.cat((keys / units[0], VALUE_WEIGHT * (values / units[1])), -1)
    squares = points.square().sum(-1, keepdim=True)
    centers = _take(points, weights.argmax(1))
    nearest = _distance(points, squares, centers)[..., 0]
    for _ in range(count - 1):
        center = _take(points, (nearest * weights).argmax(1))
        nearest = torch.minimum(nearest, _distance(points, squares, center)[..., 0])
        centers = torch.cat((centers, center), 1)
    members = _members(points, squares, centers, weights)
    for _ in range(ROUNDS):
        centers = torch.where(members.sum(1).unsqueeze(-1) > 0, mean(points, members), centers)
        members = _members(points, squares, centers, weights)
    return members


def mean(rows: Tensor, members: Tensor) -> Tensor:
    """Weighted mean of rows [H, T, D] by cluster: [H, m, D]; zeros for a cluster without weight."""
    total = members.sum(1).unsqueeze(-1)
    return members.transpose(1, 2) @ rows / total.clamp_min(torch.finfo(rows.dtype).tiny)


def rms(rows: Tensor) -> Tensor:
    """Root mean square of each head of [H, T, D]: [H, 1, 1], greater than 0."""
    size = max(1, rows[0].numel()) ** 0.5
    return (torch.linalg.vector_norm(rows, dim=(1, 2), keepdim=True) / size).clamp_min(torch.finfo(rows.dtype).tiny)


def _take(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(1, index.view(-1, 1, 1).expand(-1, 1, points.shape[-1]))


def _distance(points: Tensor, squares: Tensor, centers: Tensor) -> Tensor:
    """Squared distances [H, T, m]; squares are those of the points, [H, T, 1]."""
    between = squares + centers.square().sum(-1).unsqueeze(1)
    return torch.baddbmm(between, points, centers.transpose(1, 2), alpha=-2).clamp_min_(0)


def _members(points: Tensor, squares: Tensor, centers: Tensor, weights: Tensor) -> Tensor:
    own = _distance(points, squares, centers).argmin(-1, keepdim=True)
    return weights.new_zeros(*weights.shape, centers.shape[1]).scatter_(2, own, weights.unsqueeze(-1))
