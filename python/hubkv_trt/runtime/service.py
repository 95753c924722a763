# SPDX-License-Identifier: Apache-2.0
"""Many clients, one engine: requests join and leave its batch between steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from ..config import require
from .llm import LLM
from .metrics import Metrics
from .sequence import Sequence
from .stream import Increment, TextStream
from .ticket import ServiceRequest, Ticket


class QueueFullError(RuntimeError):
    """The service has as many waiting requests as it takes; ask again later."""


class ServiceClosedError(RuntimeError):
    """The service was closed, or its loop has failed."""


class UnknownContextError(ValueError):
    """No context has that id: it was never made, was released, or made room for others. Send its document again."""


class Service:
    """A thread of its own steps one ``LLM`` for requests from any number of threads.

    From now on the LLM belongs to the service: its own methods must not be called until ``close``.

    Args:
        llm: the engine.
        max_waiting: requests that may wait; more are refused.
        prefill_tokens_per_step: of prompts, between two decode steps on average: after a prompt
            of T tokens the running sequences get ceil(T / this) steps before the next prompt.
        aging_seconds: what one level of priority is worth in waiting time.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 256,
        prefill_tokens_per_step: int = 512,
        aging_seconds: float = 10.0,
    ) -> None:
        for name, value in (
            ("max_waiting", max_waiting),
            ("prefill_tokens_per_step", prefill_tokens_per_step),
            ("aging_seconds", aging_seconds),
        ):
            require(value > 0, name, value, "greater than 0")
        self._llm = llm
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._inbox: list[tuple[Ticket, Sequence]] = []
        self._cancelled: list[Ticket] = []
        self._closing = False
        self._live: dict[Ticket, tuple[Sequence, TextStream]] = {}
        self._metrics = Metrics(arena_bytes_total=llm.cache.num_bytes)
        self._thread = threading.Thread(target=self._loop, name="hubkv-service", daemon=True)
        self._thread.start()

    # -- for clients, from any thread

    def submit(self, request: ServiceRequest, on_increment: Callable[[Increment], None] | None = None) -> Ticket:
        """Takes a request; returns at once.

        Args:
            request: what is wanted.
            on_increment: called in the service's thread with every increment (it must return soon; if it raises, the
                request is cancelled). None: iterate the ticket.

        Raises:
            ValueError: the request is refused; names the field.
            UnknownContextError: a question over a context that is not there.
            QueueFullError: too many requests wait.
            ServiceClosedError: after ``close``.
        """
        self._check_open()
        ticket = Ticket(request, self.cancel, on_increment)
        (sequence,) = self._llm._requests.generation(
            [request.prompt], request.params, request.ratio, None, request.chat, request.stream
        )
        with self._wake:
            self._check_open()
            if len(self._inbox) >= self._max_waiting:
                self._metrics.refused += 1
                raise QueueFullError(f"queue full: {self._max_waiting} requests wait; ask again later")
            self._inbox.append((ticket, sequence))
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request in any state; its memory is back when the step that runs now has ended."""
        with self._wake:
            self._cancelled.append(ticket)
            self._wake.notify()

    def has_context(self, context_id: str) -> bool:
        """Whether questions over the context are taken now (it is kept, or is being compressed)."""
        return False

    def release_context(self, context_id: str) -> bool:
        """Forgets a context; questions under way finish, then its memory is back. Whether it was known."""
        return False

    def metrics(self) -> Metrics:
        """A copy of the counters as they were after the last step."""
        with self._wake:
            return copy.deepcopy(self._metrics)

    def close(self) -> None:
        """Ends all requests (``aborted``), gives all memory back and stops the thread. A second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closing:
            raise ServiceClosedError("the service is closed")

    # -- the loop, in the service's thread

    def _loop(self) -> None:
        scheduler = self._llm._scheduler
        while True:
            with self._wake:
                while not (self._inbox or self._cancelled or self._closing or self._live):
                    self._wake.wait()
                arrived, self._inbox = self._inbox, []
                cancelled, self._cancelled = self._cancelled, []
                closing = self._closing
            for ticket, sequence in arrived:
                self._live[ticket] = (sequence, TextStream(sequence))
                scheduler.add(sequence)
            for ticket in list(self._live) if closing else cancelled:
                if ticket in self._live:
                    scheduler.finish(self._live[ticket][0], "aborted")
            if not closing:
                self._llm.step()
            self._deliver()
            if closing:
                return

    def _deliver(self) -> None:
        for ticket, (sequence, stream) in list(self._live.items()):
            increment = stream.take()
            if sequence.finished:
                del self._live[ticket]
            if increment is not None and (ticket.request.stream or increment.output is not None):
                ticket.give(increment)
