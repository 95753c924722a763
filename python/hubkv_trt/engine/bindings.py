# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of a TensorRT engine's two plans: the one table that the builder, the executor and tests share.

Letters as in docs/architecture.md; M is ``TensorRTConfig.last_queries``, V the vocabulary, W the places of the work
list of a layer, ``pages`` the columns of the block table. Tokens of a prompt are one sequence, without a batch axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..config import EngineConfig, HubKVConfig, ModelConfig, Scope, TensorRTConfig, WeightsPlace

DYNAMIC = ("T", "K", "K/S", "M", "B", "Tq", "pages", "W")
"""The letters that a profile bounds; the others are known when a plan is built."""

EXTRA_WORK_ITEMS = 1024
"""Places of the work list beside one for each head: what an H200 needs to be full (docs/kernels.md, attend)."""


@dataclass(frozen=True)
class Binding:
    """One input or output of a plan.

    Attributes:
        name: of the tensor.
        dtype: ``int32``, ``int64``, ``float32``, ``float16`` or ``bfloat16``.
        dims: a letter (or a number as text) for each dimension.
        shape: the dimensions; -1 where dynamic.
        is_input: else it is an output.
        is_shape: an input whose values are read on the host (a shape tensor).
        is_weight: an input that is a tensor of ``weights.safetensors`` or ``gate.safetensors``.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    is_input: bool = False
    is_shape: bool = False
    is_weight: bool = False

    def sized(self, letters: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where the dynamic letters have these values."""
        return tuple(letters[d] if size < 0 else size for d, size in zip(self.dims, self.shape, strict=True))


def prefill_bindings(config: EngineConfig, num_sinks: int = 16) -> dict[str, Binding]:
    """Inputs and outputs of ``prefill.plan``, one prompt of T tokens.

    In layer and head scope, and without compression, the rows of each layer are outputs of their own, so that no layer
    waits for the others; bound one behind the other they are the segment's. ``positions`` and ``head_offsets`` are
    always those of the whole segment.

    =================  ==============  ====================  ====================================================
    input_ids          int32           [T]
    alpha              float32         [1]                   with HubKV: r^p
    window             int32           [1]                   with HubKV: last positions that are protected
    rows_per_group     int64           [1]                   with HubKV: K of each group; a shape tensor
    weights            dtype           as in the files       where ``weights`` is ``shared``
    logits (out)       float32         [V]                   of the last token
    k_rows, v_rows     dtype           [K, D]                model scope
    k_rows.{l} ...     dtype           [K/L, D]              other scopes and dense engines, for each layer l
    positions          int32           [K]                   ascending within a head
    head_offsets       int64           [L*Hkv + 1]
    non_finite         int64           [1]                   with HubKV: scores that were NaN or infinite
    last_queries       dtype           [L, M, Hq, D]         on request; M is min(T, last_queries); RoPE applied
    =================  ==============  ====================  ====================================================

    Args:
        config: of a TensorRT engine.
        num_sinks: S of the gate.
    """
    model, plans = config.model, plans_of(config)
    make = _Maker(config)
    make.input("input_ids", "int32", "T")
    if config.hubkv is not None:
        make.input("alpha", "float32", "1")
        make.input("window", "int32", "1")
        make.input("rows_per_group", "int64", "1", is_shape=True)
    make.weights(plans, num_sinks)
    make.output("logits", "float32", "V")
    for side in ("k", "v"):
        for name in row_names(side, model, config.hubkv):
            make.output(name, config.dtype.value, "K" if name == f"{side}_rows" else "K/L", "D")
    make.output("positions", "int32", "K")
    make.output("head_offsets", "int64", "L*Hkv+1")
    if config.hubkv is not None:
        make.output("non_finite", "int64", "1")
    if plans.last_queries:
        make.output("last_queries", config.dtype.value, "L", "M", "Hq", "D")
    return make.bindings


