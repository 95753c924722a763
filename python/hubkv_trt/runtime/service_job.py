# SPDX-License-Identifier: Apache-2.0
"""One request inside a service."""

from __future__ import annotations

import math
import time

import numpy as np

from .sequence import RequestOutput, Sequence, Status
from .service_contexts import Entry
from .stats import RequestStats
from .stream import Increment, TextStream
from .ticket import Ticket


class Job:
    """A ticket, and what stands for it in the engine.

    Attributes:
        ticket: the client's side.
        submitted: when, as ``time.perf_counter`` counts.
        deadline: when it ends at the latest, by the same clock.
        queue_key: ``Sequence.queue_key``.
        question_ids: int32 [n], a question that waits for its context; None for other kinds.
        ending: what the question was encoded with.
        entry: the context that it needs.
        sequence: what runs; None while its context is being compressed.
        stats: of a request that needs no sequence.
        counted: tokens that were counted.
        last_token: when the last of them was.
        compressions, compression_seconds: of its cache while it decoded, that were counted.
    """

    def __init__(self, ticket: Ticket, aging_seconds: float) -> None:
        request = ticket.request
        self.ticket = ticket
        self.submitted = time.perf_counter()
        self.deadline = self.submitted + (request.deadline_seconds or math.inf)
        self.queue_key = self.submitted - request.priority * aging_seconds
        self.question_ids: np.ndarray | None = None
        self.ending = ""
        self.entry: Entry | None = None
        self.sequence: Sequence | None = None
        self.stats = RequestStats()
        self.counted = 0
        self.last_token = self.submitted
        self.compressions = 0
        self.compression_seconds = 0.0
        self._stream: TextStream | None = None

    @property
    def waiting(self) -> bool:
        """Whether it holds no cache yet."""
        return self.sequence is None or self.sequence.status in (Status.NEW, Status.WAITING)

    def start(self, sequence: Sequence) -> Sequence:
        """Gives it its sequence."""
        sequence.queue_key = self.queue_key
        self.sequence, self._stream = sequence, TextStream(sequence)
        return sequence

    def take(self) -> Increment | None:
        """What its client is to get now; None where there is nothing."""
        if self._stream is None or self.sequence is None:
            return None
        if not self.ticket.request.stream and not self.sequence.finished:
            return None
        return self._stream.take()

    def last(self, reason: str, error: Exception | None) -> Increment:
        """The end of a request whose sequence, if it has one, has finished."""
        increment = self.take()
        return increment or Increment(0, "", [], RequestOutput("", [], reason, self.stats, error))
