# SPDX-License-Identifier: Apache-2.0
"""Many clients, one engine: requests join and leave its batch between steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..config import require
from .llm import LLM
from .metrics import Metrics
from .scheduler import Policy
from .sequence import Sequence, Status
from .service_contexts import Contexts, Entry
from .service_counters import Counters
from .service_job import Job
from .stream import Increment
from .ticket import ServiceRequest, Ticket

LOGGER = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """The service has as many waiting requests as it takes; ask again later."""


class ServiceClosedError(RuntimeError):
    """The service was closed, or its loop has failed."""


class UnknownContextError(ValueError):
    """No context has that id: it was never made, was released, or made room for others. Send its document again."""


class Service:
    """A thread of its own steps one ``LLM`` for requests from any number of threads.

    Until ``close`` the LLM belongs to the service: its own methods must not be called.

    A request starts when all the cache that it can come to need is reserved, in the order of arrival (and priority);
    none overtakes the first that has no room. What a request gives does not depend on what runs beside it, as far as
    the executor keeps the rows of a batch apart (docs/serving.md).

    Args:
        llm: the engine. No request of its own is under way.
        max_waiting: requests that may wait; more are refused.
        prefill_tokens_per_step: tokens of prompts and questions that may run between two decode steps
            (``Policy.prefill_tokens_per_step``).
        aging_seconds: what one level of priority is worth in waiting time; a low priority waits, but never for ever.

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
        require(max_waiting >= 1, "max_waiting", max_waiting, "at least 1")
        require(prefill_tokens_per_step >= 1, "prefill_tokens_per_step", prefill_tokens_per_step, "at least 1")
        require(aging_seconds > 0, "aging_seconds", aging_seconds, "greater than 0")
        self._llm = llm
        self._scheduler = llm._scheduler
        self._requests = llm._requests
        self._max_waiting = max_waiting
        self._aging_seconds = aging_seconds
        self._wake = threading.Condition()
        # guarded by _wake
        self._inbox: list[Job] = []
        self._cancelled: list[Ticket] = []
        self._unstarted = 0  # requests that wait, those in the inbox too
        self._refused = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._counters = Counters(llm.cache)
        self._contexts = Contexts(llm.cache, self._counters.evicted)
        self._metrics = self._counters.read([], self._contexts, 0)
        # of the loop's thread
        self._jobs: dict[Ticket, Job] = {}  # requests that have not ended
        self._outbox: list[tuple[Ticket, Increment]] = []
        self._encoding = threading.Lock()  # tokenizers are not made for two threads
        self._scheduler.policy = Policy(
            prefill_tokens_per_step, questions_together=False, make_room=self._make_room, expecting=self._expecting
        )
        self._thread = threading.Thread(target=self._loop, name="hubkv-service", daemon=True)
        self._thread.start()

    # -- for clients, from any thread

    def submit(self, request: ServiceRequest, on_increment: Callable[[Increment], None] | None = None) -> Ticket:
        """Takes a request; returns without waiting for the engine.

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
        with self._wake:
            self._check_room()
        job = Job(Ticket(request, self.cancel, on_increment), self._aging_seconds)
        with self._encoding:
            entry = self._prepare(job)
        with self._wake:
            self._check_room()
            if request.context_id is not None:
                self._join_context(job, request.context_id, entry)
            self._inbox.append(job)
            self._unstarted += 1
            self._wake.notify()
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request in any state; its memory is back when the step that runs now has ended."""
        with self._wake:
            self._cancelled.append(ticket)
            self._wake.notify()

    def has_context(self, context_id: str) -> bool:
        """Whether questions over the context are taken now: it is kept, or is being compressed."""
        with self._wake:
            return self._contexts.find(context_id) is not None

    def release_context(self, context_id: str) -> bool:
        """Forgets a context; its memory is back when the questions under way have ended. Whether it was known."""
        with self._wake:
            entry = self._contexts.find(context_id)
            if entry is not None:
                self._contexts.release(entry)
                self._wake.notify()
            return entry is not None

    def metrics(self) -> Metrics:
        """A copy of the counters as they were after the last step."""
        with self._wake:
            metrics = self._metrics.copy()
            metrics.refused = self._refused
            return metrics

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

    def _check_room(self) -> None:
        if self._failure is not None:
            raise ServiceClosedError(f"the service has failed: {self._failure}") from self._failure
        if self._closing:
            raise ServiceClosedError("the service is closed")
        if self._unstarted >= self._max_waiting:
            self._refused += 1
            raise QueueFullError(f"queue full: {self._unstarted} requests wait; ask again later")

    def _prepare(self, job: Job) -> Entry | None:
        """Encodes what can be encoded before the lock is taken; the context that the request would make."""
        request, entry = job.ticket.request, None
        if request.context_id is None:
            (sequence,) = self._requests.generation(
                [request.prompt], request.params, request.ratio, None, request.chat, request.stream
            )
            job.start(sequence)
            return None
        if request.document is not None:
            document, ending = self._requests.document(request.document, request.ratio, request.chat)
            document.queue_key = job.queue_key
            entry = Entry(request.context_id, document, ending)
        else:
            with self._wake:
                known = self._contexts.find(request.context_id)
            ending = known.ending if known is not None else ""
        if request.prompt is not None:
            self._requests.check(request.params)
            job.ending = ending
            job.question_ids = self._requests.encoder.question(request.prompt, ending)
        return entry

    def _join_context(self, job: Job, context_id: str, entry: Entry | None) -> None:
        known = self._contexts.find(context_id)
        if known is not None and entry is not None:
            known.check_same(entry.document.token_ids, entry.document.stats.ratio)
        elif known is None and entry is not None:
            self._contexts.add(entry)
            known = entry
        elif known is None or known.ending != job.ending:  # or was made anew meanwhile
            raise UnknownContextError(
                f"context_id: {context_id!r} is not known (it was released, or made room for others): send its document"
            )
        self._contexts.use(known)
        job.entry = known

    # -- the loop, in the service's thread

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            LOGGER.exception("the service has failed")
            self._failure = error
        self._shut()

    def _turn(self) -> bool:
        """What came in, one step of the engine, what it gave; False when the service is to end."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._inbox or self._cancelled or self._closing or self._jobs or self._contexts.to_settle
            )
            if self._closing:
                return False
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
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
        with self._wake:
            for entry in self._contexts.all():
                if entry.users == 0 and not entry.document.finished:
                    self._scheduler.finish(entry.document, "aborted")
                    self._contexts.release(entry)

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
                with self._wake:
                    self._contexts.release(entry)
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
                with self._wake:
                    self._contexts.leave(job.entry)

    def _send(self) -> None:
        """Hands the increments over. Whoever has a result finds it counted."""
        outbox, self._outbox = self._outbox, []
        for ticket, increment in outbox:
            try:
                ticket.give(increment)
            except Exception as error:  # the client's own; its request is the only one that ends
                LOGGER.warning("a callback raised %r: its request is cancelled", error)
                self.cancel(ticket)

    def _publish(self) -> None:
        with self._wake:
            self._contexts.settle()
            self._unstarted = len(self._inbox) + sum(job.waiting for job in self._jobs.values())
            self._metrics = self._counters.read(self._scheduler.running, self._contexts, self._unstarted)

    def _make_room(self, sequence: Sequence) -> bool:
        with self._wake:
            return self._contexts.make_room(sequence)

    def _expecting(self) -> bool:
        """Questions hold their contexts from ``submit`` on."""
        with self._wake:
            return bool(self._inbox)

    def _shut(self) -> None:
        """Everything ends; all memory comes back."""
        with self._wake:
            self._closing = True
            for job in self._inbox:
                self._jobs[job.ticket] = job
            self._inbox.clear()
        error = None if self._failure is None else ServiceClosedError(f"the service has failed: {self._failure}")
        for job in list(self._jobs.values()):
            self._end(job, "aborted" if error is None else "error", error)
        with self._wake:
            for entry in self._contexts.all():
                self._scheduler.finish(entry.document, "aborted")
                self._contexts.release(entry)
        self._scheduler.policy = Policy()
        self._publish()
        self._send()