def extend_bindings(config: EngineConfig) -> dict[str, Binding]:
    """Inputs and outputs of ``extend.plan``: B sequences of Tq new tokens each.

    What the tables of the cache hold: ``cpp/include/hubkv/hubkv.h``. Rows are padded behind to Tq tokens with any
    valid id; ``new_lengths`` says how many are real.

    =================  ==============  ====================  ====================================================
    input_ids          int32           [B, Tq]
    positions          int32           [B, Tq]               true positions in the text
    last_tokens        int32           [B]                   which of the B*Tq rows gives a sequence's logits
    arena              int64           [2]                   address and bytes of all cache memory
    segments           int64           [B, 4]
    block_table        int32           [B, pages]
    tail_lengths       int32           [B]
    new_lengths        int32           [B]
    work               int32           [L, W, 4]             of the plan stage; W at most ``work_capacity``
    work_count         int32           [L]
    weights            dtype           as in the files       where ``weights`` is ``shared``; without the gate
    logits (out)       float32         [B, V]
    k_new, v_new       dtype           [L, B, Tq, Hkv, D]    RoPE applied to k
    q_new              dtype           [L, B, Tq, Hq, D]     on request (``new_queries``); RoPE applied
    =================  ==============  ====================  ====================================================
    """
    plans, dtype = plans_of(config), config.dtype.value
    make = _Maker(config)
    make.input("input_ids", "int32", "B", "Tq")
    make.input("positions", "int32", "B", "Tq")
    make.input("last_tokens", "int32", "B")
    make.input("arena", "int64", "2")
    make.input("segments", "int64", "B", "4")
    make.input("block_table", "int32", "B", "pages")
    make.input("tail_lengths", "int32", "B")
    make.input("new_lengths", "int32", "B")
    make.input("work", "int32", "L", "W", "4")
    make.input("work_count", "int32", "L")
    make.weights(plans, None)
    make.output("logits", "float32", "B", "V")
    make.output("k_new", dtype, "L", "B", "Tq", "Hkv", "D")
    make.output("v_new", dtype, "L", "B", "Tq", "Hkv", "D")
    if plans.new_queries:
        make.output("q_new", dtype, "L", "B", "Tq", "Hq", "D")
    return make.bindings


def row_names(side: str, model: ModelConfig, hubkv: HubKVConfig | None) -> list[str]:
    """The outputs of prefill that hold the kept rows of ``k`` or ``v``, in the order of their rows."""
    if hubkv is not None and hubkv.scope is Scope.MODEL:
        return [f"{side}_rows"]
    return [f"{side}_rows.{layer}" for layer in range(model.num_layers)]


def work_capacity(model: ModelConfig, batch_size: int) -> int:
    """W, the places of a layer's work list for B sequences."""
    return batch_size * model.num_kv_heads + EXTRA_WORK_ITEMS


def plans_of(config: EngineConfig) -> TensorRTConfig:
    """The TensorRT settings of an engine.

    Raises:
        ValueError: it has none.
    """
    if config.tensorrt is None:
        raise ValueError(f"backend: {config.backend.value!r} has no plans: build with --backend tensorrt")
    return config.tensorrt


def weight_shapes(config: EngineConfig, num_sinks: int | None) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the model's weights, and of the gate's (S = ``num_sinks``) where there is one."""
    from ..models.checkpoint import weight_parts

    for name, parts in weight_parts(config.model).items():
        yield name, config.dtype.value, (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
    if config.hubkv is not None and num_sinks is not None:
        import torch

        from ..scorers.fastkvzip import Gate, engine_weights, gate_shapes

        shapes = gate_shapes(config.model, num_sinks)
        empty = Gate({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        for name, tensor in engine_weights(empty, config.dtype).items():
            yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class _Maker:
    """Collects bindings; letters become numbers where the config knows them."""

    def __init__(self, config: EngineConfig) -> None:
        model = config.model
        self.bindings: dict[str, Binding] = {}
        self._config = config
        self._sizes = {
            "L": model.num_layers,
            "Hq": model.num_heads,
            "Hkv": model.num_kv_heads,
            "D": model.head_dim,
            "V": model.vocab_size,
            "L*Hkv+1": model.num_rows_per_token + 1,
        }

    def input(self, name: str, dtype: str, *dims: str, is_shape: bool = False) -> None:
        self._add(Binding(name, dtype, dims, self._shape(dims), is_input=True, is_shape=is_shape))

    def output(self, name: str, dtype: str, *dims: str) -> None:
        self._add(Binding(name, dtype, dims, self._shape(dims)))

    def weights(self, plans: TensorRTConfig, num_sinks: int | None) -> None:
        if plans.weights is WeightsPlace.SHARED:
            for name, dtype, shape in weight_shapes(self._config, num_sinks):
                dims = tuple(map(str, shape))
                self._add(Binding(name, dtype, dims, shape, is_input=True, is_weight=True))

    def _add(self, binding: Binding) -> None:
        assert binding.name not in self.bindings, binding.name
        self.bindings[binding.name] = binding

    def _shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(int(d) if d.isdigit() else self._sizes.get(d, -1) for d in dims)
