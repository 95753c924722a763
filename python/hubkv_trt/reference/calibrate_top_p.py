# SPDX-License-Identifier: Apache-2.0
"""calibrate_top_p by sorting, in the integers and the float64 steps that the header states: the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import ranking

ONE = 2.0**31
TOLERANCE, DROPPED_TOLERANCE = 0.01, 0.1
TEMPERATURES = (np.float32(2.0**-10), np.float32(2.0**10))
BISECTIONS = 40
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
LARGEST = float(np.finfo(np.float32).max)


def calibrate_top_p(
    raw: NDArray[np.float32],
    transformed: NDArray[np.float32],
    candidate_positions: NDArray[np.int32],
    candidate_offsets: NDArray[np.int64],
    num_layers: int,
    p: float,
    sink_tokens: int,
    min_rows: int,
    max_rows: int,
    layer_rows: int,
    fill: bool,
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """counts int32 [L*Hkv], temperature float32 [L*Hkv], calibrated float32 [N]; as ``ops.calibrate_top_p``."""
    p = float(np.float32(p))
    num_heads = len(candidate_offsets) - 1
    counts, least = np.zeros(num_heads, np.int32), np.zeros(num_heads, np.int32)
    temperature = np.ones(num_heads, np.float32)
    calibrated = np.zeros(len(raw), np.float32)
    protected = candidate_positions < sink_tokens
    order: list[NDArray[np.int64]] = []
    for head in range(num_heads):
        entries = slice(int(candidate_offsets[head]), int(candidate_offsets[head + 1]))
        held = protected[entries]
        n, fixed = len(held), int(held.sum())
        order.append(ranking(transformed[entries], held))
        temperature[head] = 1 if p == 1 else calibrated_temperature(raw[entries], transformed[entries], held, p)
        weight = weights(transformed[entries], temperature[head])
        if weight.sum() > 0:
            calibrated[entries] = (weight.astype(np.float64) / np.float64(weight.sum())).astype(np.float32)
        kept = n if p == 1 or fill else max(top(weight[order[head]], p, fixed), min(min_rows, n))
        kept = max(min(kept, max_rows) if max_rows else kept, fixed)
        counts[head], least[head] = kept, min(kept, max(fixed, min_rows))
    heads = num_heads // num_layers
    for layer in range(num_layers if layer_rows else 0):
        numbers = range(layer * heads, (layer + 1) * heads)
        # What may be dropped, from the last to be: (-share, head), in the order of ranks within a head.
        spare = [
            (-calibrated[candidate_offsets[head] + i], head)
            for head in numbers
            for i in order[head][least[head] : counts[head]]
        ]
        room = layer_rows - int(least[list(numbers)].sum())
        if len(spare) > room:
            counts[list(numbers)] = least[list(numbers)]
            for _, head in sorted(spare)[: max(room, 0)]:
                counts[head] += 1
    return counts, temperature, calibrated


def calibrated_temperature(
    raw: NDArray[np.float32], transformed: NDArray[np.float32], protected: NDArray[np.bool_], p: float
) -> np.float32:
    """tau of one head."""
    fixed = int(protected.sum())
    first = top(weights(raw, np.float32(1))[ranking(raw, protected)], p, fixed)
    order = ranking(transformed, protected)
    (low, high), now = TEMPERATURES, np.float32(1)
    for _ in range(BISECTIONS + 1):
        weight = weights(transformed, now)
        total, mass = int(weight.sum()), int(weight[order[:first]].sum())
        most = target(p, total) + int(min(TOLERANCE, DROPPED_TOLERANCE * (1 - p)) * float(total))
        if mass >= target(p, total) and (mass <= most or top(weight[order], p, fixed) == first):
            return now
        low, high = (now, high) if mass >= target(p, total) else (low, now)
        now = np.float32(math.sqrt(float(low) * float(high)))
    return low


def weights(values: NDArray[np.float32], temperature: np.float32) -> NDArray[np.int64]:
    """Integer weights of one head, [n]."""
    v = np.where(np.isnan(values), -np.inf, np.minimum(values.astype(np.float64), LARGEST))
    if len(v) == 0 or v.max() == -np.inf:
        return np.zeros(len(v), np.int64)
    x = np.maximum((v - v.max()) / np.float64(temperature), -40.0)
    return np.where(v == -np.inf, 0, (exp(x) * ONE).astype(np.int64))


def exp(x: NDArray[np.float64]) -> NDArray[Any]:
    """exp(x) for x in [-40, 0], step by step as in ``weight.h``."""
    whole = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = np.full_like(rest, 1.0 / 6227020800.0)
    for n in range(12, -1, -1):
        power = power * rest + 1.0 / math.factorial(n)
    return np.ldexp(power, whole.astype(np.int64))


def target(p: float, total: int) -> int:
    """What weights must sum to at least."""
    return min(math.ceil(p * float(total)), total)


def top(ranked: NDArray[np.int64], p: float, fixed: int) -> int:
    """The least number, >= fixed, of first weights that hold mass p."""
    sums = np.concatenate([[0], np.cumsum(ranked)])
    return max(fixed, int(np.searchsorted(sums, target(p, int(sums[-1])))))
