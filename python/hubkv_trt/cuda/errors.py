# SPDX-License-Identifier: Apache-2.0
"""Calls of the CUDA runtime that raise where CUDA returns a code."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed.

    Attributes:
        function: the call, ``cudaMalloc``.
        code: its ``cudaError_t`` as a number.
    """

    def __init__(self, function: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{function}: {name} ({code}): {text}")
        self.function = function
        self.code = code


@functools.cache
def runtime() -> Any:
    """The module ``cuda.bindings.runtime``.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from cuda.bindings import runtime as module
    except ImportError as error:
        raise ImportError(
            f"cuda.bindings.runtime cannot be imported ({error}): pip install 'hubkv-trt[tensorrt]'"
        ) from None
    return module


def call(function: str, *arguments: Any) -> Any:
    """What the function of the CUDA runtime gives beside its status: nothing, a value, or a tuple of values.

    Raises:
        CudaError: the status is not ``cudaSuccess``.
        ImportError: see ``runtime``.
    """
    status, *values = getattr(runtime(), function)(*arguments)
    if int(status) != 0:
        name, text = (_text(describe, status) for describe in ("cudaGetErrorName", "cudaGetErrorString"))
        raise CudaError(function, int(status), name, text)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def release(function: str, handle: Any) -> None:
    """Frees something in a ``__del__``; at the end of the process, when the driver may be gone, it may also fail."""
    with contextlib.suppress(CudaError, ImportError, TypeError):
        call(function, handle)


def _text(describe: str, status: Any) -> str:
    _, text = getattr(runtime(), describe)(status)
    return str(text.decode() if isinstance(text, bytes) else text)
