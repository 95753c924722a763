# SPDX-License-Identifier: Apache-2.0
"""What HubKV's one pass approximates: greedy maximization of local coverage, step by step.

A set S of tokens covers a text by F(S) = sum over i of max over j in S of w_ij. F is monotone and submodular, so greedy
reaches at least (1 - 1/e) of the best value of any set of its size (Nemhauser, Wolsey, Fisher, 1978). The paper leaves
w open; here a token covers itself wholly and its neighbours by a share, so that beside a hub that was chosen a token
alone is worth gamma times its score, as refine has it:

    w_ij = s_i * c(|i - j|),   c(0) = 1,   c(d) = 1 - gamma for 1 <= d <= (nms_kernel - 1) / 2,   else 0

Heads do not cover each other. As the gains of a greedy sequence never rise, the K largest gains of all heads together
are the K steps of greedy over all heads: gains are scores, which ``select`` reads as it reads any others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import require
from .scored import Scored


def coverage(weights: NDArray[np.float64], chosen: NDArray[np.int64]) -> float:
    """F(S) of w float64 [T, T] (row i is covered by column j) for the chosen columns; 0 for none."""
    return float(weights[:, chosen].max(1).sum()) if len(chosen) else 0.0


def greedy(weights: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The oracle: each step takes the column of the largest gain; of equal gains the lowest.

    Args:
        weights: w float64 [T, T], >= 0. T^2 values and T^2 * count operations: for small T.
        count: steps, at most T.

    Returns:
        The columns in the order of the steps, int64 [count], and their gains F(S + j) - F(S), float64 [count].
    """
    require(0 <= count <= weights.shape[1], "count", count, f"in 0..T = {weights.shape[1]}")
    covered = np.zeros(weights.shape[0])
    free = np.ones(weights.shape[1], bool)
    order, gains = np.empty(count, np.int64), np.empty(count)
    for step in range(count):
        gain = np.where(free, np.maximum(weights - covered[:, None], 0).sum(0), -np.inf)
        order[step] = best = int(gain.argmax())
        gains[step] = gain[best]
        covered = np.maximum(covered, weights[:, best])
        free[best] = False
    return order, gains


