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

from .network_layers import Tensor
from .plugin_nodes import Fields, as_field
from .tensorrt import TensorRTOps


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
        self._scalars: dict[tuple[str, ...], Tensor] = {}

    def plugin(
        self, name: str, inputs: Sequence[Tensor], fields: Fields, shape_inputs: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        values = {field: as_field(value) for field, value in fields.items()}
        first = self.layers.network.num_layers
        with self.layers.at(f"{self.layers.place}.{name}"):
            if name == "HubKVRefine":
                outputs = self._refine(*inputs)
            elif name == "HubKVSelect":
                outputs = self._select(inputs[0], shape_inputs[0], int(values["num_groups"][0]))
            elif name == "HubKVCompact":
                outputs = self._compact(*inputs)
            else:
                assert name == "HubKVAttend", name
                outputs = self._attend(*inputs)
        layers = range(first, self.layers.network.num_layers)
        self.calls.append(PluginCall(name, tuple(inputs), tuple(shape_inputs), values, outputs, layers))
        return outputs

    def _scalar(self, dtype: Any, rank: int, *xs: Tensor) -> Tensor:
        """A number of each x, added up, as [1, ..., 1]: a stand-in depends on all that the plugin reads."""
        key = (str(dtype), str(rank), *(x.name for x in xs))
        if key not in self._scalars:
            total = None
            for x in xs:
                one = self.layers.slice(x, (0,) * len(x.shape), (1,) * len(x.shape))
                one = self.layers.cast(self.layers.reshape(one, *(1,) * rank), dtype)
                total = one if total is None else self.add(total, one)
            self._scalars[key] = total
        return self._scalars[key]

    def _refine(self, scores: Tensor, alpha: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        """[L, Hkv, T] -> refined [L, Hkv, T], non_finite int64 [1]."""
        refined = self.mul(scores, self._scalar(self.trt.float32, 3, alpha))
        return refined, self._scalar(self.trt.int64, 1, window)

    def _select(self, refined: Tensor, rows: Tensor, num_groups: int) -> tuple[Tensor, ...]:
        """[L, Hkv, T], K -> positions int32 [S*K], head_offsets int64 [L*Hkv + 1]."""
        count = self.mul(self.constant(np.array([num_groups], np.int64)), rows)
        positions = self.add(self.layers.range(count, self.trt.int32), self._scalar(self.trt.int32, 1, refined))
        offsets = self.constant(np.arange(refined.shape[0] * refined.shape[1] + 1, dtype=np.int64))
        return positions, self.add(offsets, self._scalar(self.trt.int64, 1, refined))

    def _compact(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """k, v [T, Hkv, D] of n layers, positions [K], head_offsets -> k_rows, v_rows [K, D]."""
        *rows, positions, offsets = inputs
        index = self.add(positions, self._scalar(self.trt.int32, 1, offsets))
        outputs = []
        for side in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            total = side[0]
            for x in side[1:]:
                total = self.add(total, x)
            outputs.append(self.gather(self.layers.reshape(total, -1, total.shape[2]), index))
        return tuple(outputs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        """q [N, Hq, D], k and v [N, Hkv, D], tables of the cache -> [N, Hq, D]."""
        means = (self.layers.reduce("AVG", x, 1, keep=True) for x in (k, v))
        out = self.add(q, self.add(*means))
        return (self.add(out, self._scalar(q.dtype, 3, *tables)),)
