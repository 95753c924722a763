# SPDX-License-Identifier: Apache-2.0
"""Means over contexts and how sure they are. A context is what is drawn at random: its questions go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 1 << 22  # random numbers at a time


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; without width where there is one context."""

    mean: float
    low: float
    high: float
    contexts: int


def bootstrap(
    values: Sequence[float] | NDArray[np.float64],
    clusters: Sequence[int] | None = None,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean of values, with the percentile interval of the bootstrap over clusters (Efron and Tibshirani, 1993).

    Args:
        values: [n].
        clusters: int [n], the context of each; None: each is one of its own. Whole clusters are drawn.
        level: of confidence, in (0, 1).
        resamples: sets of clusters that are drawn, with replacement.
        seed: of the draws; equal numbers of clusters get equal draws.

    Raises:
        ValueError: there are no values.
    """
    sums, counts = _by_cluster(values, clusters)
    n = len(sums)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _BLOCK // n)
    for start in range(0, resamples, step):
        drawn = generator.integers(n, size=(min(step, resamples - start), n))
        means[start : start + step] = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high), n)


def sign_flips(
    differences: Sequence[float] | NDArray[np.float64],
    clusters: Sequence[int] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """Two-sided p of a mean paired difference being 0: how often it is as large with signs at random.

    If two methods are alike, a context's difference has either sign with equal chance. The observed signs count as one
    of the draws (Phipson and Smyth, 2010), so that p is never 0.

    Args:
        differences: [n].
        clusters, resamples, seed: as in ``bootstrap``; a cluster has one sign.
    """
    sums, _ = _by_cluster(differences, clusters)
    n = len(sums)
    generator = np.random.default_rng(seed)
    least = abs(sums.sum()) * (1 - 1e-12)  # equal up to rounding is equal
    found = 1
    step = max(1, _BLOCK // n)
    for start in range(0, resamples, step):
        signs = 2 * generator.integers(2, size=(min(step, resamples - start), n)) - 1
        found += int((np.abs(signs @ sums) >= least).sum())
    return found / (resamples + 1)


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, 1979): all below a are true but for a chance of a, at most."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(order))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[index]))
        adjusted[index] = largest
    return [float(value) for value in adjusted]


def _by_cluster(
    values: Sequence[float] | NDArray[np.float64], clusters: Sequence[int] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of values in each cluster."""
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise ValueError("values: there are none to take the mean of")
    if clusters is None:
        return array, np.ones(len(array))
    _, which = np.unique(np.asarray(clusters), return_inverse=True)
    sums: NDArray[np.float64] = np.bincount(which, array).astype(np.float64)
    return sums, np.bincount(which).astype(np.float64)
