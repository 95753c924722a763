# SPDX-License-Identifier: Apache-2.0
"""The executor's calls of CUDA and TensorRT against the real bindings: they exist and take these arguments."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hubkv_trt
from hubkv_trt.cuda import errors, memory, stream, upload
from hubkv_trt.cuda.graph import Graph
from hubkv_trt.cuda.staging import Staging
from hubkv_trt.engine.bindings import extend_bindings, prefill_bindings
from hubkv_trt.runtime.device_arena import DeviceArena
from hubkv_trt.runtime.executors import plans
from hubkv_trt.runtime.executors.tensorrt import open_tensorrt
from tensorrt_config import make_config

PACKAGE = Path(hubkv_trt.__file__).parent
MODULES = [name for name in ("tensorrt_lean_bindings", "tensorrt") if importlib.util.find_spec(name)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what CUDA says without a driver")


# ---- CUDA: the real bindings -----------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: memory.DeviceMemory(256, "a test"), "cudaMalloc"),
        (lambda: memory.PinnedMemory(256), "cudaHostAlloc"),
        (memory.memory_info, "cudaMemGetInfo"),
        (stream.Stream, "cudaStreamCreateWithFlags"),
        (stream.Event, "cudaEventCreateWithFlags"),
        (lambda: Staging(512), "cudaHostAlloc"),
        (lambda: memory.copy("HostToDevice", 4096, 8192, 16, 5), "cudaMemcpyAsync"),
        (lambda: memory.copy("DeviceToDevice", 4096, 8192, 16, 5), "cudaMemcpyAsync"),
        (lambda: memory.copy("DeviceToHost", 4096, 8192, 16, 5), "cudaMemcpyAsync"),
        (lambda: Graph(SimpleNamespace(handle=5), lambda: None), "cudaStreamBeginCapture"),
        (lambda: upload.upload({"w": torch.zeros(3)}, "weights", SimpleNamespace(handle=5)), "cudaMalloc"),
        (lambda: DeviceArena(4096), "cudaMalloc"),
    ],
)
def test_cuda_errors_name_the_call_and_the_code(make: Callable[[], Any], function: str) -> None:
    """What CUDA says here, by every object that calls it: the arguments were taken and the driver is missing."""
    pytest.importorskip("cuda.bindings.runtime")
    with pytest.raises(errors.CudaError) as raised:
        make()
    assert raised.value.function == function
    assert raised.value.code == 35
    assert str(raised.value).startswith(
        f"{function}: cudaErrorInsufficientDriver (35): CUDA driver version is insufficient"
    )


@no_gpu
def test_without_a_gpu_an_engine_of_tensorrt_says_so() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    message = r"backend: tensorrt needs an NVIDIA GPU, and CUDA finds none .*cudaErrorInsufficientDriver \(35\)"
    opened = SimpleNamespace(config=make_config())
    with pytest.raises(ValueError, match=message):
        open_tensorrt(opened, None, None)  # type: ignore[arg-type]


def calls_of_cuda() -> Iterator[tuple[str, int]]:
    """(function, number of arguments) of every call of the CUDA runtime in the package."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("call", "release"):
                first = node.args[0]
                if isinstance(first, ast.Constant) and str(first.value).startswith("cuda"):
                    assert not any(isinstance(a, ast.Starred) for a in node.args)
                    yield str(first.value), len(node.args) - 1


def test_every_call_of_cuda_exists_and_takes_as_many_arguments() -> None:
    module = pytest.importorskip("cuda.bindings.runtime")
    calls = set(calls_of_cuda())
    assert len(calls) > 20
    for function, count in sorted(calls):
        signature = inspect.getdoc(getattr(module, function)).splitlines()[0]
        inner = signature[signature.index("(") + 1 : signature.rindex(")")]
        assert count == len([a for a in inner.split(",") if a.strip()]), f"{signature} is called with {count} arguments"
    for name in ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"):
        assert hasattr(module.cudaMemcpyKind, name)
    assert module.cudaError_t(errors.OUT_OF_MEMORY).name == "cudaErrorMemoryAllocation"
    assert int(module.cudaStreamNonBlocking) == stream.NON_BLOCKING
    assert int(module.cudaEventDisableTiming) == stream.NO_TIMING


