# SPDX-License-Identifier: Apache-2.0
"""Writes a model's graph down as a TensorRT network: ``graph.ops.Ops`` over ``INetworkDefinition``.

For ``tensorrt`` 10.14 to 11.x, strongly typed, float16 and bfloat16. Where a newer version has a better call for
attention or RoPE it is taken, else what 10.14 has. There is no RMSNorm layer in any of them (``add_normalization_v2``
is LayerNorm), so it is elementwise in float32, which the builder fuses.

Attention wants [1, H, T, D] and everything else is token-major, so q, k and v are transposed for it. (TensorRT-RTX 1.7
takes packed [T, H, D] tensors into a network, but has no kernel for them.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..config import DType, HubKVConfig
from .network_layers import NetworkLayers, Tensor
from .ops import CacheInputs
from .plugin_nodes import Fields, create_plugin


class TensorRTOps:
    """``graph.ops.Ops`` that adds layers to a network.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        network: a strongly typed ``INetworkDefinition``.
        dtype: of activations and cache rows; float16 or bfloat16.
        weights: by name: network inputs (``ITensor``), or torch tensors that become constants of the network.

    Attributes:
        layers: what adds the layers.
        non_finite: int64 [1] of each ``refine`` call: scores that were NaN or infinite.
    """

    def __init__(self, trt: Any, network: Any, dtype: DType, weights: Mapping[str, Any]) -> None:
        self.trt = trt
        self.layers = NetworkLayers(trt, network)
        self.dtype = getattr(trt, dtype.value)
        self.non_finite: list[Tensor] = []
        self._network = network
        self._weights = dict(weights)
        self._shaped: dict[tuple[str, int], Tensor] = {}

    def has(self, call: str) -> bool:
        """Whether the installed version's networks have a method of this name."""
        return hasattr(self._network, call)

    # -- sources

    def weight(self, name: str) -> Tensor:
        self.layers.place = ".".join(name.split(".")[:2])  # layers.3, gate.3, ...: where the model is
        value = self._weights[name]
        if not isinstance(value, self.trt.ITensor):
            value = self._weights[name] = self.layers.embedded(name, value)
        return value

    def has_weight(self, name: str) -> bool:
        return name in self._weights

    def constant(self, value: np.ndarray) -> Tensor:
        return self.layers.constant(value)

    # -- control

    def by_tokens(self, f: Callable[..., tuple[Tensor, ...]], *xs: Tensor) -> tuple[Tensor, ...]:
        with self.layers.alike(xs[0]):
            results = f(*xs)
        self.layers.as_many_rows(results, xs[0])
        return results

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.layers.at(name)

    # -- dense layers

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.layers.output(self._network.add_gather(table, ids, 0), "gather")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.layers.product(x, weight)
        return y if bias is None else self.add(y, self._with_rank(bias, 2))

    def gated_mlp(
        self,
        x: Tensor,
        size: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        inner = self.linear(x, gate_up, gate_up_bias)
        gate, up = self.slice_last(inner, 0, size), self.slice_last(inner, size, 2 * size)
        sigmoid = self._network.add_activation(gate, self.trt.ActivationType.SIGMOID)
        silu = self.mul(gate, self.layers.output(sigmoid, "sigmoid"))
        return self.linear(self.mul(silu, up), down, down_bias)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers.elementwise("SUM", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers.elementwise("PROD", a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers.elementwise("SUB", a, b)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rank = len(x.shape)
        wide = self.to_float32(x)
        mean = self.layers.reduce("AVG", self.mul(wide, wide), rank - 1, keep=True)
        root = self.layers.unary("SQRT", self.add(mean, self.constant(np.full((1,) * rank, eps, np.float32))))
        y = self.layers.cast(self.layers.elementwise("DIV", wide, root), x.dtype)
        return self.mul(y, self._with_rank(weight, rank))

    def _with_rank(self, weight: Tensor, rank: int) -> Tensor:
        """[n] -> [1, ..., n]."""
        key = (weight.name, rank)
        if key not in self._shaped:
            self._shaped[key] = self.layers.reshape(weight, *(1,) * (rank - 1), weight.shape[0])
        return self._shaped[key]

    # -- shapes

    def slice_last(self, x: Tensor, start: int, stop: int) -> Tensor:
        return self.layers.slice_last(x, start, stop)

    def split_heads(self, x: Tensor, *sizes: int) -> Tensor:
        return self.layers.reshape(x, 0, *sizes, what="split_heads")

    def merge_heads(self, x: Tensor, size: int) -> Tensor:
        return self.layers.reshape(x, 0, size, what="merge_heads")

    def transpose(self, x: Tensor, *axes: int) -> Tensor:
        return self.layers.permute(x, *axes)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return self.layers.output(self._network.add_gather(x, index, 0), "gather")

    def last(self, x: Tensor, count: int = 1) -> Tensor:
        layers, rows = self.layers, self.layers.num_rows(x)
        kept = self.constant(np.array([count], np.int64))
        if count > 1:
            kept = layers.elementwise("MIN", rows, kept)
        start = layers.elementwise("SUB", rows, kept)
        if count > 1:
            return layers.slice_rows(x, start, kept, "last")
        others = tuple(x.shape)[1:]
        layer = self._network.add_slice(x, (0,) * len(x.shape), (1, *others), (1,) * len(x.shape))
        layer.set_input(1, layers.sizes(start, *(0 for _ in others)))
        return layers.output(layer, "last")

    def first(self, x: Tensor) -> Tensor:
        one = self.layers.slice(x, (0,) * len(x.shape), (1, *tuple(x.shape)[1:]), "first")
        return self.layers.reshape(one, *tuple(x.shape)[1:], what="first")

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        parts = [self.layers.reshape(x, 1, -1, *tuple(x.shape)[1:], what="stack") for x in xs]
        return self.layers.concat(parts, "stack")

    def split_batch(self, x: Tensor, batch_size: Tensor) -> Tensor:
        """batch_size: int64 [1], a shape tensor."""
        before, after = (np.array(sizes, np.int64) for sizes in ((x.shape[0],), (-1, *tuple(x.shape)[2:])))
        sizes = self.layers.concat([self.constant(before), batch_size, self.constant(after)], "sizes")
        return self.layers.reshape(x, sizes=sizes, what="split_batch")

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return self.layers.concat(xs)

    # -- element-wise and reductions

    def to_float32(self, x: Tensor) -> Tensor:
        return self.layers.cast(x, self.trt.float32)

    def to_dtype(self, x: Tensor) -> Tensor:
        return self.layers.cast(x, self.dtype)

    def exp(self, x: Tensor) -> Tensor:
        return self.layers.unary("EXP", x)

    def reciprocal(self, x: Tensor) -> Tensor:
        return self.layers.unary("RECIP", x)

    def reduce_sum(self, x: Tensor, axis: int) -> Tensor:
        return self.layers.reduce("SUM", x, axis)

    def reduce_mean(self, x: Tensor, axis: int) -> Tensor:
        return self.layers.reduce("AVG", x, axis)

    def matmul_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers.product(a, b)

    # -- attention

    def rope_tables(self, positions: Tensor, inv_freq: np.ndarray, attention_factor: float) -> tuple[Tensor, ...]:
        """cos and sin [N, 1, D/2]: for TensorRT's layer N sequences of one token, which is the same rotation."""
        with self.layers.at("rope"):
            column = self.layers.reshape(self.to_float32(positions), -1, 1, 1)
            angles = self.mul(column, self.constant(inv_freq.reshape(1, 1, -1)))
            tables = []
            for function in ("COS", "SIN"):
                table = self.layers.unary(function, angles)
                if attention_factor != 1.0:
                    table = self.mul(table, self.constant(np.full((1, 1, 1), attention_factor, np.float32)))
                tables.append(self.to_dtype(table))
            return tuple(tables)

    def rotary_embedding(self, x: Tensor, tables: Sequence[Tensor]) -> Tensor:
        cos, sin = tables
        heads, dim = tuple(x.shape)[1:]
        if self.has("add_rotary_embedding"):
            single = self.layers.reshape(x, 0, heads, 1, dim)
            rotated = self._network.add_rotary_embedding(single, cos, sin, False, dim)
            return self.layers.reshape(self.layers.output(rotated, "rotary"), 0, heads, dim)
        x1, x2 = self.slice_last(x, 0, dim // 2), self.slice_last(x, dim // 2, dim)
        low = self.sub(self.mul(x1, cos), self.mul(x2, sin))
        high = self.add(self.mul(x2, cos), self.mul(x1, sin))
        layer = self._network.add_concatenation([low, high])
        layer.axis = 2
        return self.layers.output(layer, "rotary")

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The layer knows no scale, so q is multiplied, in float32: a rounded factor would bend every logit.

        A single query sees every token. There, the G query heads of a KV head go as G queries of one head, which is
        the same sum: kernels for long prompts want more than one query.
        """
        heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
        factor = self.constant(np.full((1, 1, 1), scale, np.float32))
        q = self.layers.cast(self.mul(self.to_float32(q), factor), k.dtype)
        k, v = (self._heads_first(x) for x in (k, v))
        if q.shape[0] == 1:
            q = self.layers.reshape(q, 1, kv_heads, heads // kv_heads, dim)
            return self.layers.reshape(self._attention(q, k, v, causal=False), 1, heads, dim)
        out = self._attention(self._heads_first(q), k, v, causal=True)
        return self.layers.reshape_permuted(out, (heads, -1, dim), 1, 0, 2, what="tokens_first")

    def _heads_first(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [1, H, N, D]."""
        return self.layers.permute(x, 1, 0, 2, then=(1, x.shape[1], -1, x.shape[2]), what="heads_first")

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """[1, H, M, D], [1, Hkv, T, D], [1, Hkv, T, D] -> [1, H, M, D].

        Raises:
            RuntimeError: the layer does not say what it was asked for. (TensorRT drops a mask that comes together with
                causality, and logs it only.)
        """
        norm = self.trt.AttentionNormalizationOp.SOFTMAX
        if self.has("add_attention_v2"):
            kind = self.trt.CausalMaskKind.UPPER_LEFT if causal else self.trt.CausalMaskKind.NONE
            layer = self._network.add_attention_v2(q, k, v, norm, kind)
            right = layer is not None and layer.causal_kind == kind
        else:
            layer = self._network.add_attention(q, k, v, norm, causal)
            right = layer is not None and layer.causal == causal
        self.layers.named(layer, "attention")
        if not right or layer.mask is not None or layer.norm_op != norm:
            raise RuntimeError(f"TensorRT made another attention of {layer.name} than was asked for")
        layer.decomposable = not causal  # one query may do without a fused kernel; T x T numbers are never laid out
        return layer.get_output(0)

    def attend(
        self,
        layer: int,
        num_layers: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: CacheInputs[Tensor],
        batch_size: Tensor,
        scale: float,
    ) -> Tensor:
        inputs = [
            q, k, v, cache.arena, cache.segments, cache.block_table, cache.tail_lengths, cache.new_lengths, cache.work,
            cache.work_count,
        ]  # fmt: skip
        fields: Fields = {
            "layer": layer,
            "page_tokens": cache.page_tokens,
            "page_base": np.array([cache.page_base], np.int64),
            "scale": scale,
        }
        (out,) = self.plugin("HubKVAttend", inputs, fields)
        return out

    # -- HubKV

    def refine(self, scores: Tensor, alpha: Tensor, window: Tensor, hubkv: HubKVConfig) -> Tensor:
        fields: Fields = {
            "nms_kernel": hubkv.nms_kernel,
            "penalty_factor": float(hubkv.penalty_factor),
            "head_weight_temperature": float(hubkv.head_weight_temperature),
            "min_head_weight": float(hubkv.min_head_weight),
            "max_head_weight": float(hubkv.max_head_weight),
            "sink_tokens": hubkv.sink_tokens,
        }
        refined, non_finite = self.plugin("HubKVRefine", [scores, alpha, window], fields)
        self.non_finite.append(non_finite)
        return refined

    def select(self, refined: Tensor, num_groups: int, rows_per_group: Tensor) -> tuple[Tensor, Tensor]:
        """rows_per_group: int64 [1], a shape tensor."""
        positions, offsets = self.plugin("HubKVSelect", [refined], {"num_groups": num_groups}, [rows_per_group])
        return positions, offsets

    def select_all(self, positions: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        zeros = self.constant(np.zeros((num_heads, 1), np.int32))
        every = self.add(zeros, self.layers.reshape(positions, 1, -1))
        offsets = self.mul(self.constant(np.arange(num_heads + 1, dtype=np.int64)), self.layers.num_rows(positions))
        return self.layers.reshape(every, -1), offsets

    def compact(
        self, k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_rows, v_rows = self.plugin("HubKVCompact", [*k, *v, positions, head_offsets], {"token_major": 1})
        return k_rows, v_rows

    def concat_rows(self, parts: Sequence[Tensor]) -> Any:
        """The parts as they are: each is an output of its own, bound one behind the other in the segment."""
        return parts[0] if len(parts) == 1 else tuple(parts)

    def concat_offsets(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        heads = parts[0].shape[0] - 1
        table = self.stack(parts)  # [L, Hkv + 1]
        ends = self.layers.slice(table, (0, heads), (len(parts), 1))
        axis = self.constant(np.array(0, np.int32))
        running = self._network.add_cumulative(ends, axis, self.trt.CumulativeOperation.SUM, True, False)
        inner = self.layers.slice(table, (0, 1), (len(parts), heads))
        shifted = self.add(inner, self.layers.output(running, "rows_before"))
        return self.concat([self.constant(np.zeros(1, np.int64)), self.layers.reshape(shifted, len(parts) * heads)])

    # -- plugins

    def plugin(
        self, name: str, inputs: Sequence[Tensor], fields: Fields, shape_inputs: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """A node of ``libhubkv_plugin.so`` (docs/plugin.md has names, fields, inputs and outputs).

        Raises:
            RuntimeError: the registry has no such plugin, or it refused the fields; its message is in the log.
        """
        made = create_plugin(self.trt, name, fields)
        layer = self.layers.named(self._network.add_plugin_v3(list(inputs), list(shape_inputs), made), name)
        return tuple(layer.get_output(i) for i in range(layer.num_outputs))
