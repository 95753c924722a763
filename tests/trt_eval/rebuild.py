# SPDX-License-Identifier: Apache-2.0
"""``python -m trt_eval.rebuild MODEL`` builds the plans of a model twice and prints their hashes, a build a line.

TensorRT-RTX orders some of its tables by address, so bytes can only be alike from alike addresses: each build is a
child of one process, which the system gives the same memory.
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


def build(model: str) -> None:
    config = engine_config(load_config(model))
    for network_of, profiles in ((prefill_network, prefill_profiles), (extend_network, extend_profiles)):
        builder = Builder()
        network = network_of(trt, builder.builder, config, {}, LoweredOps)
        plan = builder.plan(network, profiles(config), "SM89")
        print(len(plan), hashlib.sha256(plan).hexdigest(), end=" ", flush=True)
    print(flush=True)


if __name__ == "__main__":
    for _ in range(2):
        child = os.fork()
        if child == 0:
            build(sys.argv[1])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
