# SPDX-License-Identifier: Apache-2.0
"""Many tensors into one piece of device memory: read from a mapped file, through page-locked buffers, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .memory import DeviceMemory, PinnedMemory, copy
from .stream import Event, Stream

ALIGNMENT = 256  # bytes: what TensorRT asks of an address
PIECE_BYTES = 32 << 20


def layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where things of these sizes lie behind each other, each at a multiple of 256 bytes.

    Args:
        sizes: bytes by name.

    Returns:
        byte offset by name, and the bytes of the whole, a multiple of 256.
    """
    offsets, end = {}, 0
    for name, num_bytes in sizes.items():
        offsets[name] = end
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n], the bytes of a dense tensor; no copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def pieces(sizes: Mapping[str, int], most: int) -> Iterator[tuple[int, list[tuple[str, int, int, int]]]]:
    """Cuts the memory that ``layout`` describes into pieces that are copied at once.

    Args:
        sizes: bytes by name.
        most: bytes of a piece, a multiple of 256.

    Yields:
        the first byte of a piece in the memory, and its parts: name, first byte in the thing, first byte in the piece,
        bytes. All but the padding is in exactly one part, and the parts of a piece lie in ascending order.
    """
    offsets, end = layout(sizes)
    things = [(name, offsets[name], sizes[name]) for name in sizes if sizes[name]]
    first = 0
    for start in range(0, end, most):
        parts = []
        while first < len(things) and things[first][1] + things[first][2] <= start:
            first += 1
        for name, offset, num_bytes in things[first:]:
            if offset >= start + most:
                break
            low, high = max(offset, start), min(offset + num_bytes, start + most)
            if high > low:
                parts.append((name, low - offset, low - start, high - low))
        if parts:
            yield start, parts


def stream_through(
    tensors: Mapping[str, torch.Tensor],
    buffers: list[np.ndarray],
    wait: Callable[[int], None],
    send: Callable[[int, int, int], None],
) -> None:
    """Fills the buffers in turn with pieces of the tensors and sends them.

    Args:
        tensors: on the host, dense.
        buffers: uint8, all of one size, a multiple of 256.
        wait: (buffer): returns when what was sent from it has arrived.
        send: (buffer, first byte in the target, bytes): begins to send the buffer's first bytes.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    targets = [torch.from_numpy(buffer) for buffer in buffers]
    current, source = "", torch.empty(0, dtype=torch.uint8)
    for count, (start, parts) in enumerate(pieces(sizes, len(buffers[0]))):
        index = count % len(buffers)
        wait(index)
        for name, low, at, num_bytes in parts:
            if name != current:
                current, source = name, as_bytes(tensors[name])
            targets[index][at : at + num_bytes].copy_(source[low : low + num_bytes])
        send(index, start, parts[-1][2] + parts[-1][3])


def upload(tensors: Mapping[str, torch.Tensor], purpose: str, stream: Stream) -> tuple[DeviceMemory, dict[str, int]]:
    """Copies tensors to the device, once; done when this returns.

    Args:
        tensors: on the host.
        purpose: what they are, for errors.
        stream: where the copies are enqueued.

    Returns:
        the memory, and the address of each tensor.

    Raises:
        OutOfDeviceMemoryError: they do not fit.
    """
    offsets, total = layout({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
    memory = DeviceMemory(total, purpose)
    size = min(PIECE_BYTES, max(total, ALIGNMENT))
    staging: list[Any] = [PinnedMemory(size) for _ in range(2)]
    sent = [Event() for _ in staging]

    def send(index: int, start: int, num_bytes: int) -> None:
        copy("HostToDevice", memory.address + start, staging[index].address, num_bytes, stream.handle)
        sent[index].record(stream)

    stream_through(tensors, [s.array for s in staging], lambda index: sent[index].synchronize(), send)
    stream.synchronize()
    return memory, {name: memory.address + offset for name, offset in offsets.items()}
