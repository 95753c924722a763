# SPDX-License-Identifier: Apache-2.0
"""What is left of a cache under each method: rows, and what a query reads from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..config import Evicted
from .entropy import TokenStatistics, best
from .fit import summarize_evicted
from .heads import Heads, attend, take
from .least_squares import least_squares, low_rank_rows


class Target(str, Enum):
    """What the linear map of a bin shall give for the reference queries."""

    ATTENTION = "attention"  # the text: W = pinv(Q_ref) Attn(Q_ref, K_bin, V_bin)
    VALUES = "values"  # the line of code: W = pinv(Q_ref) V_bin, with the queries of the bin's own tokens


@dataclass(frozen=True)
class Stored:
    """Rows of H heads.

    Attributes:
        keys: float32 [H, K, D].
        values: float32 [H, K, D].
        bias: float32 [H, K], added to the logits; None is 0.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        """K."""
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> float:
        """Of K and V (and of the bias) of a head, 4 bytes a number."""
        return 4.0 * self.rows * (2 * self.keys.shape[2] + (self.bias is not None))

    def read(self, queries: Tensor, scale: float) -> Tensor:
        """Attention of [H, E, D] over the rows -> [H, E, D]."""
        return attend(queries, self.keys, self.values, scale, self.bias)[0]


def tokens_at(heads: Heads, index: Tensor) -> Stored:
    """The rows of the tokens at index int64 [H, n], unchanged."""
    return Stored(take(heads.keys, index), take(heads.values, index))


def top_k(heads: Heads, found: TokenStatistics, rows: int) -> Stored:
    """The tokens of the largest accumulated importance."""
    return tokens_at(heads, best(found.importance, rows)[0])


def sliding_window(heads: Heads, found: TokenStatistics, rows: int) -> Stored:
    """The last tokens."""
    places = torch.arange(heads.num_tokens - rows, heads.num_tokens).expand(heads.keys.shape[0], rows)
    return tokens_at(heads, places)


def anchors(heads: Heads, found: TokenStatistics, rows: int) -> Stored:
    """HAE without reconstruction: selection by entropy and importance; the bin is thrown away."""
    return tokens_at(heads, best(found.anchor, rows)[0])


def linear_map(heads: Heads, index: Tensor, target: Target) -> Tensor:
    """W [H, D, D] of the bin of the tokens at index int64 [H, n]. No bin: zeros."""
    bin_ = tokens_at(heads, index)
    if bin_.rows == 0:
        return heads.keys.new_zeros(heads.keys.shape[0], heads.keys.shape[2], heads.keys.shape[2])
    if target is Target.VALUES:
        return least_squares(take(heads.queries, index), bin_.values)
    return least_squares(heads.queries, bin_.read(heads.queries, heads.scale))


def rank_k(heads: Heads, found: TokenStatistics, rows: int, target: Target = Target.ATTENTION) -> Stored:
    """OLS without selection: all tokens are the bin, and what is left are the rows of its linear map, at most D."""
    everything = torch.arange(heads.num_tokens).expand(heads.keys.shape[0], heads.num_tokens)
    return Stored(*low_rank_rows(linear_map(heads, everything, target), min(rows, heads.keys.shape[2])))


def hae(heads: Heads, found: TokenStatistics, active: int, rank: int, target: Target) -> Stored:
    """The full pipeline: ``active`` anchors, and ``rank`` rows of the linear map of all the others."""
    kept, bin_ = best(found.anchor, active)
    anchor = tokens_at(heads, kept)
    k, v = low_rank_rows(linear_map(heads, bin_, target), rank)
    return Stored(torch.cat((anchor.keys, k), 1), torch.cat((anchor.values, v), 1))


def hae_with_known_mass(
    heads: Heads, found: TokenStatistics, active: int, rank: int, target: Target, queries: Tensor
) -> Tensor:
    """What the linear map would give if the bin's share of each softmax were known: no cache can store that.

    out = (1 - p) Attn(q, anchors) + p q W_rank, p the true share of the bin. Separates the error of the linear map from
    that of reading its components as rows of a softmax.
    """
    kept, bin_ = best(found.anchor, active)
    anchor, rest = tokens_at(heads, kept), tokens_at(heads, bin_)
    out, log_kept = attend(queries, anchor.keys, anchor.values, heads.scale)
    _, log_rest = attend(queries, rest.keys, rest.values, heads.scale)
    k, v = low_rank_rows(linear_map(heads, bin_, target), rank)
    share = torch.sigmoid(log_rest - log_kept).unsqueeze(-1)
    return torch.lerp(out, queries @ (k.transpose(-1, -2) @ v), share)


def fitted_rows(heads: Heads, found: TokenStatistics, active: int, count: int, method: Evicted) -> Stored:
    """The ``active`` tokens of the largest importance, and rows that carry mass and values of the others (``fit.py``).

    References are the tokens' own queries, where they stand.
    """
    index = best(found.importance, active)[0]
    anchor = tokens_at(heads, index)
    kept = torch.zeros(heads.keys.shape[:2], dtype=torch.bool).scatter_(1, index, True)
    rows = summarize_evicted(heads.queries, heads.keys, heads.values, kept, count, heads.scale, method)
    bias = torch.cat((rows.bias.new_zeros(len(rows.bias), active), rows.bias), 1)
    return Stored(torch.cat((anchor.keys, rows.keys), 1), torch.cat((anchor.values, rows.values), 1), bias)
