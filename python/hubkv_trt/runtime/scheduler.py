# SPDX-License-Identifier: Apache-2.0
"""What runs next. Requests wait in the order they came; a sequence joins and leaves between steps."""

from __future__ import annotations

from collections import deque
from enum import Enum

from .cache import Cache, CacheFullError
from .sequence import Sequence, Status

QUESTION_TOKENS = 1024  # questions are taken together up to so many tokens, padding included


class Phase(Enum):
    PREFILL = "prefill"  # one prompt
    QUESTION = "question"  # questions over contexts, together
    DECODE = "decode"  # one more token of every running sequence
    IDLE = "idle"


class Scheduler:
    """First come, first served. A request starts when its segment, its longest possible tail and what its prefill
    borrows have room, so that a running sequence never runs out of cache; prompts go before decoding, one at a time.

    Attributes:
        waiting: not started yet.
        running: hold cache, and decode together.
    """

    def __init__(self, cache: Cache, max_batch_size: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._cache = cache
        self._max_batch_size = max_batch_size

    def add(self, sequence: Sequence) -> None:
        """Puts a request at the end of the queue. It must fit into an empty cache (``Cache.check_can_ever_fit``)."""
        if sequence.context is not None:  # held from now on, so that the context may be closed meanwhile
            sequence.segment = self._cache.share(sequence.context.segment)
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def schedule(self) -> tuple[Phase, list[Sequence]]:
        """The next step. Sequences that it starts hold their cache when this returns.

        Where the first of the queue has no room and nothing runs that could give some back, it fails with
        ``CacheFullError`` (open contexts hold the cache).
        """
        started: list[Sequence] = []
        while self.waiting and self._admits(started):
            sequence = self.waiting.popleft()
            self._start(sequence)
            started.append(sequence)
            if sequence.context is None:
                return Phase.PREFILL, started
        if started:
            return Phase.QUESTION, started
        if self.running:
            return Phase.DECODE, list(self.running)
        if self.waiting:
            self.finish(self.waiting[0], "error", self._full(self.waiting[0]))
        return Phase.IDLE, []

    def finish(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """Ends a sequence in any state and gives all it holds back."""
        if sequence.finished:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        if sequence.tail is not None:
            sequence.stats.bytes_tail = len(sequence.tail.pages) * self._cache.ledger.page_bytes
            self._cache.close_tail(sequence.tail)
        if sequence.segment is not None:
            self._cache.release(sequence.segment)
        sequence.tail = sequence.segment = None
        sequence.finish(reason, error)

    def _admits(self, started: list[Sequence]) -> bool:
        """Whether the first of the queue can start in this step."""
        sequence = self.waiting[0]
        if len(self.running) >= self._max_batch_size and sequence.max_tokens > 0:
            return False
        if started:  # questions only, side by side
            longest = max(len(s.token_ids) for s in (*started, sequence))
            if sequence.context is None or longest * (len(started) + 1) > QUESTION_TOKENS:
                return False
        return self._cache.fits(sequence.own_rows, sequence.tail_limit, sequence.prefill_bytes)

    def _start(self, sequence: Sequence) -> None:
        if sequence.budget is not None:
            sequence.segment = self._cache.allocate(sequence.budget.num_rows)
        sequence.tail = self._cache.open_tail(sequence.tail_limit)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _full(self, sequence: Sequence) -> CacheFullError:
        rows, ledger = sequence.own_rows, self._cache.ledger
        needed = (0 if rows is None else ledger.segment_bytes(rows)) + ledger.tail_bytes(sequence.tail_limit)
        borrowed = f" and {sequence.prefill_bytes} while its prompt runs" if sequence.prefill_bytes else ""
        return CacheFullError(
            f"cache full: the request needs {needed} bytes{borrowed}; {self._cache.held_bytes} of "
            f"{self._cache.num_bytes} are held by open contexts: close some, or raise cache_bytes"
        )
