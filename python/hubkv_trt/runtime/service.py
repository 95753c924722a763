# SPDX-License-Identifier: Apache-2.0
"""Many clients, one engine: requests join and leave its batch between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..config import require
from .llm import LLM
from .metrics import Metrics
from .scheduler import Policy
from .service_contexts import Contexts, Entry
from .service_counters import Counters
from .service_desk import Desk
from .service_errors import QueueFullError, ServiceClosedError, UnknownContextError
from .service_job import Job
from .service_loop import Loop
from .stream import Increment
from .ticket import ServiceRequest, Ticket

__all__ = ["QueueFullError", "Service", "ServiceClosedError", "UnknownContextError"]


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
            (``Policy.prefill_tokens_per_step``), and before a prompt that runs alone can be cancelled.
        overcommit: fraction of a request's tail, in [0, 1], that is not reserved when it starts
            (``Policy.overcommit``): more run at once, and where pages run out some begin anew.
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
        overcommit: float = 0.0,
        aging_seconds: float = 10.0,
    ) -> None:
        require(max_waiting >= 1, "max_waiting", max_waiting, "at least 1")
        require(prefill_tokens_per_step >= 1, "prefill_tokens_per_step", prefill_tokens_per_step, "at least 1")
        require(0 <= overcommit <= 1, "overcommit", overcommit, "a fraction in [0, 1]")
        require(aging_seconds > 0, "aging_seconds", aging_seconds, "greater than 0")
        self._requests = llm._requests
        self._max_waiting = max_waiting
        self._aging_seconds = aging_seconds
        counters = Counters(llm.cache)
        contexts = Contexts(llm.cache, counters.evicted)
        self._desk = Desk(contexts, counters.read([], contexts, 0))
        self._encoding = threading.Lock()  # tokenizers are not made for two threads
        loop = Loop(llm, self._desk, counters)
        llm._scheduler.policy = Policy(
            prefill_tokens_per_step,
            overcommit,
            questions_together=False,
            make_room=loop.make_room,
            expecting=loop.expecting,
            on_preempt=counters.preempted,
        )
        self._thread = threading.Thread(target=loop.run, name="hubkv-service", daemon=True)
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
        with self._desk.wake:
            self._check_room()
        job = Job(Ticket(request, self.cancel, on_increment), self._aging_seconds)
        with self._encoding:
            entry = self._prepare(job)
        with self._desk.wake:
            self._check_room()
            if request.context_id is not None:
                self._join_context(job, request.context_id, entry)
            self._desk.inbox.append(job)
            self._desk.unstarted += 1
            self._desk.wake.notify()
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request in any state; its memory is back when the step that runs now has ended."""
        self._desk.cancel(ticket)

    def has_context(self, context_id: str) -> bool:
        """Whether questions over the context are taken now: it is kept, or is being compressed."""
        with self._desk.wake:
            return self._desk.contexts.find(context_id) is not None

    def release_context(self, context_id: str) -> bool:
        """Forgets a context; its memory is back when the questions under way have ended. Whether it was known."""
        with self._desk.wake:
            entry = self._desk.contexts.find(context_id)
            if entry is not None:
                self._desk.contexts.release(entry)
                self._desk.wake.notify()
            return entry is not None

    def metrics(self) -> Metrics:
        """A copy of the counters as they were after the last step."""
        with self._desk.wake:
            metrics = self._desk.metrics.copy()
            metrics.refused = self._desk.refused
            return metrics

    def close(self) -> None:
        """Ends all requests (``aborted``), gives all memory back and stops the thread. A second call does nothing."""
        with self._desk.wake:
            self._desk.closing = True
            self._desk.wake.notify()
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_room(self) -> None:
        if self._desk.failure is not None:
            raise ServiceClosedError(f"the service has failed: {self._desk.failure}") from self._desk.failure
        if self._desk.closing:
            raise ServiceClosedError("the service is closed")
        if self._desk.unstarted >= self._max_waiting:
            self._desk.refused += 1
            raise QueueFullError(f"queue full: {self._desk.unstarted} requests wait; ask again later")

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
            with self._desk.wake:
                known = self._desk.contexts.find(request.context_id)
            ending = known.ending if known is not None else ""
        if request.prompt is not None:
            self._requests.check(request.params)
            job.ending = ending
            job.question_ids = self._requests.encoder.question(request.prompt, ending)
        return entry

    def _join_context(self, job: Job, context_id: str, entry: Entry | None) -> None:
        known = self._desk.contexts.find(context_id)
        if known is not None and entry is not None:
            known.check_same(entry.document.token_ids, entry.document.stats.ratio)
        elif known is None and entry is not None:
            self._desk.contexts.add(entry)
            known = entry
        elif known is None or known.ending != job.ending:  # or was made anew meanwhile
            raise UnknownContextError(
                f"context_id: {context_id!r} is not known (it was released, or made room for others): send its document"
            )
        self._desk.contexts.use(known)
        job.entry = known
