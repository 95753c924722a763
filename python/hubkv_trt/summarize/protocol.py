# SPDX-License-Identifier: Apache-2.0
"""The published evaluation: methods at keep ratios under the FAIR and the REAL protocol, and the bytes of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..config import MOST_CENTROIDS, Evicted, require
from .entropy import TokenStatistics, token_statistics
from .heads import Heads, attend
from .methods import Stored, Target, anchors, fitted_rows, hae, hae_with_known_mass, rank_k, sliding_window, top_k

KEEP_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BIN_TOKENS = 32
RANK = 8


class Protocol(str, Enum):
    """How many anchors the full pipeline keeps of a budget of k tokens. The baselines keep k."""

    FAIR = "fair"  # k - (bin_size - k_rank), not below 0
    REAL = "real"  # k, and the synthetic rows come on top; what counts is the bytes stored
    EQUAL = "equal"  # k - k_rank: as many rows as the baselines (not in the publication)

    def active(self, budget: int, bin_tokens: int, rank: int) -> int:
        """The anchors beside which ``rank`` rows are stored."""
        extra = {Protocol.FAIR: bin_tokens - rank, Protocol.REAL: 0, Protocol.EQUAL: rank}[self]
        return max(0, budget - extra)


@dataclass(frozen=True)
class Cell:
    """One method at one keep ratio.

    Attributes:
        method: its name.
        protocol: of the full pipeline; empty for a baseline.
        keep: the keep ratio.
        rows: stored of each head; None where it is no cache.
        num_bytes: of them, 4 bytes a number.
        error: mean squared error of the outputs of the cached tokens' own queries over the mean square of what the
            full cache gives, mean over heads. The publication measures these queries.
        error_se: its standard error over heads.
        later: the same for the later queries.
        later_se: its standard error.
    """

    method: str
    protocol: str
    keep: float
    rows: int | None
    num_bytes: float | None
    error: float
    error_se: float
    later: float
    later_se: float


BASELINES: dict[str, Callable[[Heads, TokenStatistics, int], Stored]] = {
    "top-k": top_k,
    "sliding window": sliding_window,
    "OLS rank k": rank_k,
    "HAE, no OLS": anchors,
}
"""Methods that keep the budget itself."""


def evaluate(
    cases: Sequence[Heads], keep_ratios: Sequence[float] = KEEP_RATIOS, bin_tokens: int = BIN_TOKENS, rank: int = RANK
) -> list[Cell]:
    """Every method at every keep ratio.

    Args:
        cases: heads over the same number of tokens, one by one: their T x T weights are in memory at once.
        keep_ratios: each in (0, 1); a budget is that share of the T tokens, rounded.
        bin_tokens: bin_size of FAIR, >= rank.
        rank: k_rank, 1..D.

    Raises:
        ValueError: a parameter is out of range.
    """
    require(len(cases) > 0, "cases", cases, "one or more heads")
    check_parameters(cases[0], bin_tokens, rank)
    require(len(keep_ratios) > 0 and all(0 < r < 1 for r in keep_ratios), "keep", list(keep_ratios), "in (0, 1)")
    merged: dict[tuple[str, str, float], list[_Found]] = {}
    for heads in cases:
        statistics = token_statistics(heads)
        true = tuple(attend(q, heads.keys, heads.values, heads.scale)[0] for q in (heads.queries, heads.later))
        for keep in keep_ratios:
            for name, protocol, found in _measure(heads, statistics, true, keep, bin_tokens, rank):
                merged.setdefault((name, protocol, keep), []).append(found)
    return [_cell(*key, found) for key, found in merged.items()]


def check_parameters(heads: Heads, bin_tokens: int, rank: int) -> None:
    """Raises ``ValueError`` where rank or bin size is out of range."""
    limit = heads.keys.shape[2]
    require(type(rank) is int and 1 <= rank <= limit, "rank", rank, f"in 1..{limit}, the head dimension")
    require(type(bin_tokens) is int and bin_tokens >= rank, "bin_tokens", bin_tokens, f"an integer >= rank = {rank}")


def relative_error(out: Tensor, true: Tensor) -> Tensor:
    """Mean squared error of [H, E, D] over the mean square of the truth: float32 [H]."""
    return (out - true).square().mean((1, 2)) / true.square().mean((1, 2)).clamp_min(torch.finfo(true.dtype).tiny)


@dataclass(frozen=True)
class _Found:
    """Of one case: what was stored, and the errors of each head by own and later queries."""

    stored: Stored | None
    errors: tuple[Tensor, Tensor]


def _measure(
    heads: Heads, statistics: TokenStatistics, true: tuple[Tensor, ...], keep: float, bin_tokens: int, rank: int
) -> Iterator[tuple[str, str, _Found]]:
    """Name, protocol and errors of every method at one keep ratio."""
    both = (heads.queries, heads.later)

    def stored(rows: Stored) -> _Found:
        own, later = (relative_error(rows.read(q, heads.scale), t) for q, t in zip(both, true, strict=True))
        return _Found(rows, (own, later))

    budget = round(keep * heads.num_tokens)
    for name, method in BASELINES.items():
        yield name, "", stored(method(heads, statistics, budget))
    for protocol in Protocol:
        active = protocol.active(budget, bin_tokens, rank)
        for target in Target:
            yield f"HAE + OLS, {target.value}", protocol.value, stored(hae(heads, statistics, active, rank, target))
    count = min(rank, MOST_CENTROIDS)
    for evicted in (Evicted.MERGE, Evicted.SUMMARIZE):
        rows = fitted_rows(heads, statistics, max(0, budget - count), count, evicted)
        yield f"top-k + {evicted.value}", Protocol.EQUAL.value, stored(rows)
    full = min(heads.num_tokens, budget + bin_tokens)
    yield "HAE, bin not yet compressed", Protocol.REAL.value, stored(anchors(heads, statistics, full))
    active = Protocol.FAIR.active(budget, bin_tokens, rank)
    own, later = (
        relative_error(hae_with_known_mass(heads, statistics, active, rank, Target.ATTENTION, q), t)
        for q, t in zip(both, true, strict=True)
    )
    yield "HAE + OLS, mass known", Protocol.FAIR.value, _Found(None, (own, later))


def _cell(method: str, protocol: str, keep: float, found: Sequence[_Found]) -> Cell:
    stored = found[0].stored
    rows, num_bytes = (None, None) if stored is None else (stored.rows, stored.num_bytes)
    figures = []
    for each in zip(*(f.errors for f in found), strict=True):
        errors = torch.cat(each)
        spread = float(errors.std()) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan
        figures += [float(errors.mean()), spread]
    return Cell(method, protocol, keep, rows, num_bytes, *figures)
