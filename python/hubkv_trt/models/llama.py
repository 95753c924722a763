# SPDX-License-Identifier: Apache-2.0
"""Llama (2, 3, 3.1 and later text models, SmolLM2 and others of this architecture)."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from .hf_config import common_fields, field


def read_config(data: dict[str, Any]) -> ModelConfig:
    """``ModelConfig`` from the ``config.json`` of a LlamaForCausalLM; ``attention_bias`` is on q, k, v and o alike.

    Raises:
        ValueError: a field is missing or wrong, or a feature is not built; names it.
    """
    bias = field(data, "attention_bias", bool, False)
    return ModelConfig(
        architecture="llama",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=field(data, "mlp_bias", bool, False),
        **common_fields(data),
    )
