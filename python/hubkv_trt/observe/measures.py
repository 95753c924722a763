# SPDX-License-Identifier: Apache-2.0
"""The three observations of the HubKV paper as numbers: spatial gain, autocorrelation, selectivity.

All read the unprotected part of a text: scores float64 [heads, n] or kept bool [heads, n], the heads of all layers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def segments_covered(kept: NDArray[np.bool_], segment_tokens: int) -> float:
    """Share of a head's segments with at least one kept token, mean over heads. The last segment may be shorter."""
    starts = np.arange(0, kept.shape[1], segment_tokens)
    return float(np.logical_or.reduceat(kept, starts, axis=1).mean())


def random_segments_covered(rows: NDArray[np.int64], num_tokens: int, segment_tokens: int) -> float:
    """What ``segments_covered`` is expected to be where each head keeps as many tokens at random.

        1 - C(n - m, k) / C(n, k) for a segment of m of the n tokens, of which k are kept

    Args:
        rows: int64 [heads], kept tokens of each head.
        num_tokens: n.
        segment_tokens: m; less for the last one.
    """
    sizes = [min(segment_tokens, num_tokens - start) for start in range(0, num_tokens, segment_tokens)]
    missed = [[_chance_of_none(num_tokens, size, int(k)) for size in sizes] for k in rows]
    return 1.0 - float(np.mean(missed))


def _chance_of_none(n: int, m: int, k: int) -> float:
    if k > n - m:
        return 0.0
    log = math.lgamma(n - m + 1) - math.lgamma(n - m - k + 1) - math.lgamma(n + 1) + math.lgamma(n - k + 1)
    return math.exp(log)


def autocorrelation(scores: NDArray[np.float64], max_lag: int) -> list[float]:
    """Autocorrelation at the lags 1..max_lag, mean over heads; a head whose scores are all equal counts as 0.

    sum over t of (s_t - mean) * (s_(t+lag) - mean), over sum of (s_t - mean)^2
    """
    centred = scores - scores.mean(1, keepdims=True)
    power = np.square(centred).sum(1)
    found = []
    for lag in range(1, max_lag + 1):
        product = (centred[:, lag:] * centred[:, : max(scores.shape[1] - lag, 0)]).sum(1)
        found.append(float(np.divide(product, power, out=np.zeros_like(power), where=power > 0).mean()))
    return found


def selectivity(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """c = std / (mean + 1e-6) of each head, float64 [heads], as refine has it."""
    return np.asarray(scores.std(1) / (scores.mean(1) + 1e-6))