def local_weights(scores: NDArray[np.float64], nms_kernel: int, penalty_factor: float) -> NDArray[np.float64]:
    """w float64 [T, T] of the scores [T] of one head, >= 0, as the head of this file defines it."""
    distance = np.abs(np.subtract.outer(np.arange(len(scores)), np.arange(len(scores))))
    share = np.where(distance == 0, 1.0, np.where(distance <= nms_kernel // 2, 1.0 - penalty_factor, 0.0))
    return scores[:, None] * share


def local_coverage(values: Tensor, kept: Tensor, nms_kernel: int, penalty_factor: float) -> float:
    """F of a kept set over all heads, with ``local_weights``.

    Args:
        values: float32 [L, Hkv, T], >= 0.
        kept: bool [L, Hkv, T].
    """
    near = torch.nn.functional.max_pool1d(kept.float(), nms_kernel, stride=1, padding=nms_kernel // 2)
    share = torch.where(kept, 1.0, (1.0 - penalty_factor) * near.double())
    return float((values.double() * share).sum())


def greedy_gains(scored: Scored, nms_kernel: int = 5, penalty_factor: float = 0.5) -> Tensor:
    """Exact greedy with ``local_weights`` in every head at once: the gain of each token at the step that took it.

    T steps of O(L * Hkv * T): seconds for the demo model's 90 heads and 3k tokens, a hundred times as long for 32k.

    Args:
        scored: the scores; below 0 they count as 0.
        nms_kernel: tokens of the window that a token covers; odd.
        penalty_factor: gamma in [0, 1]; 1 covers no neighbour, and gains are then the scores.

    Returns:
        float32 [L, Hkv, T].
    """
    state = _Greedy(scored, nms_kernel, penalty_factor)
    gains = torch.empty_like(state.values)
    current = state.gains(torch.arange(state.num_tokens).expand(state.num_heads, -1))
    around = torch.arange(-2 * state.half, 2 * state.half + 1)
    rows = torch.arange(state.num_heads)
    for _ in range(state.num_tokens):
        best = current.argmax(1)
        gains[rows, best] = current[rows, best]
        state.take(best)
        changed = (best[:, None] + around).clamp(0, state.num_tokens - 1)
        taken = current.gather(1, changed) == -torch.inf
        current.scatter_(1, changed, state.gains(changed).masked_fill(taken, -torch.inf))
        current[rows, best] = -torch.inf
    return gains.view_as(scored.values).float()


def stochastic_greedy(
    scored: Scored, nms_kernel: int = 5, penalty_factor: float = 0.5, candidates: int = 16, seed: int = 0
) -> Tensor:
    """``greedy_gains`` that looks at a few random tokens a step (``StochasticGreedyFastKVzipPress``).

    Each step draws candidates among the tokens left, with replacement, and takes the one of the largest gain
    (Mirzasoleiman et al., Lazier Than Lazy Greedy, 2015).

    Args:
        scored: the scores; below 0 they count as 0.
        nms_kernel, penalty_factor: as in ``greedy_gains``.
        candidates: tokens that a step looks at, >= 1.
        seed: of the draws.

    Returns:
        float32 [L, Hkv, T]: the gain of each token at the step that took it.
    """
    require(candidates >= 1, "candidates", candidates, "an integer >= 1")
    state = _Greedy(scored, nms_kernel, penalty_factor)
    gains = torch.empty_like(state.values)
    generator = torch.Generator().manual_seed(seed)
    left = torch.arange(state.num_tokens).repeat(state.num_heads, 1)
    rows = torch.arange(state.num_heads)
    for remaining in range(state.num_tokens, 0, -1):
        draws = torch.randint(remaining, (state.num_heads, candidates), generator=generator)
        gain, winner = state.gains(left.gather(1, draws)).max(1)
        place = draws[rows, winner]
        best = left[rows, place]
        gains[rows, best] = gain
        state.take(best)
        left[rows, place] = left[:, remaining - 1].clone()
    return gains.view_as(scored.values).float()


class _Greedy:
    """What is covered so far, per head; float64."""

    def __init__(self, scored: Scored, nms_kernel: int, penalty_factor: float) -> None:
        require(nms_kernel >= 1 and nms_kernel % 2 == 1, "nms_kernel", nms_kernel, "an odd number >= 1")
        require(0 <= penalty_factor <= 1, "penalty_factor", penalty_factor, "in [0, 1]")
        self.values = scored.values.flatten(0, 1).double().clamp_min(0)
        self.num_heads, self.num_tokens = self.values.shape
        self.half = min(nms_kernel // 2, self.num_tokens - 1)
        self._padded = torch.nn.functional.pad(self.values, (self.half, self.half))  # worth 0 outside the text
        self._covered = torch.zeros_like(self._padded)  # share of each token, in [0, 1]
        self._offsets = torch.arange(2 * self.half + 1)
        self._share = torch.full((2 * self.half + 1,), 1.0 - penalty_factor, dtype=torch.float64)
        self._share[self.half] = 1.0

    def gains(self, tokens: Tensor) -> Tensor:
        """What each of the tokens [heads, n] would add, float64 [heads, n]."""
        window = (tokens[..., None] + self._offsets).flatten(1)
        worth, covered = (x.gather(1, window).view(*tokens.shape, -1) for x in (self._padded, self._covered))
        return ((self._share - covered).clamp_min(0) * worth).sum(-1)

    def take(self, tokens: Tensor) -> None:
        """Adds one token of each head, [heads]."""
        window = tokens[:, None] + self._offsets
        self._covered.scatter_(1, window, torch.maximum(self._covered.gather(1, window), self._share))
