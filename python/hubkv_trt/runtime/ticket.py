# SPDX-License-Identifier: Apache-2.0
"""What a service is asked, and what its client holds of a request that is under way."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..config import require
from .prompts import Prompt
from .sampler import SamplingParams
from .sequence import RequestOutput
from .stream import Increment


@dataclass(frozen=True)
class ServiceRequest:
    """One request of a service.

    Three kinds: a ``prompt``; a ``document`` with a ``context_id``, which is compressed and kept under that id (its
    output has no text; where the id is known already nothing is done); and a ``prompt`` with a ``context_id``, a
    question over that context. With all three, the document is compressed unless the id is known, then the question is
    asked.

    Attributes:
        prompt: a text, token ids or chat messages; None where a document is only compressed.
        params: how tokens are chosen.
        ratio: compression ratio r in [0, 1) of the prompt or the document; None is the engine's.
        chat: makes a prompt or document that is a text the user's turn of a chat (``LLM.generate``, ``LLM.compress``).
        context_id: names a context of the service.
        document: see above; arguments as ``LLM.compress`` has them.
        stream: increments are wanted while tokens are generated; else there is one, with the output.
        priority: a request of priority p goes before those of priority p - 1 that came less than the service's
            ``aging_seconds`` before it.
        deadline_seconds: counted from ``Service.submit``; the request then ends with ``finish_reason`` ``deadline`` and
            what it has. None: no deadline.
    """

    prompt: Prompt | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    ratio: float | None = None
    chat: bool = False
    context_id: str | None = None
    document: Prompt | None = None
    stream: bool = True
    priority: int = 0
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        has_id = self.context_id is not None
        require(not has_id or bool(self.context_id), "context_id", self.context_id, "a text that is not empty")
        require(self.document is None or has_id, "document", self.document, "None without a context_id")
        require(self.prompt is not None or self.document is not None, "prompt", self.prompt, "a text or token ids")
        require(isinstance(self.params, SamplingParams), "params", self.params, "a SamplingParams")
        if has_id and self.document is None:
            require(
                self.ratio is None, "ratio", self.ratio, "None for a question: the ratio was given with the document"
            )
            require(not self.chat, "chat", self.chat, "False for a question: chat is given with the document")
        require(type(self.priority) is int, "priority", self.priority, "an integer")
        seconds = self.deadline_seconds
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and math.isfinite(seconds)
        require(seconds is None or (number and seconds > 0), "deadline_seconds", seconds, "a number > 0 or None")


class Ticket:
    """A request that a service took. Any thread may use it.

    Iterating gives ``Increment`` after ``Increment``, the last one with the output, for requests without a callback;
    errors do not raise there but stand in ``output.error``. Made by ``Service.submit``.

    Attributes:
        request: as submitted.
    """

    def __init__(
        self,
        request: ServiceRequest,
        cancel: Callable[[Ticket], None],
        on_increment: Callable[[Increment], None] | None = None,
    ) -> None:
        self.request = request
        self._cancel = cancel
        self._on_increment = on_increment
        self._increments: queue.SimpleQueue[Increment] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._output: RequestOutput | None = None

    def __iter__(self) -> Iterator[Increment]:
        while True:
            increment = self._increments.get()
            if increment.output is not None:
                self._increments.put(increment)  # whoever iterates again sees the end at once
                yield increment
                return
            yield increment

    @property
    def done(self) -> bool:
        """Whether the output is there; the request holds no memory any more."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the output.

        Raises:
            TimeoutError: it is not there after that many seconds; the request goes on.
            Exception: the request's own error, with ``finish_reason`` ``error``.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"no output after {timeout} s")
        assert self._output is not None
        if self._output.error is not None:
            raise self._output.error
        return self._output

    def cancel(self) -> None:
        """Ends the request in whatever state, with ``finish_reason`` ``aborted``. Does nothing to a finished one."""
        self._cancel(self)

    def give(self, increment: Increment) -> None:
        """For the service: hands an increment over.

        Raises:
            Exception: whatever the callback raises.
        """
        if increment.output is not None:
            self._output = increment.output
        try:
            if self._on_increment is not None:
                self._on_increment(increment)
            else:
                self._increments.put(increment)
        finally:
            if increment.output is not None:
                self._finished.set()
