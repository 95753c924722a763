# SPDX-License-Identifier: Apache-2.0
"""Early attempts by truncated SVD: the heads of a layer are the rows of a matrix [Hkv, T]; few patterns of it stay."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import require
from .head_statistics import information_bottleneck
from .scored import Scored


def low_rank_spectrum(scored: Scored, rank: int = 2) -> Tensor:
    """The best approximation of each layer's scores by ``rank`` patterns (``LowRankSpectrumFastKVzipPress``).

        S = U diag(sigma) V',   Z = the terms of the rank largest sigma

    Args:
        scored: the scores.
        rank: >= 1; Hkv and more change nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    return _truncate(scored.values, rank)


def residual_svd(scored: Scored, rank: int = 2, blend: float = 0.5) -> Tensor:
    """A blend of the scores and their low-rank part (``ResidualSVDFastKVzipPress``).

        Z = (1 - blend) * S + blend * low_rank(S)

    Args:
        scored: the scores.
        rank: as in ``low_rank_spectrum``.
        blend: in [0, 1]; 0 changes nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    require(0 <= blend <= 1, "blend", blend, "in [0, 1]")
    return torch.lerp(scored.values, _truncate(scored.values, rank), blend)


def layerwise_residual_svd(scored: Scored, rank: int = 2, max_blend: float = 1.0) -> Tensor:
    """``residual_svd`` with a blend that grows with depth (``LayerwiseResidualSVDFastKVzipPress``).

        blend of layer l = max_blend * (l + 1) / L

    Args:
        scored: the scores of all L layers.
        rank: as in ``low_rank_spectrum``.
        max_blend: of the last layer, in [0, 1]; 0 changes nothing.

    Returns:
        float32 [L, Hkv, T].
    """
    require(0 <= max_blend <= 1, "max_blend", max_blend, "in [0, 1]")
    num_layers = scored.values.shape[0]
    blend = max_blend * torch.arange(1, num_layers + 1) / num_layers
    return torch.lerp(scored.values, _truncate(scored.values, rank), blend[:, None, None])


def bottleneck_svd(scored: Scored, strength: float = 0.5, rank: int = 2) -> Tensor:
    """``information_bottleneck``, then ``low_rank_spectrum`` (``IB_SVDFastKVzipPress``).

    Args:
        scored: the scores.
        strength: of the first.
        rank: of the second.

    Returns:
        float32 [L, Hkv, T].
    """
    return _truncate(information_bottleneck(scored, strength), rank)


def _truncate(scores: Tensor, rank: int) -> Tensor:
    """[L, Hkv, T] projected, layer by layer, on its first ``rank`` left singular vectors."""
    require(rank >= 1, "rank", rank, "an integer >= 1")
    if rank >= scores.shape[1]:
        return scores
    x = scores.double()
    _, vectors = torch.linalg.eigh(x @ x.mT)  # ascending
    vectors = vectors[..., -rank:]
    return (vectors @ (vectors.mT @ x)).float()
