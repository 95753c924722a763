# SPDX-License-Identifier: Apache-2.0
"""Between Triton and the service: a thread that sends responses, asks which clients have gone, publishes counters.

The service's thread, which runs the engine, only puts increments into a queue.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..runtime.cache import CacheFullError
from ..runtime.service import QueueFullError, Service, ServiceClosedError, UnknownContextError
from ..runtime.stream import Increment
from ..runtime.ticket import Ticket
from .translate import Query, answer, client_message, released

POLL_SECONDS = 0.1  # between two questions whether a client has gone: each is a message to the server's process
PUBLISH_SECONDS = 0.25  # between two looks at the service's counters

_CODES: dict[type[Exception], str] = {
    UnknownContextError: "NOT_FOUND",
    QueueFullError: "UNAVAILABLE",
    ServiceClosedError: "UNAVAILABLE",
    CacheFullError: "UNAVAILABLE",
}


class Sender(Protocol):
    """A request's way back to its client. Any thread may use it."""

    def send(self, tensors: dict[str, np.ndarray], final: bool) -> None:
        """A response; nothing follows the final one."""

    def fail(self, code: str, message: str) -> None:
        """The final response, an error. ``code``: a name in Triton's ``TritonError``."""

    def gone(self) -> bool:
        """Whether the client has cancelled or left."""


class _Call:
    def __init__(self, sender: Sender, query: Query) -> None:
        self.sender = sender
        self.query = query
        self.prefix = query.prefix  # until the first response
        self.ticket: Ticket | None = None  # until submit has returned
        self.cancelled = False


class Responder:
    """Answers the requests of one model.

    Args:
        service: where they run.
        publish: called every ``PUBLISH_SECONDS``, and once more when all is over.
    """

    def __init__(self, service: Service, publish: Callable[[], None]) -> None:
        self._service = service
        self._publish = publish
        self._queue: queue.SimpleQueue[tuple[_Call, Increment] | None] = queue.SimpleQueue()
        self._live: set[_Call] = set()
        self._lock = threading.Lock()  # of _live
        self._thread = threading.Thread(target=self._loop, name="hubkv-responder", daemon=True)
        self._thread.start()

    def accept(self, sender: Sender, query: Query) -> None:
        """Takes a request; whatever becomes of it, its sender is told."""
        if query.request is None:
            assert query.release is not None
            sender.send(released(self._service.release_context(query.release)), final=True)
            return
        call = _Call(sender, query)
        with self._lock:
            self._live.add(call)
        try:
            call.ticket = self._service.submit(query.request, lambda increment: self._queue.put((call, increment)))
        except Exception as error:
            self._forget(call)
            refuse(sender, error, query.prompt_name)

    def close(self) -> None:
        """Waits until everything that the service gave has been sent. Close the service first."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        polled = published = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=POLL_SECONDS)
                if item is None:
                    break
                self._respond(*item)
            except queue.Empty:
                pass
            except Exception:  # of one request; the others go on
                traceback.print_exc()
            now = time.monotonic()
            if now - polled >= POLL_SECONDS:
                polled = now
                self._cancel_left()
            if now - published >= PUBLISH_SECONDS:
                published = now
                self._publish()
        self._publish()

    def _respond(self, call: _Call, increment: Increment) -> None:
        output, sender = increment.output, call.sender
        if output is None:
            sender.send(answer(call.prefix + increment.text, increment), final=False)
            call.prefix = ""
            return
        self._forget(call)
        if output.error is not None:
            sender.fail(
                _CODES.get(type(output.error), "INTERNAL"), client_message(output.error, call.query.prompt_name)
            )
        elif output.finish_reason == "aborted":
            sender.fail(*(("CANCELLED", "cancelled") if call.cancelled else ("UNAVAILABLE", "the model is unloaded")))
        else:
            sender.send(answer(call.prefix + increment.text, increment), final=True)

    def _cancel_left(self) -> None:
        with self._lock:
            live = [call for call in self._live if call.ticket is not None and not call.cancelled]
        for call in live:
            if call.sender.gone():
                call.cancelled = True
                assert call.ticket is not None
                call.ticket.cancel()

    def _forget(self, call: _Call) -> None:
        with self._lock:
            self._live.discard(call)


def refuse(sender: Sender, error: Exception, prompt_name: str = "text_input") -> None:
    """Answers a request that was not taken; ``prompt_name`` as ``Query`` has it."""
    default = "INVALID_ARG" if isinstance(error, ValueError) else "INTERNAL"
    sender.fail(_CODES.get(type(error), default), client_message(error, prompt_name))
