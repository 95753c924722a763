# SPDX-License-Identifier: Apache-2.0
"""The ``engine.json`` of a small TensorRT engine that nobody built."""

from __future__ import annotations

from typing import Any

from hubkv_trt.config import Backend, DType, EngineConfig, HubKVConfig, ModelConfig, TensorRTConfig


def make_config(**changes: Any) -> EngineConfig:
    model = ModelConfig("llama", 260, 64, 96, 3, 4, 2, 64, 1024)
    values: dict[str, Any] = {
        "model": model, "dtype": DType.BFLOAT16, "max_input_len": 512, "max_batch_size": 6, "hubkv": HubKVConfig(),
        "backend": Backend.TENSORRT, "tensorrt": TensorRTConfig(version="10.14.1", compute_capability="9.0"),
    }  # fmt: skip
    return EngineConfig(**{**values, **changes})
