# SPDX-License-Identifier: Apache-2.0
"""What runs next. Requests wait in order; a sequence joins and leaves between steps."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .cache import Cache, CacheFullError
from .sequence import Sequence, Status

QUESTION_TOKENS = 1024  # questions are taken together up to so many tokens, padding included


class Phase(Enum):
    PREFILL = "prefill"  # one prompt
    QUESTION = "question"  # questions over contexts, together
    DECODE = "decode"  # one more token of every running sequence
    IDLE = "idle"


@dataclass(frozen=True)
class Policy:
    """How a scheduler weighs new requests against running ones.

    Attributes:
        prefill_tokens_per_step: tokens of prompts and questions that may run between two decode steps. A prompt runs
            whole and may be longer: decoding then has as many steps as its tokens are worth before the next one starts.
            None: prompts go before decoding.
        questions_together: questions over contexts share a pass. The bits of their logits then depend on which do.
        make_room: frees cache that is kept but not in use until the request fits; whether it does then.
        expecting: whether requests are on their way that hold cache already; the first of the queue waits for them.
    """

    prefill_tokens_per_step: int | None = None
    questions_together: bool = True
    make_room: Callable[[Sequence], bool] | None = None
    expecting: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class _Stuck:
    """The first of the queue has no room although nothing runs."""

    first: Sequence
    before: list[Sequence]  # may start before it
    again: bool = False  # the second list for the same request


class Scheduler:
    """First come, first served (``Sequence.queue_key``). A request starts when its segment, its longest possible tail
    and what its prefill borrows have room, so that a running sequence never runs out of cache; none overtakes the first
    of the queue, so that a large one is not starved by small ones.

    Attributes:
        waiting: not started yet, in order.
        running: hold cache, and decode together.
        policy: may be set between two steps.
    """

    def __init__(self, cache: Cache, max_batch_size: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.policy = Policy()
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._credit = 0  # tokens that may be prefilled before the next decode step; negative: owed to decoding
        self._stuck: _Stuck | None = None

    def add(self, sequence: Sequence) -> None:
        """Queues a request. It must fit into an empty cache (``Cache.check_can_ever_fit``)."""
        if sequence.context is not None:  # held from now on, so that the context may be closed meanwhile
            sequence.segment = self._cache.share(sequence.context.segment)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=lambda s: s.queue_key)

    def schedule(self) -> tuple[Phase, list[Sequence]]:
        """The next step. Sequences that it starts hold their cache when this returns.

        Where the first of the queue has no room and nothing runs that could give some back, it fails with
        ``CacheFullError`` (open contexts hold the cache).
        """
        started: list[Sequence] = []
        budget = self.policy.prefill_tokens_per_step
        if budget is not None and not self.running:
            self._credit = budget
        if budget is None or self._credit > 0:
            while (sequence := self._next(started)) is not None:
                self._start(sequence)
                started.append(sequence)
                self._credit -= len(sequence.token_ids)
                if sequence.context is None:
                    return Phase.PREFILL, started
                if not self.policy.questions_together:
                    break
        if started:
            return Phase.QUESTION, started
        if self.running:
            if budget is not None:
                self._credit = min(budget, self._credit + budget)
            return Phase.DECODE, list(self.running)
        if self.waiting and not self.policy.expecting() and not self._look_again():
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
        cascade = sequence.cascade
        if cascade is not None and cascade.slot is not None:
            self._cache.release(cascade.slot)
            cascade.slot = None
        sequence.tail = sequence.segment = None
        sequence.finish(reason, error)

    def _next(self, started: list[Sequence]) -> Sequence | None:
        """The request that starts now, beside those that this step starts already."""
        if not self.waiting:
            return None
        first = self.waiting[0]
        if len(self.running) >= self._max_batch_size and first.max_tokens > 0:
            return None
        if started:  # questions only, side by side
            longest = max(len(s.token_ids) for s in (*started, first))
            if first.context is None or longest * (len(started) + 1) > QUESTION_TOKENS:
                return None
        if self._fits(first) or (self.policy.make_room is not None and self.policy.make_room(first)):
            self._stuck = None
            return first
        return None if self.running else self._past(first)

    def _past(self, first: Sequence) -> Sequence | None:
        """Nothing runs, and the first of the queue has no room: what holds the cache may be contexts of questions that
        stand behind it. Those that do so now go first, later ones do not."""
        if self._stuck is None or self._stuck.first is not first:
            self._stuck = _Stuck(first, self._questions())
        return next((s for s in self._stuck.before if s.status is Status.WAITING and self._fits(s)), None)

    def _look_again(self) -> bool:
        """Questions that came since then count too, once: whether this is the time."""
        stuck = self._stuck
        if stuck is None or stuck.again:
            return False
        self._stuck = _Stuck(stuck.first, self._questions(), again=True)
        return True

    def _questions(self) -> list[Sequence]:
        return [s for s in self.waiting if s.context is not None]

    def _fits(self, sequence: Sequence) -> bool:
        return self._cache.fits(sequence.own_segments, sequence.tail_limit, sequence.prefill_bytes)

    def _start(self, sequence: Sequence) -> None:
        if sequence.budget is not None:
            sequence.segment = self._cache.allocate(sequence.budget.num_rows)
        if sequence.cascade is not None:
            sequence.cascade.slot = self._cache.allocate(sequence.cascade.slot_rows)
        self.waiting.remove(sequence)
        sequence.tail = self._cache.open_tail(sequence.tail_limit)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _full(self, sequence: Sequence) -> CacheFullError:
        ledger = self._cache.ledger
        needed = sum(map(ledger.segment_bytes, sequence.own_segments)) + ledger.tail_bytes(sequence.tail_limit)
        borrowed = f" and {sequence.prefill_bytes} while its prompt runs" if sequence.prefill_bytes else ""
        return CacheFullError(
            f"cache full: the request needs {needed} bytes{borrowed}; {self._cache.held_bytes} of "
            f"{self._cache.num_bytes} are held by open contexts: close some, or raise cache_bytes"
        )
