# SPDX-License-Identifier: Apache-2.0
"""The walk over a network: every value from the layer that makes it, checked against what the network says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hubkv_trt.graph.lowered import PluginCall

from . import attention_layers, layers, plugins, shape_layers
from .values import torch_type

LAYERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    **layers.LAYERS,
    **shape_layers.LAYERS,
    **attention_layers.LAYERS,
}
"""By ``trt.LayerType``: the class with the layer's attributes, and the function (layer, *inputs) -> output."""


class UnknownLayer(NotImplementedError):
    """A layer of a type that has no function here."""


class _Node:
    """A layer, or a plugin node that stands for several: inputs, outputs, and how to get these from those."""

    def __init__(self, inputs: list[Any], outputs: list[Any], run: Callable[..., tuple[Tensor, ...]]) -> None:
        self.inputs, self.outputs, self.run = inputs, outputs, run


@torch.inference_mode()
def evaluate(
    trt: Any,
    network: Any,
    inputs: Mapping[str, Tensor],
    plugin_calls: Iterable[PluginCall] = (),
    exact: bool = False,
    watched: Iterable[Any] = (),
) -> dict[str, Tensor]:
    """The outputs of a network.

    Args:
        trt: the TensorRT module that the network is of.
        network: an ``INetworkDefinition``; it is read only, but its layers change their Python class.
        inputs: by name, all of the network's inputs and no others.
        plugin_calls: nodes that plugins run. The layers that stand in for them in the network are not.
        exact: keep 16-bit floats as the network has them; else they are float32 throughout, and what is computed is
            what the network means.
        watched: tensors inside the network whose values are wanted too.

    Returns:
        By name, outputs first, in order.

    Raises:
        UnknownLayer: a layer that an output needs has a type without a function.
        ValueError: a value has another type or shape than the network declares.
    """
    nodes = _nodes(trt, network, plugin_calls, exact)
    wanted = [*(network.get_output(i) for i in range(network.num_outputs)), *watched]
    values = _given(network, inputs, exact)
    order = _order(nodes, wanted, values)
    uses: dict[int, int] = {}
    for tensor in wanted + [x for node in order for x in node.inputs if x is not None]:
        uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    for node in order:
        results = node.run(*(None if x is None else values[id(x)] for x in node.inputs))
        for tensor, result in zip(node.outputs, results, strict=True):
            if id(tensor) in uses:
                values[id(tensor)] = _checked(tensor, result, exact)
        for tensor in node.inputs:
            if tensor is not None:
                uses[id(tensor)] -= 1
                if uses[id(tensor)] == 0:
                    del values[id(tensor)]
    return {tensor.name: values[id(tensor)] for tensor in wanted}


def _given(network: Any, inputs: Mapping[str, Tensor], exact: bool) -> dict[int, Tensor]:
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    if {t.name for t in tensors} != set(inputs):
        raise ValueError(f"inputs: {sorted(inputs)} are not the network's {sorted(t.name for t in tensors)}")
    return {id(t): _checked(t, inputs[t.name], exact) for t in tensors}


def _nodes(trt: Any, network: Any, calls: Iterable[PluginCall], exact: bool) -> dict[int, _Node]:
    """The node of every tensor that is no input, by the tensor's id, which it keeps while somebody holds it."""
    makers: dict[int, _Node] = {}
    for index in range(network.num_layers):
        node = _layer_node(trt, network.get_layer(index), exact)
        makers.update({id(output): node for output in node.outputs})
    for call in calls:
        node = _Node([*call.inputs, *call.shape_inputs], list(call.outputs), partial(plugins.run, call))
        makers.update({id(output): node for output in node.outputs})
    return makers


def opened(trt: Any, layer: Any) -> tuple[str, list[Any], list[Any]]:
    """The type of a layer, its inputs and outputs; it then has the class with its attributes, where one is known."""
    layer.__class__ = trt.ILayer  # some classes have another ``type`` of their own
    kind = layer.type.name
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    if kind in LAYERS:
        layer.__class__ = getattr(trt, LAYERS[kind][0])
    return kind, inputs, outputs


def _layer_node(trt: Any, layer: Any, exact: bool) -> _Node:
    kind, inputs, outputs = opened(trt, layer)
    if kind not in LAYERS:

        def unknown(*_: Tensor | None) -> tuple[Tensor, ...]:
            raise UnknownLayer(f"layer {layer.name!r} of type {kind}")

        return _Node(inputs, outputs, unknown)
    _, function = LAYERS[kind]

    def run(*values: Tensor | None) -> tuple[Tensor, ...]:
        result = function(layer, *values)
        return (result.to(torch_type(outputs[0].dtype, exact)) if result.is_floating_point() else result,)

    return _Node(inputs, outputs, run)


def _order(nodes: dict[int, _Node], wanted: list[Any], given: dict[int, Tensor]) -> list[_Node]:
    """What the wanted tensors need, each node behind those that it reads."""
    order: list[_Node] = []
    done: set[int] = set()
    stack = [(nodes[id(t)], False) for t in reversed(wanted) if id(t) not in given]
    while stack:
        node, read = stack.pop()
        if id(node) in done:
            continue
        if read:
            done.add(id(node))
            order.append(node)
            continue
        stack.append((node, True))
        needs = (x for x in node.inputs if x is not None and id(x) not in given)
        stack.extend((nodes[id(x)], False) for x in needs if id(nodes[id(x)]) not in done)
    return order


def _checked(tensor: Any, value: Tensor, exact: bool) -> Tensor:
    """The value, if it has the type and the shape that the network declares for the tensor."""
    wanted = torch_type(tensor.dtype, exact)
    shape = tuple(tensor.shape)
    fits = len(shape) == value.ndim and all(d in (-1, n) for d, n in zip(shape, value.shape, strict=True))
    if value.dtype is not wanted or not fits:
        got = f"{value.dtype} {list(value.shape)}"
        raise ValueError(f"{tensor.name}: got {got}, the network says {tensor.dtype.name} {list(shape)}")
    return value
