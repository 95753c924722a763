# SPDX-License-Identifier: Apache-2.0
"""Memory of the device, and memory of the host that the device can read while the host goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .errors import OUT_OF_MEMORY, CudaError, call, release, runtime


class OutOfDeviceMemoryError(RuntimeError):
    """The device has less memory left than something needs; the message says how much for what."""


class DeviceMemory:
    """Memory of the current device, 256-byte aligned, not cleared. Freed when it is collected.

    Args:
        num_bytes: at least one is taken.
        purpose: what it is for; stands in the error.

    Attributes:
        address: its first byte.
        num_bytes: as asked for.

    Raises:
        OutOfDeviceMemoryError: so much is not free in one piece.
        CudaError: anything else.
    """

    def __init__(self, num_bytes: int, purpose: str) -> None:
        self.num_bytes = num_bytes
        try:
            self.address = int(call("cudaMalloc", max(num_bytes, 1)))
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free, total = memory_info()
            raise OutOfDeviceMemoryError(
                f"not enough GPU memory: {purpose} needs {gib(num_bytes)}, {gib(free)} of {gib(total)} are free"
            ) from error

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            release("cudaFree", address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As bytes, for torch; the tensor keeps this object alive."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes], no copy."""
        return torch.as_tensor(self, device="cuda")


class PinnedMemory:
    """Page-locked memory of the host. Freed when it is collected, with its arrays gone.

    Attributes:
        address: its first byte, for the host and for copies.
        array: uint8 [num_bytes].

    Raises:
        CudaError: it cannot be had.
    """

    def __init__(self, num_bytes: int) -> None:
        self.address = int(call("cudaHostAlloc", max(num_bytes, 1), 0))
        memory: Any = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.array: np.ndarray = np.frombuffer(memory, np.uint8)

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            release("cudaFreeHost", address)


def memory_info() -> tuple[int, int]:
    """Bytes of the current device that are free, and all of them."""
    free, total = call("cudaMemGetInfo")
    return int(free), int(total)


def check_room(needs: Mapping[str, int], free: int, total: int) -> None:
    """Refuses what would not fit, before anything is taken.

    Args:
        needs: bytes by purpose.
        free: bytes that are free on the device.
        total: all of its bytes.

    Raises:
        OutOfDeviceMemoryError: lists how much is needed for what.
    """
    needed = sum(needs.values())
    if needed > free:
        items = "\n".join(f"  - {purpose}: {gib(num_bytes)}" for purpose, num_bytes in needs.items())
        raise OutOfDeviceMemoryError(
            f"not enough GPU memory: {gib(needed)} are needed and {gib(free)} of {gib(total)} are free. Needed for\n"
            f"{items}"
        )


def copy(function_kind: str, target: int, source: int, num_bytes: int, stream: int) -> None:
    """Enqueues a copy between two addresses.

    Args:
        function_kind: ``HostToDevice`` (from pinned memory), ``DeviceToHost`` (to pinned memory) or ``DeviceToDevice``.
        target: address.
        source: address.
        num_bytes: how many; 0 does nothing.
        stream: its handle.
    """
    if num_bytes:
        kind = getattr(runtime().cudaMemcpyKind, f"cudaMemcpy{function_kind}")
        call("cudaMemcpyAsync", target, source, num_bytes, kind, stream)


def gib(num_bytes: int) -> str:
    """Bytes for people: ``1.25 GiB``, or MiB below a tenth of it."""
    if num_bytes < 1 << 27:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
