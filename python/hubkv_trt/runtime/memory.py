# SPDX-License-Identifier: Apache-2.0
"""What this process holds of the machine's memory, read from the kernel (Linux; 0 where it does not say)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (``/proc/self/statm``)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def peak_bytes() -> int:
    """The most bytes that this process ever had in memory (``VmHWM``)."""
    return _kib("/proc/self/status", "VmHWM:") * 1024


def available_bytes() -> int:
    """Bytes that a new allocation can take without swapping, within the limits of the control group."""
    free = _kib("/proc/meminfo", "MemAvailable:") * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            room = int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text())
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
        free = max(0, min(free, room))
    return free


def trim_heap() -> None:
    """Gives freed heap memory back to the system, where the C library can (glibc's ``malloc_trim``)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _kib(path: str, key: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)


try:
    _malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
except (OSError, TypeError):  # no C library to open by that name
    _malloc_trim = None
