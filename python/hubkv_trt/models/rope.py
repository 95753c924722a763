# SPDX-License-Identifier: Apache-2.0
"""Frequencies of the rotary position embedding: default, linear, Llama 3 and YaRN."""

from __future__ import annotations

import math

import numpy as np

from ..config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[np.ndarray, float]:
    """Frequencies of the D/2 rotated pairs, and the factor on cos and sin.

    ``default`` is arXiv 2104.09864 (theta^(-2i/D)); ``linear`` divides it by ``factor``; ``llama3`` divides only long
    wavelengths, with a smooth passage (Llama 3.1); ``yarn`` is arXiv 2309.00071, "NTK by parts", with its temperature
    as a factor on cos and sin. All as Hugging Face's ``config.json`` means them.

    Args:
        rope: type and parameters.
        head_dim: D.
        max_position_embeddings: stands in for ``original_max_position_embeddings`` where the config has none.

    Returns:
        inv_freq float32 [D/2] in radians per position, attention_factor.
    """
    inv_freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original = rope.original_max_position_embeddings or max_position_embeddings
    if rope.type == "linear":
        return (inv_freq / rope.factor).astype(np.float32), 1.0
    if rope.type == "llama3":
        return _llama3(rope, inv_freq, original).astype(np.float32), 1.0
    if rope.type == "yarn":
        return _yarn(rope, inv_freq, head_dim, original).astype(np.float32), _yarn_attention_factor(rope)
    return inv_freq.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, inv_freq: np.ndarray, original: int) -> np.ndarray:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert low is not None  # the reader of config.json insists on both
    assert high is not None
    turns = original * inv_freq / (2 * math.pi)  # rotations over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int, original: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        """The pair that turns so many times over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or 32.0), dimension(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return inv_freq / rope.factor * interpolated + inv_freq * (1.0 - interpolated)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
