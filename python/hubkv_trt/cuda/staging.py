# SPDX-License-Identifier: Apache-2.0
"""Page-locked buffers in turn: the host fills one while the device may still read the other."""

from __future__ import annotations

import numpy as np

from .memory import PinnedMemory
from .stream import Event, Stream


class Staging:
    """Two buffers of equal size."""

    def __init__(self, num_bytes: int) -> None:
        self._buffers = [PinnedMemory(num_bytes) for _ in range(2)]
        self._done = [Event() for _ in self._buffers]
        self._next = 0

    def take(self) -> StagingBuffer:
        """The buffer whose turn it is, when the device is done with it."""
        index, self._next = self._next, 1 - self._next
        self._done[index].synchronize()
        return StagingBuffer(self._buffers[index], self._done[index])


class StagingBuffer:
    """A buffer until its next turn.

    Attributes:
        address: its first byte.
        array: uint8 [num_bytes].
    """

    def __init__(self, memory: PinnedMemory, done: Event) -> None:
        self.address = memory.address
        self.array: np.ndarray = memory.array
        self._memory = memory
        self._done = done

    def enqueued(self, stream: Stream) -> None:
        """All copies from and to the buffer have been enqueued."""
        self._done.record(stream)

    def wait(self) -> None:
        """The host waits for those copies."""
        self._done.synchronize()
