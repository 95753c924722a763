# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: what was enqueued once is launched again as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .errors import CudaError, call, release, runtime
from .stream import Stream


class Graph:
    """What ``enqueue`` puts on the stream, recorded and not run.

    The recording is relaxed: other calls of CUDA may be made meanwhile, by this thread (a lazily loaded kernel) or
    others. Whatever runs for the first time must have run once before, outside of a graph.

    Args:
        stream: where ``enqueue`` works.
        enqueue: enqueues work at fixed addresses; must not wait for any.

    Raises:
        CudaError: something that was enqueued cannot be recorded; the stream can be used again.
    """

    def __init__(self, stream: Stream, enqueue: Callable[[], None]) -> None:
        self._executable: Any = None
        call("cudaStreamBeginCapture", stream.handle, runtime().cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(CudaError):  # what broke it is raised
                call("cudaGraphDestroy", call("cudaStreamEndCapture", stream.handle))
            raise
        graph = call("cudaStreamEndCapture", stream.handle)
        try:
            self._executable = call("cudaGraphInstantiate", graph, 0)
        finally:
            call("cudaGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        """Enqueues all of it again."""
        call("cudaGraphLaunch", self._executable, stream.handle)

    def __del__(self) -> None:
        if getattr(self, "_executable", None) is not None:
            release("cudaGraphExecDestroy", self._executable)
