# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and 2.5 (bias on q, k and v), Qwen3 (RMSNorm on each head's q and k before RoPE). Dense models only."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from .hf_config import common_fields, field, refuse_sliding_window


def read_qwen2(data: dict[str, Any]) -> ModelConfig:
    """``ModelConfig`` from the ``config.json`` of a Qwen2ForCausalLM.

    Raises:
        ValueError: a field is missing or wrong, or a feature is not built; names it.
    """
    refuse_sliding_window(data)
    return ModelConfig(architecture="qwen2", qkv_bias=True, **common_fields(data))


def read_qwen3(data: dict[str, Any]) -> ModelConfig:
    """``ModelConfig`` from the ``config.json`` of a Qwen3ForCausalLM; ``head_dim`` is 128 where the file has none.

    Raises:
        ValueError: a field is missing or wrong, or a feature is not built; names it.
    """
    refuse_sliding_window(data)
    bias = field(data, "attention_bias", bool, False)
    return ModelConfig(
        architecture="qwen3", qk_norm=True, qkv_bias=bias, o_bias=bias, **common_fields(data, head_dim=128)
    )
