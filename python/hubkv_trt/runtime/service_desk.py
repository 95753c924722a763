# SPDX-License-Identifier: Apache-2.0
"""Where the clients of a service and its loop meet."""

from __future__ import annotations

import threading

from .metrics import Metrics
from .service_contexts import Contexts
from .service_job import Job
from .ticket import Ticket


class Desk:
    """What clients leave and find, from any thread. Whoever touches it holds ``wake``.

    Args:
        contexts: of the service.
        metrics: before the first step.

    Attributes:
        wake: the lock; notified when the loop has something to do.
        inbox: requests that the loop has not seen.
        cancelled: tickets that are to end.
        unstarted: requests that wait, those in the inbox too.
        refused: requests that found the queue full.
        closing: nothing is taken any more.
        failure: what ended the loop.
    """

    def __init__(self, contexts: Contexts, metrics: Metrics) -> None:
        self.wake = threading.Condition()
        self.contexts = contexts
        self.metrics = metrics
        self.inbox: list[Job] = []
        self.cancelled: list[Ticket] = []
        self.unstarted = 0
        self.refused = 0
        self.closing = False
        self.failure: BaseException | None = None

    @property
    def to_do(self) -> bool:
        """Whether the loop has anything to do here."""
        return bool(self.inbox or self.cancelled or self.closing or self.contexts.to_settle)

    def cancel(self, ticket: Ticket) -> None:
        """The loop shall end it. Takes the lock itself."""
        with self.wake:
            self.cancelled.append(ticket)
            self.wake.notify()
