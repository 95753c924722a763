# SPDX-License-Identifier: Apache-2.0
"""Rows that carry the softmax mass and the values of the tokens that leave a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Evicted
from .clusters import cluster, mean, rms
from .heads import EMPTY, logits, take
from .nonnegative import nonnegative_least_squares

VALUE_RIDGE = 1e-2
"""Of the values, towards the mean of their cluster; relative to the mean squared weight of a row."""
_MOST_LOG_SHARE = 80.0  # float32 holds its exponential; beyond are only keys of tokens with biases far below 0


@dataclass(frozen=True)
class SummaryRows:
    """m rows for each of H heads, that a query attends to beside the kept ones.

    Attributes:
        keys: float32 [H, m, D].
        values: float32 [H, m, D].
        bias: float32 [H, m], added to the logits; ``EMPTY`` where a row stands for nothing.
        tokens: int64 [H, m], the heaviest token that a row stands for: its position in the text.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    tokens: Tensor


class _Softmax:
    """The full softmax of the reference queries, and how it changes where evicted tokens give way to other rows."""

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor, scale: float, bias: Tensor | None
    ) -> None:
        found = logits(queries, keys, scale)
        if bias is not None:
            found += bias.unsqueeze(1)
        self.queries, self.scale = queries, scale
        self.log_total = found.logsumexp(-1, keepdim=True)  # [H, R, 1]
        shares = found.sub_(self.log_total).exp_()
        self.out = shares @ values
        self.gone = shares.masked_fill_(kept.unsqueeze(1), 0)  # [H, R, T], of the evicted tokens
        self.mass = self.gone.sum(-1)  # [H, R]
        self.left = self.out - self.gone @ values  # numerator of the kept rows

    def shares(self, keys: Tensor) -> Tensor:
        """exp(scale * q.k) of rows [H, m, D] in units of the full denominator: [H, R, m]."""
        return (logits(self.queries, keys, self.scale) - self.log_total).clamp_max_(_MOST_LOG_SHARE).exp_()

    def denominator(self, shares: Tensor | None = None) -> Tensor:
        """Of the kept rows and of others with these shares, in units of the full one: [H, R, 1]."""
        total = 1 - self.mass if shares is None else 1 - self.mass + shares.sum(-1)
        return total.clamp_min(torch.finfo(total.dtype).eps).unsqueeze(-1)

    def error(self, shares: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Sum of the squared errors of the outputs, [H]; without rows that of dropping."""
        numerator = self.left if shares is None or values is None else self.left + shares @ values
        return (numerator / self.denominator(shares) - self.out).square().sum((1, 2))


def summarize_evicted(
    queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor, count: int, scale: float,
    method: Evicted = Evicted.SUMMARIZE, mass: float = 1.0, bias: Tensor | None = None,
) -> SummaryRows:  # fmt: skip
    """m rows for the tokens of each head that are not kept.

    Evicted tokens are clustered by keys and values, weighted by the attention that the reference queries pay them; a
    cluster's key and value are its weighted means. Then

    - ``MERGE``: b_j is the logarithm of the cluster's mass over that of its key, both summed over the references.
    - ``SUMMARIZE``: x_j = e^{b_j} >= 0 of least sum over references of (sum_j x_j e^{s q.k_j} - mass of the evicted)^2,
      and values of least squared error of the attention outputs, kept rows included, with a ridge towards the means.
      A head takes the m heaviest evicted tokens as they are, or none, where the references are answered better by it.

    Masses are in units of the full softmax of each query. A head that loses at most m tokens gets them as they are.

    Args:
        queries: references, float32 [H, R, D].
        keys: float32 [H, T, D], all tokens.
        values: float32 [H, T, D].
        kept: bool [H, T].
        count: m, 1..8.
        scale: of the logits.
        method: ``MERGE`` or ``SUMMARIZE``.
        mass: share of the fitted masses that the rows are given, in (0, 1]. Below 1 attention to the kept tokens is
            sharper than that of the full cache. Tokens that stay as they are keep all of theirs.
        bias: of the tokens' logits, float32 [H, T], finite: a token may be a row that stands for several. Tokens of
            bias ``EMPTY`` are nothing, and have to be called kept. None: 0.
    """
    softmax = _Softmax(queries, keys, values, kept, scale, bias)
    units, most = (rms(keys), rms(values)), int((~kept).sum(1).max())
    if 2 * most > kept.shape[1]:
        return _summarize(softmax, keys, values, kept, count, method, mass, bias, units)
    gone = kept.to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, most)]  # few are: nothing else is looked at
    softmax.gone = softmax.gone.gather(2, gone.unsqueeze(1).expand(-1, queries.shape[1], -1))
    own = None if bias is None else bias.gather(1, gone)
    keys, values, kept = take(keys, gone), take(values, gone), kept.gather(1, gone)
    found = _summarize(softmax, keys, values, kept, count, method, mass, own, units)
    return SummaryRows(found.keys, found.values, found.bias, gone.gather(1, found.tokens))


def _summarize(
    softmax: _Softmax, keys: Tensor, values: Tensor, kept: Tensor, count: int, method: Evicted, mass: float,
    own: Tensor | None, units: tuple[Tensor, Tensor],
) -> SummaryRows:  # fmt: skip
    """Of tokens among which are all that are evicted; ``own`` is their bias, ``units`` are those of all tokens."""
    # A token that no reference sees still counts, after all that one sees.
    weights = softmax.gone.mean(1).clamp_min(1e-12).masked_fill(kept, 0)
    exact = _heaviest(keys, values, weights, count, own)
    members = cluster(keys, values, weights, count, units)
    row_keys, row_values = mean(keys, members), mean(values, members)
    shares = softmax.shares(row_keys)
    if method is Evicted.MERGE:
        bias = _log((softmax.gone @ (members > 0).to(keys.dtype)).sum(1) / shares.sum(1).clamp_min(1e-30))
    else:
        bias = _log(nonnegative_least_squares(shares, softmax.mass)).to(keys.dtype)
    shares = shares * bias.exp().unsqueeze(1)
    if method is Evicted.SUMMARIZE:
        row_values = _fit_values(softmax, shares, row_values)
    bias, shares = bias + math.log(mass), mass * shares
    fitted = SummaryRows(row_keys, row_values, bias, members.argmax(1))
    few = (~kept).sum(1) <= count
    if method is Evicted.MERGE:
        return _choose(few, exact, fitted)
    dropped, by_rows = softmax.error(), softmax.error(shares, row_values)
    exact_shares = softmax.gone.gather(2, exact.tokens.unsqueeze(1).expand(-1, shares.shape[1], -1))
    by_tokens = softmax.error(exact_shares * (exact.bias > EMPTY).unsqueeze(1), exact.values)
    found = _choose(few | ~(by_rows <= by_tokens), exact, fitted)
    worse = ~few & ~(torch.fmin(by_rows, by_tokens) <= dropped)
    return SummaryRows(found.keys, found.values, found.bias.masked_fill(worse.unsqueeze(-1), EMPTY), found.tokens)


def _heaviest(keys: Tensor, values: Tensor, weights: Tensor, count: int, own: Tensor | None) -> SummaryRows:
    """The m evicted tokens of the largest weight, unchanged; rows that find none are empty."""
    size = min(count, weights.shape[1])
    top, tokens = weights.topk(size, 1)
    bias = torch.where(top > 0, 0.0 if own is None else own.gather(1, tokens), EMPTY)
    if size < count:
        spare = count - size
        tokens = torch.cat((tokens, tokens[:, :1].expand(-1, spare)), 1)
        bias = torch.cat((bias, bias.new_full((len(bias), spare), EMPTY)), 1)
    return SummaryRows(take(keys, tokens), take(values, tokens), bias, tokens)


def _fit_values(softmax: _Softmax, shares: Tensor, prior: Tensor) -> Tensor:
    """Values [H, m, D] of least squared output error: (left + shares V) / denominator against the true outputs."""
    denominator = softmax.denominator(shares)
    a = (shares / denominator).double()
    target = (softmax.out - softmax.left / denominator).double()
    prior = prior.double()
    gram = a.transpose(1, 2) @ a
    size = gram.diagonal(dim1=1, dim2=2).mean(-1)
    ridge = (VALUE_RIDGE * size + torch.finfo(torch.float64).tiny ** 0.5).view(-1, 1, 1)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    step = torch.linalg.solve(gram + ridge * eye, a.transpose(1, 2) @ (target - a @ prior))
    return (prior + step).to(shares.dtype)


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0).log().masked_fill(x <= 0, EMPTY)


def _choose(where: Tensor, first: SummaryRows, second: SummaryRows) -> SummaryRows:
    wide, narrow = where.view(-1, 1, 1), where.view(-1, 1)
    return SummaryRows(
        torch.where(wide, first.keys, second.keys),
        torch.where(wide, first.values, second.values),
        torch.where(narrow, first.bias, second.bias),
        torch.where(narrow, first.tokens, second.tokens),
    )
