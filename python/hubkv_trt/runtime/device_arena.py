# SPDX-License-Identifier: Apache-2.0
"""The arena of a cache in the memory of a GPU."""

from __future__ import annotations

from ..cuda.errors import call
from ..cuda.memory import DeviceMemory
from .arena import Arena


class DeviceArena(Arena):
    """One allocation on the current device, zeroed. ``tensor`` is uint8 [bytes] on it.

    Raises:
        OutOfDeviceMemoryError: so much is not free.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = DeviceMemory(num_bytes, "the KV cache")
        call("cudaMemset", self._memory.address, 0, num_bytes)
        call("cudaDeviceSynchronize")  # whatever stream writes there next
        self.tensor = self._memory.tensor()

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Nothing: the device's memory stays with the cache."""
