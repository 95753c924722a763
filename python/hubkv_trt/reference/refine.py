# SPDX-License-Identifier: Apache-2.0
"""refine as the header states it: float64 sums in its order, then float32 arithmetic, so that z is bit-equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 4096
LANES = 128


def refine(
    scores: NDArray[np.float32],
    alpha: NDArray[np.float32],
    window: NDArray[np.int32],
    nms_kernel: int,
    penalty_factor: float,
    head_weight_temperature: float,
    min_head_weight: float,
    max_head_weight: float,
    sink_tokens: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Refined scores float32 [L, Hkv, T] and how many scores were not finite, int64 [1].

    Args:
        scores: float32 [L, Hkv, T].
        alpha: float32 [1] in [0, 1].
        window: int32 [1] >= 0.

    The parameters are those of ``ops.refine``, and float32 as there.
    """
    s = np.asarray(scores, np.float32)
    num_tokens = s.shape[2]
    protected = np.zeros(num_tokens, bool)
    protected[:sink_tokens] = True
    protected[num_tokens - min(int(window[0]), num_tokens) :] = True
    finite = np.isfinite(s)

    a = np.float32(alpha[0])
    z = s.copy()
    if a != 0:
        beta = head_weights(
            s,
            finite & ~protected,
            np.float32(head_weight_temperature),
            np.float32(min_head_weight),
            np.float32(max_head_weight),
        )[:, :, None]
        with np.errstate(all="ignore"):
            q = np.where(hubs(s, nms_kernel), s, np.float32(penalty_factor) * s)
            z = np.where(finite, s + a * (beta * q - s), s)
    z[:, :, protected] = np.inf
    return z, np.array([np.count_nonzero(~finite)], np.int64)


def hubs(scores: NDArray[np.float32], nms_kernel: int) -> NDArray[np.bool_]:
    """Which scores [L, Hkv, T] are no less than any within (nms_kernel - 1) / 2 tokens; NaN ranks as -inf."""
    values = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    hub = np.ones(scores.shape, bool)
    for distance in range(1, min((nms_kernel - 1) // 2, scores.shape[2] - 1) + 1):
        hub[:, :, distance:] &= values[:, :, distance:] >= values[:, :, :-distance]
        hub[:, :, :-distance] &= values[:, :, :-distance] >= values[:, :, distance:]
    return hub


def head_weights(
    scores: NDArray[np.float32],
    counted: NDArray[np.bool_],
    temperature: np.float32,
    low: np.float32,
    high: np.float32,
) -> NDArray[np.float32]:
    """beta [L, Hkv] from the scores [L, Hkv, T] that count."""
    beta = np.ones(scores.shape[:2], np.float32)
    if temperature == 0:
        return beta
    n = counted.sum(axis=2)
    s = np.where(counted, scores, 0).astype(np.float64)
    with np.errstate(all="ignore"):
        mean = ordered_sum(s) / n
        std = np.sqrt(np.maximum(0.0, ordered_sum(s * s) / n - mean * mean))
        c = np.where(n > 0, std / (mean + 1e-6), 0.0)
        total = np.zeros(len(c))
        for head in range(c.shape[1]):
            total += c[:, head]
        mean_c = (total / c.shape[1])[:, None]
        ratio = c / mean_c
        if temperature == np.float32(0.5):
            power = np.sqrt(ratio)
        elif temperature == np.float32(0.25):
            power = np.sqrt(np.sqrt(ratio))
        else:
            power = ratio ** np.float64(temperature)
        weighed = (n > 0) & (mean_c != 0) & ~np.isnan(power)
        return np.where(weighed, np.clip(power, np.float64(low), np.float64(high)), 1.0).astype(np.float32)


def ordered_sum(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums the last axis in the one order of every backend: 128 lanes in a chunk of 4096, folded; then the chunks."""
    chunks = -(-x.shape[-1] // CHUNK)
    padded = np.zeros((*x.shape[:-1], chunks * CHUNK))
    padded[..., : x.shape[-1]] = x
    rows = padded.reshape(*x.shape[:-1], chunks, CHUNK // LANES, LANES)
    lanes = np.zeros((*x.shape[:-1], chunks, LANES))
    for row in range(CHUNK // LANES):
        lanes += rows[..., row, :]
    width = LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    total = np.zeros(x.shape[:-1])
    for chunk in range(chunks):
        total += lanes[..., chunk, 0]
    return total
