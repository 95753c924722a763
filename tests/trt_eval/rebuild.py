# SPDX-License-Identifier: Apache-2.0
"""``python -m trt_eval.rebuild MODEL`` builds the plans of a model again and again, until two builds are the same
to the byte or there were six, and prints their hashes, a build a line.

TensorRT-RTX orders some of its tables by address, so bytes can only be alike from alike addresses: each build is a
child of one process, which the system gives the same memory. Its builder's threads may still take their memory in
another order, in about one build of three.
"""

from __future__ import annotations

import hashlib
import os
import sys

import tensorrt_rtx_bindings as trt

from hubkv_trt.engine.network import extend_network, prefill_network
from hubkv_trt.engine.profiles import extend_profiles, prefill_profiles
from hubkv_trt.graph.lowered import LoweredOps
from hubkv_trt.models.checkpoint import load_config

from .builder import Builder
from .twins import engine_config


def build(model: str) -> str:
    """Sizes and hashes of both plans."""
    found = []
    config = engine_config(load_config(model))
    for network_of, profiles in ((prefill_network, prefill_profiles), (extend_network, extend_profiles)):
        builder = Builder()
        network = network_of(trt, builder.builder, config, {}, LoweredOps)
        plan = builder.plan(network, profiles(config), "SM89")
        found.append(f"{len(plan)} {hashlib.sha256(plan).hexdigest()}")
    return " ".join(found)


def in_a_child(model: str) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, build(model).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        line = result.read()
    assert os.waitpid(child, 0)[1] == 0
    return line


if __name__ == "__main__":
    lines: list[str] = []
    while len(lines) == len(set(lines)) < 6:
        lines.append(in_a_child(sys.argv[1]))
        print(lines[-1], flush=True)
