# SPDX-License-Identifier: Apache-2.0
"""The networks of an engine's two plans: a decoder's graph between the inputs and outputs of ``engine/bindings.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..graph.ops import CacheInputs, ExtendInputs, PrefillInputs
from ..graph.tensorrt import TensorRTOps
from ..models.decoder import Decoder
from ..runtime.ledger import PAGE_TOKENS
from .bindings import Binding, extend_bindings, plans_of, prefill_bindings, row_names

PAGE_BASE = 0
"""Byte offset of page 0 in the arena (``runtime/cache.py``): the plugins of attend hold it as a constant."""


@dataclass(frozen=True)
class Network:
    """A network, and what it must outlive.

    Attributes:
        definition: the ``INetworkDefinition``.
        bindings: its inputs and outputs.
        ops: what wrote it; owns the memory of constants, so it lives until the build is over.
    """

    definition: Any
    bindings: Mapping[str, Binding]
    ops: TensorRTOps


def prefill_network(
    trt: Any, builder: Any, config: EngineConfig, weights: Mapping[str, Any], ops: type[TensorRTOps] = TensorRTOps
) -> Network:
    """The network of ``prefill.plan``.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        builder: an ``IBuilder``.
        config: of a TensorRT engine.
        weights: torch tensors of the model and the gate, by name; where ``weights`` is ``shared`` only those with
            ``k_base`` in their name are looked at, for their shape.
        ops: what writes the layers.
    """
    sinks = next((tensor.shape[2] for name, tensor in weights.items() if name.endswith(".k_base")), 16)
    making = _Making(trt, builder, config, prefill_bindings(config, sinks), weights, ops)
    model, plans = config.model, plans_of(config)
    x, layers = making.inputs, making.ops.layers
    outputs = Decoder(model, config.hubkv).prefill(
        making.ops,
        PrefillInputs(
            input_ids=x["input_ids"],
            positions=layers.range(layers.num_rows(x["input_ids"]), trt.int32, "positions"),
            alpha=x.get("alpha"),
            window=x.get("window"),
            rows_per_group=x.get("rows_per_group"),
        ),
        last_queries=plans.last_queries,
    )
    made = {"logits": outputs.logits, "positions": outputs.positions, "head_offsets": outputs.head_offsets}
    for side, rows in (("k", outputs.k_rows), ("v", outputs.v_rows)):
        parts = rows if isinstance(rows, tuple) else (rows,)
        made.update(zip(row_names(side, model, config.hubkv), parts, strict=True))
    if config.hubkv is not None:
        total, *others = making.ops.non_finite
        for other in others:
            total = making.ops.add(total, other)
        made["non_finite"] = total
    if plans.last_queries:
        made["last_queries"] = outputs.last_queries
    return making.finish(made)


def extend_network(
    trt: Any, builder: Any, config: EngineConfig, weights: Mapping[str, Any], ops: type[TensorRTOps] = TensorRTOps
) -> Network:
    """The network of ``extend.plan``; arguments as of ``prefill_network``."""
    making = _Making(trt, builder, config, extend_bindings(config), weights, ops)
    x, layers = making.inputs, making.ops.layers
    fields = ("arena", "segments", "block_table", "tail_lengths", "new_lengths", "work", "work_count")
    outputs = Decoder(config.model, config.hubkv).extend(
        making.ops,
        ExtendInputs(
            input_ids=layers.reshape(x["input_ids"], -1),
            positions=layers.reshape(x["positions"], -1),
            last_tokens=x["last_tokens"],
            cache=CacheInputs(**{name: x[name] for name in fields}, page_tokens=PAGE_TOKENS, page_base=PAGE_BASE),
            batch_size=layers.num_rows(x["segments"]),
        ),
        new_queries=plans_of(config).new_queries,
    )
    made = {"logits": outputs.logits, "k_new": outputs.k_new, "v_new": outputs.v_new}
    if outputs.q_new is not None:
        made["q_new"] = outputs.q_new
    return making.finish(made)


class _Making:
    """A network with its inputs; ``finish`` gives it its outputs."""

    def __init__(
        self,
        trt: Any,
        builder: Any,
        config: EngineConfig,
        bindings: Mapping[str, Binding],
        weights: Mapping[str, Any],
        ops: type[TensorRTOps],
    ) -> None:
        flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # from some version on always
        self.network = builder.create_network(0 if flags is None else 1 << int(flags))
        self.trt, self.bindings = trt, bindings
        self.inputs: dict[str, Any] = {}
        for binding in bindings.values():
            if binding.is_input:
                dtype = getattr(trt, binding.dtype)
                self.inputs[binding.name] = self.network.add_input(binding.name, dtype, binding.shape)
        given = {name: self.inputs[name] for name, binding in bindings.items() if binding.is_weight}
        self.ops = ops(trt, self.network, config.dtype, given or weights)

    def finish(self, outputs: Mapping[str, Any]) -> Network:
        """Marks and names the outputs.

        Raises:
            RuntimeError: they are not those of the table; a bug.
        """
        names = [name for name, binding in self.bindings.items() if not binding.is_input]
        if sorted(names) != sorted(outputs):
            raise RuntimeError(f"network: outputs {sorted(outputs)} are not {sorted(names)}")
        for name in names:
            tensor, binding = outputs[name], self.bindings[name]
            if tensor.is_network_input or tensor.is_network_output:
                tensor = self.ops.layers.output(self.network.add_identity(tensor), name)
            tensor.name = name
            self.network.mark_output(tensor)
            found = (tuple(tensor.shape), tensor.dtype)
            if found != (binding.shape, getattr(self.trt, binding.dtype)):
                raise RuntimeError(f"network: output {name} is {found}, not {binding.shape} {binding.dtype}")
        return Network(self.network, self.bindings, self.ops)