# ---- TensorRT: the real classes --------------------------------------------------------------------------------------

OBJECTS = {
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "self._engine": "ICudaEngine",
    "context": "IExecutionContext",
    "self._context": "IExecutionContext",
}
ARGUMENTS = {
    "deserialize_cuda_engine": ["Buffer"],
    "create_execution_context": ["ExecutionContextAllocationStrategy"],
    "get_tensor_name": ["SupportsInt"],
    "get_tensor_mode": ["str"],
    "get_tensor_dtype": ["str"],
    "get_tensor_shape": ["str"],
    "get_tensor_location": ["str"],
    "set_optimization_profile_async": ["SupportsInt", "SupportsInt"],
    "set_input_shape": ["str", "tuple"],
    "set_tensor_address": ["str", "SupportsInt"],
    "infer_shapes": [],
    "update_device_memory_size_for_shapes": [],
    "set_device_memory": ["SupportsInt", "SupportsInt"],
    "execute_async_v3": ["SupportsInt"],
}
"""What the executor passes, by method; numbers are ints, shapes tuples, a plan a mapped file."""

NAMES_BEFORE_11 = {"int": "SupportsInt", "buffer": "Buffer"}


def uses_of_tensorrt() -> Iterator[tuple[str, str, int | None]]:
    """(class, attribute, number of arguments or None where it is read) in the one file that touches these objects."""
    tree = ast.parse(Path(plans.__file__).read_text())
    called = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in OBJECTS:
            yield OBJECTS[ast.unparse(node.value)], node.attr, called.get(id(node))


def signatures(method: Any) -> Iterator[list[str]]:
    """The types that each overload of a method takes, without self."""
    for line in inspect.getdoc(method).splitlines():
        match = re.match(r"(?:\d+\. )?\w+\(self: [\w.]+(?:, (.*))?\) ->", line)
        if match:
            types = re.findall(r"\w+: ([A-Za-z][\w.]*)", match[1] or "")
            yield [NAMES_BEFORE_11.get(t.split(".")[-1], t.split(".")[-1]) for t in types]


@pytest.mark.parametrize("module", MODULES)
def test_tensorrt_has_what_the_executor_calls(module: str) -> None:
    trt = importlib.import_module(module)
    uses = set(uses_of_tensorrt())
    assert {name for _, name, count in uses if count is not None} == set(ARGUMENTS)
    for owner, name, count in sorted(uses, key=str):
        found = getattr(getattr(trt, owner), name)
        if count is None:
            assert isinstance(found, property), f"{owner}.{name}"
        else:
            assert count == len(ARGUMENTS[name])
            assert ARGUMENTS[name] in list(signatures(found)), f"{owner}.{name}: {list(signatures(found))}"


@pytest.mark.parametrize("module", MODULES)
def test_tensorrt_has_what_the_runtime_names(module: str) -> None:
    """Classes and enumerators that the code of the runtime takes from the module, and the registry's members."""
    trt = importlib.import_module(module)
    files = [*(PACKAGE / "runtime").rglob("*.py"), PACKAGE / "engine/trt_log.py", PACKAGE / "engine/plugin_library.py"]
    named = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"(self\._)?trt(\.\w+)+", text):
                named.add(text.removeprefix("self._"))
    assert {"trt.Runtime", "trt.ILogger", "trt.TensorLocation.HOST"} <= named
    for text in named:
        found = trt
        for part in text.split(".")[1:]:
            found = getattr(found, part)
    for name in ("load_library", "all_creators"):
        assert hasattr(trt.IPluginRegistry, name)
    for binding in (*extend_bindings(make_config()).values(), *prefill_bindings(make_config()).values()):
        assert isinstance(getattr(trt, binding.dtype), trt.DataType)
    assert set(signatures_of(trt.IPluginRegistry.load_library)) == {("str",)}


def signatures_of(method: Any) -> Iterator[tuple[str, ...]]:
    return (tuple(s) for s in signatures(method))
