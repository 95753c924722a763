# SPDX-License-Identifier: Apache-2.0
"""Networks for a TensorRT that has no plugins: each plugin node becomes native layers of the same shapes and types.

What these stand-ins compute is meaningless. They let a builder without plugins or a GPU (TensorRT-RTX) check all the
rest of a network, and a dry run list it; each node is recorded as it would be in the real network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .network_layers import NetworkLayers, Tensor
from .tensorrt import Fields, TensorRTOps, as_field


@dataclass(frozen=True)
class PluginCall:
    """A node of ``libhubkv_plugin.so`` as it would be in the network.

    Attributes:
        name: ``HubKVAttend``, ...
        inputs: tensors.
        shape_inputs: shape tensors.
        fields: values as the plugin takes them: int32, int64 or float32 [1].
        outputs: tensors of the stand-in.
        layers: the stand-in's, by their index in the network.
    """

    name: str
    inputs: tuple[Tensor, ...]
    shape_inputs: tuple[Tensor, ...]
    fields: Mapping[str, np.ndarray]
    outputs: tuple[Tensor, ...]
    layers: range


class LoweredOps(TensorRTOps):
    """``TensorRTOps`` without plugins.

    Attributes:
        calls: the plugin nodes, in order.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[PluginCall] = []

    def plugin(
        self, name: str, inputs: Sequence[Tensor], fields: Fields, shape_inputs: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        values = {field: as_field(value) for field, value in fields.items()}
        first = self.layers.network.num_layers
        with self.layers.at(f"{self.layers.place}.{name}"):
            outputs = _STAND_INS[name](self.layers, list(inputs), list(shape_inputs), values)
        layers = range(first, self.layers.network.num_layers)
        self.calls.append(PluginCall(name, tuple(inputs), tuple(shape_inputs), values, outputs, layers))
        return outputs


Outputs = tuple[Tensor, ...]
Values = Mapping[str, np.ndarray]


def _scalar(layers: NetworkLayers, x: Tensor, dtype: Any, rank: int) -> Tensor:
    """One number of x as [1, ..., 1]: a stand-in depends on all that the plugin reads."""
    one = layers.slice(x, (0,) * len(x.shape), (1,) * len(x.shape))
    return layers.cast(layers.reshape(one, *(1,) * rank), dtype)


def _refine(layers: NetworkLayers, inputs: list[Tensor], _: list[Tensor], fields: Values) -> Outputs:
    """Scores float32 [L, Hkv, T], alpha, window -> refined [L, Hkv, T], non_finite int64 [1]."""
    scores, alpha, window = inputs
    refined = layers.elementwise("PROD", scores, _scalar(layers, alpha, layers.trt.float32, 3))
    return refined, _scalar(layers, window, layers.trt.int64, 1)


def _select(
    layers: NetworkLayers, inputs: list[Tensor], shape: list[Tensor], fields: Mapping[str, np.ndarray]
) -> Stand:
    """Refined [L, Hkv, T], K -> positions int32 [S*K], head_offsets int64 [L*Hkv + 1]."""
    trt, heads = layers.trt, inputs[0].shape[0] * inputs[0].shape[1]
    groups = layers.constant(fields["num_groups"].astype(np.int64))
    numbers = layers.range(layers.elementwise("PROD", groups, shape[0]), trt.int32)
    positions = layers.elementwise("SUM", numbers, _scalar(layers, inputs[0], trt.int32, 1))
    offsets = layers.constant(np.arange(heads + 1, dtype=np.int64))
    return positions, layers.elementwise("SUM", offsets, _scalar(layers, inputs[0], trt.int64, 1))


def _compact(layers: NetworkLayers, inputs: list[Tensor], _: list[Tensor], fields: Values) -> Outputs:
    """k, v [T, Hkv, D] of n layers, positions [K], head_offsets -> k_rows, v_rows [K, D]."""
    *rows, positions, offsets = inputs
    dim = rows[0].shape[2]
    index = layers.elementwise("SUM", positions, _scalar(layers, offsets, layers.trt.int32, 1))
    outputs = []
    for side in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        total = side[0]
        for x in side[1:]:
            total = layers.elementwise("SUM", total, x)
        gather = layers.network.add_gather(layers.reshape(total, -1, dim), index, 0)
        outputs.append(layers.output(gather, "gather"))
    return tuple(outputs)


def _attend(layers: NetworkLayers, inputs: list[Tensor], _: list[Tensor], fields: Values) -> Outputs:
    """q [N, Hq, D], k and v [N, Hkv, D], tables of the cache -> [N, Hq, D]."""
    q, k, v, *tables = inputs
    out = q
    for x in (k, v):
        out = layers.elementwise("SUM", out, layers.reduce("AVG", x, 1, keep=True))
    for table in tables:
        out = layers.elementwise("SUM", out, _scalar(layers, table, q.dtype, 3))
    return (out,)


_STAND_INS = {"HubKVRefine": _refine, "HubKVSelect": _select, "HubKVCompact": _compact, "HubKVAttend": _attend}
