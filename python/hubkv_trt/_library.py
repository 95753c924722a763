# SPDX-License-Identifier: Apache-2.0
"""Finds, loads and calls libhubkv.

Order: the file that ``HUBKV_LIBRARY`` names, else the one installed with the package (``hubkv_trt/lib``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

from . import _abi

VARIABLE = "HUBKV_LIBRARY"
FILE_NAME = {"darwin": "libhubkv.dylib", "win32": "hubkv.dll"}.get(sys.platform, "libhubkv.so")
_HOW_TO_BUILD = (
    "Build it with `pip install .` in the source tree, or with `cmake -S . -B build && cmake --build build` and "
    f"{VARIABLE}=build/{FILE_NAME}"
)


def find() -> Path:
    """The library's file.

    Raises:
        ImportError: ``HUBKV_LIBRARY`` names no file, or the variable is not set and the package has no library.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ImportError(f"{VARIABLE}: there is no file {named!r}. {_HOW_TO_BUILD}")
        return Path(named)
    # An editable installation keeps the sources in one folder and what was built in another: look in both.
    package = __name__.split(".", maxsplit=1)[0]
    folders = [Path(p) for p in sys.modules[package].__path__]
    folders += [Path(sysconfig.get_path(scheme)) / package for scheme in ("platlib", "purelib")]
    for folder in folders:
        file = folder / "lib" / FILE_NAME
        if file.is_file():
            return file
    places = ", ".join(dict.fromkeys(str(folder / "lib") for folder in folders))
    raise ImportError(f"{FILE_NAME}: not found in {places}. {_HOW_TO_BUILD}")


def load(file: Path) -> ctypes.CDLL:
    """Loads the file and gives its functions their prototypes.

    Raises:
        ImportError: it cannot be loaded, is not libhubkv, or has another ABI than this package.
    """
    try:
        library = ctypes.CDLL(str(file.resolve()))
    except OSError as error:
        raise ImportError(f"{file}: cannot be loaded ({error}). {_HOW_TO_BUILD}") from error
    try:
        version = library.hubkv_abi_version()
        if version != _abi.ABI_VERSION:
            raise ImportError(
                f"{file}: its ABI version is {version}, this package needs {_abi.ABI_VERSION}. {_HOW_TO_BUILD}"
            )
        for name, (result, arguments) in _abi.PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise ImportError(f"{file}: not a complete libhubkv ({error}). {_HOW_TO_BUILD}") from error
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """The one library of this process, loaded at the first call.

    Raises:
        ImportError: as :func:`find` and :func:`load`.
        ValueError: ``HUBKV_NUM_THREADS`` or ``HUBKV_CPU_ISA`` holds something else than it may.
    """
    loaded = load(find())
    if loaded.hubkv_check_environment():
        raise ValueError(loaded.hubkv_last_error().decode(errors="replace"))
    return loaded


def fail(status: int) -> NoReturn:
    """Raises the failure that a call on this thread just answered with.

    Raises:
        ValueError: INVALID_ARGUMENT; the message names the field and the value.
        NotImplementedError: NOT_SUPPORTED, for example a CUDA tensor where the library was not built with CUDA.
        RuntimeError: any other status.
    """
    message = library().hubkv_last_error().decode(errors="replace") or f"libhubkv answered status {status}"
    error = {_abi.INVALID_ARGUMENT: ValueError, _abi.NOT_SUPPORTED: NotImplementedError}.get(status, RuntimeError)
    raise error(message)


def call(name: str, *arguments: Any) -> None:
    """Calls a stage; raises as :func:`fail` does."""
    status = getattr(library(), name)(*arguments)
    if status:
        fail(status)


def workspace_bytes(name: str, device: int, params: ctypes.Structure) -> int:
    """What a stage's ``_workspace`` function answers."""
    size = ctypes.c_int64()
    call(name, device, params, size)
    return size.value


def version() -> str:
    """Version of libhubkv."""
    return str(library().hubkv_version().decode())


def has_cuda() -> bool:
    """Whether libhubkv holds CUDA kernels."""
    return bool(library().hubkv_has_cuda())


def cpu_isa() -> str:
    """``avx512``, ``avx2`` or ``scalar``: what the host kernels use. ``HUBKV_CPU_ISA`` lowers it."""
    return str(library().hubkv_cpu_isa().decode())


def num_threads() -> int:
    """Threads of the host kernels, the caller included. Starts as ``HUBKV_NUM_THREADS``, else the CPUs there are."""
    return int(library().hubkv_num_threads())


def set_num_threads(threads: int) -> None:
    """Sets :func:`num_threads` for calls that start later.

    Raises:
        ValueError: less than 1, or more than the library takes.
    """
    call("hubkv_set_num_threads", max(-(2**31), min(threads, 2**31 - 1)))
