# SPDX-License-Identifier: Apache-2.0
"""The one block of memory that holds a cache, and the list of its free parts."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import sys

import torch

ALIGNMENT = 256  # bytes: every slice of the arena begins at a multiple and is padded to one


def align(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Zeroed anonymous memory that the system commits page by page, when a page is first written.

    Huge pages are asked for (Linux): rows are then read about twice as fast, and memory is committed 2 MiB at a time.

    Attributes:
        tensor: uint8 [bytes], over the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = None
        if sys.platform == "linux":
            noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.11 on
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
            self._map = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        else:
            self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)

    def view(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The memory from byte ``offset`` on as a tensor; no copy."""
        count = 1
        for size in shape:
            count *= size
        return self.tensor[offset : offset + count * dtype.itemsize].view(dtype).view(*shape)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Returns the whole system pages inside the range to the system; they read as zeros afterwards."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class FreeList:
    """The free ranges of ``[start, start + num_bytes)``: best fit, neighbours joined when a range comes back."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self._starts = [start] if num_bytes else []
        self._sizes = [num_bytes] if num_bytes else []

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range: what can be taken in one piece."""
        return max(self._sizes, default=0)

    def ranges(self) -> list[tuple[int, int]]:
        """(start, bytes) of every free range, ascending."""
        return list(zip(self._starts, self._sizes, strict=True))

    def take(self, num_bytes: int) -> int | None:
        """The start of ``num_bytes`` bytes from the smallest range that holds them (the lowest of those), or None."""
        fits = [(size, i) for i, size in enumerate(self._sizes) if size >= num_bytes]
        if not fits:
            return None
        _, i = min(fits)
        start = self._starts[i]
        if self._sizes[i] == num_bytes:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += num_bytes
            self._sizes[i] -= num_bytes
        return start

    def put(self, start: int, num_bytes: int) -> None:
        """Takes a range back.

        Raises:
            RuntimeError: a part of it is free already.
        """
        i = bisect.bisect_left(self._starts, start)
        before = self._starts[i - 1] + self._sizes[i - 1] if i > 0 else None
        after = self._starts[i] if i < len(self._starts) else None
        if (before is not None and before > start) or (after is not None and start + num_bytes > after):
            raise RuntimeError(f"bytes {start}..{start + num_bytes} of the arena were freed twice")
        self._starts.insert(i, start)
        self._sizes.insert(i, num_bytes)
        if after == start + num_bytes:
            self._sizes[i] += self._sizes.pop(i + 1)
            del self._starts[i + 1]
        if before == start:
            self._sizes[i - 1] += self._sizes.pop(i)
            del self._starts[i]
