# SPDX-License-Identifier: Apache-2.0
"""Streams and events."""

from __future__ import annotations

from typing import Any

from .errors import call, release

NON_BLOCKING = 1  # cudaStreamNonBlocking: the legacy default stream of other libraries is not waited for
NO_TIMING = 2  # cudaEventDisableTiming


class Stream:
    """A stream of the current device.

    Attributes:
        handle: the ``cudaStream_t`` as a number.
    """

    def __init__(self) -> None:
        self._stream: Any = call("cudaStreamCreateWithFlags", NON_BLOCKING)
        self.handle = int(self._stream)

    def synchronize(self) -> None:
        """The host waits until all that was enqueued is done. Raises ``CudaError`` where some of it failed."""
        call("cudaStreamSynchronize", self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            release("cudaStreamDestroy", self.handle)


class Event:
    """A mark in a stream."""

    def __init__(self) -> None:
        self._event: Any = call("cudaEventCreateWithFlags", NO_TIMING)

    def record(self, stream: Stream) -> None:
        """Marks what was enqueued so far."""
        call("cudaEventRecord", self._event, stream.handle)

    def synchronize(self) -> None:
        """The host waits for the last mark; at once where there is none."""
        call("cudaEventSynchronize", self._event)

    def __del__(self) -> None:
        if getattr(self, "_event", None) is not None:
            release("cudaEventDestroy", self._event)
