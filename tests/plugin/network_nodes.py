# SPDX-License-Identifier: Apache-2.0
"""``python network_nodes.py LIBRARY < nodes.json`` makes plugin nodes as networks do, in TensorRT's own registry.

A process of its own: the lean runtime, which has the registry, and TensorRT-RTX, which has networks, share no process.
Input is a list of [name, fields, inputs, shape inputs]; fields are [dtype, value] by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hubkv_trt.config import DType
from hubkv_trt.engine.plugin_library import load_plugins
from hubkv_trt.graph.tensorrt import TensorRTOps


class Network:
    """Takes plugin nodes, which the lean runtime has no network for."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []

    def add_plugin_v3(self, inputs: list[str], shape_inputs: list[str], plugin: Any) -> Any:
        self.nodes.append([plugin is not None, inputs, shape_inputs])
        return SimpleNamespace(name="", num_outputs=0)


def main() -> None:
    import tensorrt_lean_bindings as trt
    import tensorrt_lean_libs  # noqa: F401 (loads the library that the bindings need)

    load_plugins(trt, Path(sys.argv[1]))
    network = Network()
    ops = TensorRTOps(trt, network, DType.BFLOAT16, {})
    for name, fields, inputs, shape_inputs in json.load(sys.stdin):
        values = {field: np.array([value], dtype) for field, (dtype, value) in fields.items()}
        ops.plugin(name, inputs, values, shape_inputs)
    refused = ""
    try:
        ops.plugin("HubKVSelect", ["refined"], {"num_groups": 0}, ["rows"])
    except RuntimeError as error:
        refused = str(error)
    print(json.dumps({"nodes": network.nodes, "refused": refused}))


if __name__ == "__main__":
    main()
