# SPDX-License-Identifier: Apache-2.0
"""The thread of a service: takes what came in, steps the engine, hands out what it gave."""

from __future__ import annotations

import logging
import time

from .llm import LLM
from .scheduler import Policy
from .sequence import Sequence, Status
from .service_counters import Counters
from .service_desk import Desk
from .service_errors import ServiceClosedError
from .service_job import Job
from .stream import Increment
from .ticket import Ticket

LOGGER = logging.getLogger(__name__)


class Loop:
    """Runs requests until the service is closed; then everything ends and all memory comes back.

    Args:
        llm: the engine; nobody else steps it.
        desk: where requests come from.
        counters: of the service.
    """

    def __init__(self, llm: LLM, desk: Desk, counters: Counters) -> None:
        self._llm = llm
        self._scheduler = llm._scheduler
        self._requests = llm._requests
        self._desk = desk
        self._counters = counters
        self._jobs: dict[Ticket, Job] = {}  # requests that have not ended
        self._outbox: list[tuple[Ticket, Increment]] = []

    def run(self) -> None:
        """Until the service is closed or fails."""
        try:
            while self._turn():
                pass
        except BaseException as error:
            LOGGER.exception("the service has failed")
            self._desk.failure = error
        self._shut()

    def _turn(self) -> bool:
        """What came in, one step of the engine, what it gave; False when the service is to end."""
        desk = self._desk
        with desk.wake:
            desk.wake.wait_for(lambda: desk.to_do or self._jobs)
            if desk.closing:
                return False
            arrived, desk.inbox = desk.inbox, []
            cancelled, desk.cancelled = desk.cancelled, []
            for job in arrived:
                self._jobs[job.ticket] = job
                if job.entry is not None and job.entry.document.status is Status.NEW:
                    self._scheduler.add(job.entry.document)
        for job in arrived:
            if job.sequence is not None:
                self._scheduler.add(job.sequence)
        self._end_some(cancelled)
        self._ask()
        phase, sequences = self._llm.step()
        self._counters.step(phase, sequences)
        self._ask()
        self._deliver()
        self._publish()
        self._send()
        return True

    def _end_some(self, cancelled: list[Ticket]) -> None:
        """Ends requests that were cancelled or are late, and documents that nobody waits for."""
        now = time.perf_counter()
        for ticket in cancelled:
            if ticket in self._jobs:
                self._end(self._jobs[ticket], "aborted")
        for job in [j for j in self._jobs.values() if j.deadline < now]:
            self._end(job, "deadline")
        with self._desk.wake:
            for entry in self._desk.contexts.all():
                if entry.users == 0 and not entry.document.finished:
                    self._scheduler.finish(entry.document, "aborted")
                    self._desk.contexts.release(entry)

    def _end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        if job.sequence is not None:
            self._scheduler.finish(job.sequence, reason, error)
        self._give(job, job.last(reason, error))

    def _ask(self) -> None:
        """Requests over contexts that are there now become questions; those over failed ones fail."""
        for job in [j for j in self._jobs.values() if j.entry is not None and j.sequence is None]:
            entry = job.entry
            assert entry is not None
            document = entry.document
            if not document.finished:
                continue
            if entry.context is None:
                entry.context, document.compressed = document.compressed, None
                if entry.context is not None:
                    entry.context.ending = entry.ending
            if entry.context is None:
                with self._desk.wake:
                    self._desk.contexts.release(entry)
                self._end(job, document.finish_reason, document.error)
            elif job.question_ids is None:
                job.stats = entry.context.stats
                self._end(job, "stop")
            else:
                try:
                    request = job.ticket.request
                    question = self._requests.question(job.question_ids, request.params, entry.context, request.stream)
                    self._scheduler.add(job.start(question))
                except ValueError as error:
                    self._end(job, "error", error)

    def _deliver(self) -> None:
        for job in list(self._jobs.values()):
            if job.sequence is not None:
                self._counters.tokens(job)
                increment = job.take()
                if increment is not None:
                    self._give(job, increment)

    def _give(self, job: Job, increment: Increment) -> None:
        """Puts an increment into the outbox; with the last one the request is forgotten."""
        self._outbox.append((job.ticket, increment))
        if increment.output is not None:
            del self._jobs[job.ticket]
            self._counters.finished(increment.output.finish_reason)
            if job.entry is not None:
                with self._desk.wake:
                    self._desk.contexts.leave(job.entry)

    def _send(self) -> None:
        """Hands the increments over. Whoever has a result finds it counted."""
        outbox, self._outbox = self._outbox, []
        for ticket, increment in outbox:
            try:
                ticket.give(increment)
            except Exception as error:  # the client's own; its request is the only one that ends
                LOGGER.warning("a callback raised %r: its request is cancelled", error)
                self._desk.cancel(ticket)

    def _publish(self) -> None:
        desk = self._desk
        with desk.wake:
            desk.contexts.settle()
            desk.unstarted = len(desk.inbox) + sum(job.waiting for job in self._jobs.values())
            desk.metrics = self._counters.read(self._scheduler.running, desk.contexts, desk.unstarted)

    def make_room(self, sequence: Sequence) -> bool:
        """As ``Policy.make_room``."""
        with self._desk.wake:
            return self._desk.contexts.make_room(sequence)

    def expecting(self) -> bool:
        """As ``Policy.expecting``: questions hold their contexts from ``submit`` on."""
        with self._desk.wake:
            return bool(self._desk.inbox)

    def _shut(self) -> None:
        """Everything ends; all memory comes back."""
        desk = self._desk
        with desk.wake:
            desk.closing = True
            for job in desk.inbox:
                self._jobs[job.ticket] = job
            desk.inbox.clear()
        error = None if desk.failure is None else ServiceClosedError(f"the service has failed: {desk.failure}")
        for job in list(self._jobs.values()):
            self._end(job, "aborted" if error is None else "error", error)
        with desk.wake:
            for entry in desk.contexts.all():
                self._scheduler.finish(entry.document, "aborted")
                desk.contexts.release(entry)
        self._scheduler.policy = Policy()
        self._publish()
        self._send()
