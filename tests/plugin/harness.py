# SPDX-License-Identifier: Apache-2.0
"""A plugin library and its plugins, as ``harness.cpp`` drives them. Tensors are NumPy arrays: bfloat16 as uint16."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugin.memory import Memory
from simt import library

BUILD, RUNTIME = range(2)
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "uint16": 7, "int64": 8}
FIELD_TYPES = {"float32": 1, "float64": 2, "int32": 5, "int64": 10}
LINEAR = 0
SANITIZED = "HUBKV_TEST_SANITIZED"
NO_FINDER, FINDER_OF_NONE, FINDER_THAT_THROWS = range(1, 4)


class Tensor(ctypes.Structure):
    """Type and dimensions of an input or output."""

    _fields_ = [("type", c_int32), ("format", c_int32), ("rank", c_int32), ("d", c_int64 * 8)]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.d[: self.rank])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(next(name for name, number in TYPES.items() if number == self.type))


class Call(ctypes.Structure):
    """One enqueue of one context."""

    _fields_ = [
        ("plugin", c_void_p),
        ("inputs", ctypes.POINTER(Tensor)),
        ("num_inputs", c_int32),
        ("outputs", ctypes.POINTER(Tensor)),
        ("num_outputs", c_int32),
        ("input_data", ctypes.POINTER(c_void_p)),
        ("output_data", ctypes.POINTER(c_void_p)),
        ("workspace", c_void_p),
        ("status", c_int32),
    ]


class Field(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32)]


def tensor(dtype: str, *shape: int, format: int = LINEAR) -> Tensor:
    return Tensor(TYPES[dtype], format, len(shape), (c_int64 * 8)(*shape))


def describe(array: np.ndarray) -> Tensor:
    return tensor(array.dtype.name, *array.shape)


def tensors(items: Sequence[Tensor]) -> Any:
    return (Tensor * max(len(items), 1))(*items)


def addresses(arrays: Sequence[np.ndarray | None]) -> Any:
    return (c_void_p * len(arrays))(*[None if x is None else x.ctypes.data for x in arrays])


@functools.cache
def harness() -> ctypes.CDLL:
    library.make("hubkv_plugin_harness", options=("-DHUBKV_PLUGIN=ON",))
    found = ctypes.CDLL(str(library.BUILD / "tests" / "plugin" / "libhubkv_plugin_harness.so"))
    found.harness_log.restype = c_char_p
    found.harness_workspace.restype = c_int64
    for name in ("open", "create", "reload", "clone", "attach"):
        getattr(found, f"harness_{name}").restype = c_void_p
    return found


def emulated(mode: str | None = None) -> Path:
    """The plugin library over the emulated kernels: ``plain``, or ``asan`` in a process of :func:`sanitized`."""
    mode = mode or ("asan" if os.environ.get(SANITIZED) else "plain")
    library.make(f"hubkv_plugin_simt_{mode}", options=("-DHUBKV_PLUGIN=ON",))
    return library.BUILD / "tests" / "plugin" / f"libhubkv_plugin_simt_{mode}.so"


def sanitized(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS...`` in which the plugins are those of AddressSanitizer and UndefinedBehaviorSanitizer."""
    emulated("asan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SANITIZED, "1")
        return library.run_under_asan(*arguments, timeout=timeout)


def host_only() -> Path:
    """The library as users build it, over a core without CUDA kernels."""
    library.make("hubkv_plugin", options=("-DHUBKV_PLUGIN=ON",))
    return library.BUILD / "libhubkv_plugin.so"


def check_symbols(file: Path) -> None:
    """It exports the two functions that a registry calls, and needs neither TensorRT nor CUDA."""
    symbols = subprocess.run(["nm", "-D", "--defined-only", file], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {"getCreators", "setLoggerFinder"}
    needed = subprocess.run(["ldd", file], check=True, capture_output=True, text=True).stdout
    assert "libc.so" in needed
    assert not any(word in needed for word in ("nvinfer", "libhubkv", "cuda", "not found"))


def log() -> str:
    """What the plugins have logged since the last call."""
    return harness().harness_log().decode()


class Plugin:
    """One IPluginV3."""

    def __init__(self, owner: Library, address: int) -> None:
        self.owner, self.address = owner, c_void_p(address)

    def __del__(self) -> None:
        if self.owner.is_open:
            harness().harness_destroy(self.address)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(harness(), f"harness_{name}")(self.address, *arguments)

    def _both(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Any, ...]:
        return tensors(inputs), len(inputs), tensors(outputs), len(outputs)

    def clone(self) -> Plugin:
        return Plugin(self.owner, self._call("clone"))

    def attach(self) -> Plugin:
        return Plugin(self.owner, self._call("attach"))

    def reload(self) -> Plugin:
        """The plugin of the runtime phase that its serialized fields make."""
        return Plugin(self.owner, harness().harness_reload(self.owner.address, self.address))

    @property
    def num_outputs(self) -> int:
        return int(self._call("num_outputs"))

    @property
    def num_tactics(self) -> int:
        return int(self._call("num_tactics"))

    def fields(self) -> dict[str, float]:
        """What is serialized."""
        out = (Field * 16)()
        count = self._call("fields", out)
        ctype = {1: ctypes.c_float, 5: c_int32, 10: c_int64}
        return {f.name.decode(): ctype[f.type].from_address(f.data).value for f in out[:count]}

    def types(self, inputs: Sequence[Tensor]) -> list[int]:
        given = (c_int32 * len(inputs))(*[x.type for x in inputs])
        out = (c_int32 * self.num_outputs)()
        assert self._call("types", out, len(out), given, len(inputs)) == 0
        return list(out)

    def supports(self, position: int, items: Sequence[Tensor], num_inputs: int) -> bool:
        return bool(self._call("supports", position, tensors(items), num_inputs, len(items) - num_inputs))

    def outputs(self, inputs: Sequence[Tensor], *values: int) -> list[Tensor] | None:
        """Types and shapes of the outputs; ``values`` are those of the shape tensor. None: refused."""
        out = (Tensor * self.num_outputs)()
        shape = (c_int64 * max(len(values), 1))(*values)
        count = len(values) if values else -1
        if self._call("shapes", tensors(inputs), len(inputs), shape, count, out, len(out)) != 0:
            return None
        for item, number in zip(out, self.types(inputs), strict=True):
            item.type = number
        return list(out)

    def configure(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        return int(self._call("configure", *self._both(inputs, outputs)))

    def workspace(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        return int(self._call("workspace", *self._both(inputs, outputs)))

    def shape_change(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        return int(self._call("shape_change", *self._both(inputs, outputs)))

    def enqueue(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: int, null: int | None = None
    ) -> int:
        """null: the input or output (counted on) whose address is null."""
        described = self._both([describe(x) for x in inputs], [describe(x) for x in outputs])
        given = [None if i == null else x for i, x in enumerate([*inputs, *outputs])]
        data = addresses(given[: len(inputs)]), addresses(given[len(inputs) :])
        memory = Memory(workspace)
        return int(self._call("enqueue", *described, *data, c_void_p(memory.address)))

    def run(self, inputs: Sequence[np.ndarray], *values: int) -> list[np.ndarray]:
        """The whole life of a node in an engine whose profile ends at these shapes."""
        outputs = self.empty_outputs(inputs, *values)
        given, wanted = [describe(x) for x in inputs], [describe(x) for x in outputs]
        assert self.configure(given, wanted) == 0, log()
        size = self.workspace(given, wanted)
        context = self.reload().attach()
        assert context.shape_change(given, wanted) == 0, log()
        assert context.enqueue(inputs, outputs, size) == 0, log()
        return outputs

    def empty_outputs(self, inputs: Sequence[np.ndarray], *values: int) -> list[np.ndarray]:
        """Arrays for the outputs, full of -1."""
        wanted = self.outputs([describe(x) for x in inputs], *values)
        assert wanted is not None, log()
        return [np.full(x.shape, -1).astype(x.dtype) for x in wanted]


def enqueue_together(
    contexts: Sequence[Plugin],
    inputs: Sequence[Sequence[np.ndarray]],
    outputs: Sequence[Sequence[np.ndarray]],
    times: int = 5,
) -> int:
    """Enqueues all contexts at the same time, on threads of their own, each ``times`` times; answers how many were
    inside at once.
    """
    calls, keep = (Call * len(contexts))(), []
    for call, context, given, wanted in zip(calls, contexts, inputs, outputs, strict=True):
        described = [describe(x) for x in given], [describe(x) for x in wanted]
        parts = (*context._both(*described), addresses(given), addresses(wanted), Memory(context.workspace(*described)))
        keep.append(parts)
        call.plugin = context.address
        call.inputs, call.num_inputs, call.outputs, call.num_outputs, call.input_data, call.output_data = parts[:6]
        call.workspace = parts[6].address
    together = int(harness().harness_enqueue_together(calls, len(calls), times))
    assert [call.status for call in calls] == [0] * len(calls), log()
    return together


class Library:
    """A loaded plugin library."""

    def __init__(self, file: Path) -> None:
        self.address = c_void_p(harness().harness_open(str(file).encode()))
        self.num_creators = int(harness().harness_creators(self.address))
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        harness().harness_close(self.address)

    @contextmanager
    def finder(self, kind: int) -> Iterator[None]:
        """With SANITIZED = "HUBKV_TEST_SANITIZED"
        NO_FINDER, FINDER_OF_NONE or FINDER_THAT_THROWS in place of the logger that log() reads."""
        harness().harness_set_finder(self.address, kind)
        yield
        harness().harness_set_finder(self.address, 0)

    def create(self, name: str, phase: int = BUILD, **fields: np.ndarray) -> Plugin | None:
        """A plugin; None: its creator refuses the fields."""
        items = [Field(n.encode(), v.ctypes.data, FIELD_TYPES[v.dtype.name], v.size) for n, v in fields.items()]
        return self.create_raw(name, items, phase=phase)

    def create_raw(
        self, name: str, fields: Sequence[Field] | None, count: int | None = None, phase: int = BUILD
    ) -> Plugin | None:
        """From fields of any kind, or a null pointer to ``count`` of them."""
        array = None if fields is None else (Field * max(len(fields), 1))(*fields)
        count = len(fields or ()) if count is None else count
        address = harness().harness_create(self.address, name.encode(), array, count, phase)
        return Plugin(self, address) if address else None

    def make(self, name: str, **fields: int | float) -> Plugin:
        """A plugin of the build phase; page_base is int64, other ints int32, floats float32."""
        kinds = {n: np.int64 if n == "page_base" else np.float32 if isinstance(v, float) else np.int32
                 for n, v in fields.items()}  # fmt: skip
        plugin = self.create(name, **{n: np.array([v], kinds[n]) for n, v in fields.items()})
        assert plugin is not None, log()
        return plugin


def loaded() -> Iterator[Library]:
    """The plugin library over the emulated kernels: a fixture's body."""
    library = Library(emulated())
    yield library
    library.close()
