# SPDX-License-Identifier: Apache-2.0
"""The synthetic transformer: one attention layer over random tokens with random projections."""

from __future__ import annotations

import torch

from ..config import require
from .heads import Heads

PUBLISHED_TOKENS = 200
PUBLISHED_DIM = 64
PUBLISHED_SEED = 42
PUBLISHED_SPREAD = float(PUBLISHED_DIM**1.5)


def synthetic_heads(
    num_tokens: int = PUBLISHED_TOKENS,
    head_dim: int = PUBLISHED_DIM,
    draws: int = 8,
    spread: float = PUBLISHED_SPREAD,
    seed: int = PUBLISHED_SEED,
) -> Heads:
    """Tokens X ~ N(0, 1) [T, D]; Q, K, V = X Wq, X Wk, X Wv with W ~ N(0, 1) [D, D]; no causal mask.

    As the notebook of the publication has it (T = 200, D = 64, seed 42), there in one draw and with logits q.k as they
    are: their standard deviation is D^1.5 = 512, and each query looks at one token. ``spread`` sets it.

    Args:
        num_tokens: T, >= 1.
        head_dim: D, >= 1.
        draws: H, independent of each other.
        spread: standard deviation of the logits, > 0.
        seed: of all draws.

    Returns:
        Heads whose later queries are those of T other tokens under the same projections.
    """
    for name, value in (("num_tokens", num_tokens), ("head_dim", head_dim), ("draws", draws)):
        require(type(value) is int and value >= 1, name, value, "an integer >= 1")
    require(spread > 0, "spread", spread, "a number > 0")
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randn(draws, 2 * num_tokens, head_dim, generator=random)
    wq, wk, wv = (torch.randn(draws, head_dim, head_dim, generator=random) for _ in range(3))
    first, later = tokens.split(num_tokens, 1)
    return Heads(
        name=f"synthetic, logits of spread {spread:g}",
        queries=first @ wq,
        later=later @ wq,
        keys=first @ wk,
        values=first @ wv,
        scale=spread / head_dim**1.5,
        causal=False,
    )
