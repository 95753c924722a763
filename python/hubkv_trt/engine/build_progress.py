# SPDX-License-Identifier: Apache-2.0
"""TensorRT's progress as bars, and Ctrl-C while it builds."""

from __future__ import annotations

import signal
import threading
from typing import Any

from tqdm import tqdm


class BuildProgress:
    """The phases of one build; TensorRT may report them from several threads. A context manager, which ends the bars.

    Args:
        title: what is built.
        show: bars on stderr.

    Attributes:
        interrupted: Ctrl-C was pressed. An exception would be lost in TensorRT's callbacks: while the context is open
            the signal only leaves this mark, and the build is asked to end.
    """

    def __init__(self, title: str, show: bool) -> None:
        self.interrupted = False
        self._title = title
        self._show = show
        self._bars: dict[str, tqdm[Any]] = {}
        self._lock = threading.Lock()
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> BuildProgress:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._interrupt)
        return self

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for phase in list(self._bars):
            self.finish(phase)

    def start(self, phase: str, steps: int) -> None:
        """A phase of so many steps begins."""
        with self._lock:
            text = f"{self._title}: {phase}"
            self._bars[phase] = tqdm(total=steps, desc=text, unit="step", delay=1, leave=False, disable=not self._show)

    def step(self, phase: str, done: int) -> bool:
        """Step number ``done`` of a phase, from 0 on, is over; whether the build shall go on."""
        with self._lock:
            if (bar := self._bars.get(phase)) is not None:
                bar.update(done + 1 - bar.n)
        return not self.interrupted

    def finish(self, phase: str) -> None:
        """A phase is over."""
        with self._lock:
            if (bar := self._bars.pop(phase, None)) is not None:
                bar.close()


def make_monitor(trt: Any, progress: BuildProgress) -> Any:
    """An ``IProgressMonitor`` that reports to ``progress``; keep it until the build is over.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        progress: of this build.
    """

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
