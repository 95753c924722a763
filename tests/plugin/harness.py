# SPDX-License-Identifier: Apache-2.0
"""A plugin library and its plugins, as ``harness.cpp`` drives them. Tensors are NumPy arrays: bfloat16 as uint16."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from simt import library

BUILD, RUNTIME = range(2)
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "uint16": 7, "int64": 8}
FIELD_TYPES = {"float32": 1, "float64": 2, "int32": 5, "int64": 10}
LINEAR = 0


class Tensor(ctypes.Structure):
    """Type and dimensions of an input or output."""

    _fields_ = [("type", c_int32), ("format", c_int32), ("rank", c_int32), ("d", c_int64 * 8)]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.d[: self.rank])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(next(name for name, number in TYPES.items() if number == self.type))


class Field(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32)]


def tensor(dtype: str, *shape: int, format: int = LINEAR) -> Tensor:
    return Tensor(TYPES[dtype], format, len(shape), (c_int64 * 8)(*shape))


def describe(array: np.ndarray) -> Tensor:
    return tensor(array.dtype.name, *array.shape)


def tensors(items: Sequence[Tensor]) -> Any:
    return (Tensor * max(len(items), 1))(*items)


def addresses(arrays: Sequence[np.ndarray]) -> Any:
    return (c_void_p * len(arrays))(*[x.ctypes.data for x in arrays])


@functools.cache
def harness() -> ctypes.CDLL:
    library.make("hubkv_plugin_harness", options=("-DHUBKV_PLUGIN=ON",))
    found = ctypes.CDLL(str(library.BUILD / "tests" / "plugin" / "libhubkv_plugin_harness.so"))
    found.harness_log.restype = c_char_p
    found.harness_workspace.restype = c_int64
    for name in ("open", "create", "reload", "clone", "attach"):
        getattr(found, f"harness_{name}").restype = c_void_p
    return found


def emulated(mode: str = "plain") -> Path:
    """The plugin library over the emulated kernels."""
    library.make(f"hubkv_plugin_simt_{mode}", options=("-DHUBKV_PLUGIN=ON",))
    return library.BUILD / "tests" / "plugin" / f"libhubkv_plugin_simt_{mode}.so"


def host_only() -> Path:
    """The library as users build it, over a core without CUDA kernels."""
    library.make("hubkv_plugin", options=("-DHUBKV_PLUGIN=ON",))
    return library.BUILD / "libhubkv_plugin.so"


def log() -> str:
    """What the plugins have logged since the last call."""
    return harness().harness_log().decode()


class Plugin:
    """One IPluginV3."""

    def __init__(self, owner: Library, address: int) -> None:
        self.owner, self.address = owner, c_void_p(address)

    def __del__(self) -> None:
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

    def enqueue(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: int) -> int:
        described = self._both([describe(x) for x in inputs], [describe(x) for x in outputs])
        memory = np.full(workspace + 256, 0xFF, np.uint8)  # aligned as TensorRT's is
        start = memory[-memory.ctypes.data % 256 :]
        return int(
            self._call("enqueue", *described, addresses(inputs), addresses(outputs), c_void_p(start.ctypes.data))
        )

    def run(self, inputs: Sequence[np.ndarray], *values: int) -> list[np.ndarray]:
        """The whole life of a node in an engine whose profile ends at these shapes."""
        given = [describe(x) for x in inputs]
        wanted = self.outputs(given, *values)
        assert wanted is not None, log()
        assert self.configure(given, wanted) == 0, log()
        size = self.workspace(given, wanted)
        context = self.reload().attach()
        assert context.shape_change(given, wanted) == 0, log()
        results = [np.full(x.shape, -1).astype(x.dtype) for x in wanted]
        assert context.enqueue(inputs, results, size) == 0, log()
        return results


class Library:
    """A loaded plugin library."""

    def __init__(self, file: Path) -> None:
        self.address = c_void_p(harness().harness_open(str(file).encode()))
        self.num_creators = int(harness().harness_creators(self.address))

    def close(self) -> None:
        harness().harness_close(self.address)

    def create(self, name: str, phase: int = BUILD, **fields: np.ndarray) -> Plugin | None:
        """A plugin; None: its creator refuses the fields."""
        items = [Field(n.encode(), v.ctypes.data, FIELD_TYPES[v.dtype.name], v.size) for n, v in fields.items()]
        return self.create_raw(name, items, phase)

    def create_raw(self, name: str, fields: Sequence[Field], phase: int = BUILD) -> Plugin | None:
        array = (Field * max(len(fields), 1))(*fields)
        address = harness().harness_create(self.address, name.encode(), array, len(fields), phase)
        return Plugin(self, address) if address else None

    def make(self, name: str, **fields: int | float) -> Plugin:
        """A plugin of the build phase; page_base is int64, other ints int32, floats float32."""
        kinds = {n: np.int64 if n == "page_base" else np.float32 if isinstance(v, float) else np.int32
                 for n, v in fields.items()}  # fmt: skip
        plugin = self.create(name, **{n: np.array([v], kinds[n]) for n, v in fields.items()})
        assert plugin is not None, log()
        return plugin
