# SPDX-License-Identifier: Apache-2.0
"""What the plans of an engine will take of device memory, reckoned from their shapes: TensorRT's own numbers differ."""

from __future__ import annotations

import math

from ..config import EngineConfig, Scope, WeightsPlace
from ..models.gate import GATE_DIM
from .bindings import plans_of, weight_shapes

_BYTES = {"int32": 4, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def weight_bytes(config: EngineConfig, num_sinks: int = 16) -> tuple[int, int]:
    """Bytes of the weights that prefill and extend read; extend's are among prefill's."""
    prefill, extend = (
        sum(_BYTES[dtype] * math.prod(shape) for _, dtype, shape in weight_shapes(config, sinks))
        for sinks in (num_sinks, None)
    )
    return prefill, extend


def device_weight_bytes(config: EngineConfig, num_sinks: int = 16) -> int:
    """Bytes of all weights on the device: one copy, or one in each plan."""
    prefill, extend = weight_bytes(config, num_sinks)
    return prefill if plans_of(config).weights is WeightsPlace.SHARED else prefill + extend


def prefill_bytes(config: EngineConfig, num_tokens: int, num_sinks: int = 16) -> int:
    """Bytes between the layers of a prefill of T tokens, at their peak.

    Dense K and V of the layers that wait for their budget (all of them in model scope), scores, and the widest moment
    inside a layer.
    """
    model, hubkv = config.model, config.hubkv
    waiting = model.num_layers if hubkv is not None and hubkv.scope is Scope.MODEL else 1
    dense = waiting * 2 * model.num_kv_heads * model.head_dim * config.dtype.itemsize
    pairs = scoring = 0
    if hubkv is not None:
        heads, groups = model.num_kv_heads, model.group_size
        pairs = 2 * 4 * waiting * heads  # scores, and refined
        scoring = 4 * heads * (2 * GATE_DIM * (groups + 1) + groups * (num_sinks + 1))
    return num_tokens * (dense + pairs + max(layer_bytes(config), scoring))


def extend_bytes(config: EngineConfig, batch_size: int, new_tokens: int) -> int:
    """Bytes between the layers of an extend of B sequences of Tq tokens, new rows and logits included."""
    rows = 2 * config.model.num_rows_per_token * config.model.head_dim * config.dtype.itemsize
    logits = (4 + config.dtype.itemsize) * config.model.vocab_size
    return batch_size * (new_tokens * (layer_bytes(config) + rows) + logits)


def layer_bytes(config: EngineConfig) -> int:
    """Bytes of a token inside a layer, at the wider of attention and MLP: stream, normalized input, what is between."""
    model = config.model
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (q + 2 * kv) + q  # fused projection, the same rotated and with heads first, the output
    mlp = 3 * model.intermediate_size  # gate and up, their product
    return config.dtype.itemsize * (2 * model.hidden_size + max(attention, mlp))
