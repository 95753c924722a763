# SPDX-License-Identifier: Apache-2.0
"""Memory as TensorRT gives it to plugins."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import numpy as np


class Memory:
    """So many bytes of malloc's, aligned as TensorRT's are: AddressSanitizer sees each access before or after them."""

    ALIGNMENT = 256

    def __init__(self, size: int) -> None:
        self._libc = ctypes.CDLL(None)
        self._start = c_void_p()
        if self._libc.posix_memalign(ctypes.byref(self._start), ctypes.c_size_t(self.ALIGNMENT), ctypes.c_size_t(size)):
            raise MemoryError(size)
        self.address = int(self._start.value or 0)
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self.address), np.uint8)
        self.bytes[:] = 0xFF

    def __del__(self) -> None:
        self._libc.free(self._start)
