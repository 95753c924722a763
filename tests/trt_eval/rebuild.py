# SPDX-License-Identifier: Apache-2.0
"""``python -m trt_eval.rebuild MODEL`` defines and builds the plans of a model, and prints a line for each: the hash of
the network's definition, and the size of the plan.

Plans themselves are never alike: TensorRT-RTX orders about a thousand bytes of its tables by address.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import tensorrt_rtx_bindings as trt

from hubkv_trt.engine.network import extend_network, prefill_network
from hubkv_trt.engine.profiles import extend_profiles, prefill_profiles
from hubkv_trt.graph.lowered import LoweredOps
from hubkv_trt.models.checkpoint import load_config

from .builder import Builder
from .evaluate import opened
from .twins import engine_config
from .values import weights_of


def definition(network: Any) -> Iterator[str]:
    """The layers of a network, a line each: type, name, attributes, tensors in and out."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kind, inputs, outputs = opened(trt, layer)
        ends = [f"{x.name} {x.dtype} {x.shape}" if x is not None else "none" for x in (*inputs, *outputs)]
        yield f"{kind} {layer.name} {dict(_attributes(layer))} {ends}"


def _attributes(layer: Any) -> Iterator[tuple[str, str]]:
    for name in sorted(dir(layer)):
        if name == "attention":
            yield name, str(dict(_attributes(layer.attention)))
        elif name == "weights":
            yield name, hashlib.sha256(weights_of(layer.weights, layer.shape).numpy().tobytes()).hexdigest()
        elif not name.startswith("_") and not callable(getattr(layer, name, len)):
            yield name, str(getattr(layer, name))


if __name__ == "__main__":
    config = engine_config(load_config(sys.argv[1]))
    for network_of, profiles in ((prefill_network, prefill_profiles), (extend_network, extend_profiles)):
        builder = Builder()
        network = network_of(trt, builder.builder, config, {}, LoweredOps)
        layers = "\n".join(definition(network.definition))
        plan = builder.plan(network, profiles(config), "SM89")
        print(hashlib.sha256(layers.encode()).hexdigest(), len(plan))
