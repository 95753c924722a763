# SPDX-License-Identifier: Apache-2.0
"""The stages on CUDA tensors as torch sees them: streams, graphs, devices. Results are test_cuda_*.py's to compare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import test_ops
from device import graphs, streams
from device.chain import chain, inputs
from device.moved import Mover
from hubkv_trt import _tensors, ops

pytestmark = pytest.mark.gpu
NAMES = ("refine", "select", "compact", "compact_into", "plan", "attend", "append")


def on_gpu(name: str) -> tuple:
    return Mover("cuda")(test_ops.samples()[name])


def test_captured_graph_follows_its_tables() -> None:
    graphs.check(graphs.host_results())


def test_current_stream_and_no_waiting() -> None:
    streams.check(chain(inputs(1)))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    """As test_ops.py does on the CPU: schema, fake kernel, tracing with dynamic shapes."""
    torch.library.opcheck(getattr(torch.ops.hubkv, name).default, on_gpu(name))


@pytest.mark.parametrize("name", NAMES)
def test_results_are_on_the_device_of_the_arguments(name: str) -> None:
    results = getattr(ops, name)(*on_gpu(name))
    for x in [results] if isinstance(results, Tensor) else results or ():
        assert x.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "select"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_tensors_on_two_devices_are_refused(name: str, which: str) -> None:
    arguments = list(on_gpu(name))
    tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    index = tensors[0 if which == "first" else -1]
    arguments[index] = arguments[index].cpu()
    with pytest.raises(ValueError, match="cpu"):
        getattr(ops, name)(*arguments)


def test_an_arena_that_is_new_to_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table would be written by a copy that waits, which no graph can hold."""
    arguments = on_gpu("plan")
    monkeypatch.setattr(_tensors, "_arenas", {})  # another arena may have been at this address
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"arena: .* before the capture"), torch.cuda.graph(graph):
        ops.plan(*arguments)
