# SPDX-License-Identifier: Apache-2.0
"""What runs next. Requests wait in order; a sequence joins and leaves between steps."""

from __future__ import annotations

from bisect import insort, insort_left
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
        prefill_tokens_per_step: tokens of prompts and questions that may run between two decode steps. Where the
            executor stops between layers (``PrefillRun``) what is more than that waits for the next decode step; what
            cannot be cut runs whole, and decoding then has as many steps as it is worth before anything else runs.
            None: prompts go before decoding, whole.
        overcommit: f in [0, 1], the fraction of a tail that is not reserved when its request starts. Of n tokens
            n - floor(f * n) are, but at least those of a question and of the first decode step, in whole pages. Where
            a decode step then finds no page, the last in the order of the queue of those that run is preempted: it
            gives its cache back, waits in its old place, and starts anew when its whole tail can be reserved. 0: whole
            tails are reserved, and nothing is ever preempted. Requests whose caches are compressed while they decode
            have short tails: these are always reserved whole, and they are never preempted.
        questions_together: questions over contexts share a pass. The bits of their logits then depend on which do.
        make_room: frees cache that is kept but not in use until the request fits; whether it does then.
        expecting: whether requests are on their way that hold cache already; the first of the queue waits for them.
        on_preempt: called for each request that is preempted.
    """

    prefill_tokens_per_step: int | None = None
    overcommit: float = 0.0
    questions_together: bool = True
    make_room: Callable[[Sequence], bool] | None = None
    expecting: Callable[[], bool] = lambda: False
    on_preempt: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Stuck:
    """The first of the queue has no room although nothing runs."""

    first: Sequence
    before: list[Sequence]  # may start before it
    again: bool = False  # the second list for the same request


class Scheduler:
    """First come, first served (``Sequence.queue_key``). A request starts when its segment, its longest possible tail
    (``Policy.overcommit``: a part of it) and what its prefill borrows have room; none overtakes the first of the queue,
    so that a large one is not starved by small ones. The first in that order of those that run is never preempted, as
    the tail of any request fits into an empty cache: it ends, and so does everything.

    Attributes:
        waiting: not started yet, in order.
        running: hold cache; they decode together but for one whose prefill has paused (``Sequence.prefill``).
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
        fed = 0 if sequence.context is None else len(sequence.token_ids)
        unreserved = int(self.policy.overcommit * sequence.tail_limit)
        if sequence.cascade is not None:  # its tail stays short, and it never gives way
            unreserved = 0
        sequence.tail_reserve = max(sequence.tail_limit - unreserved, min(fed + 1, sequence.tail_limit))
        insort(self.waiting, sequence, key=lambda s: s.queue_key)

    def schedule(self) -> tuple[Phase, list[Sequence]]:
        """The next step. Sequences that it starts hold their cache when this returns; a prompt whose prefill has paused
        goes on before another starts.

        Where the first of the queue has no room and nothing runs that could give some back, it fails with
        ``CacheFullError`` (open contexts hold the cache).
        """
        started: list[Sequence] = []
        budget = self.policy.prefill_tokens_per_step
        paused = [s for s in self.running if s.prefill is not None]
        decoding = [s for s in self.running if s.prefill is None]
        if budget is not None and not decoding:
            self._credit = budget
        if budget is None or self._credit > 0:
            if paused:
                return Phase.PREFILL, paused
            while (sequence := self._next(started)) is not None:
                self._start(sequence)
                started.append(sequence)
                if sequence.context is None:
                    return Phase.PREFILL, started
                self.spend(len(sequence.token_ids))
                if not self.policy.questions_together:
                    break
        if started:
            return Phase.QUESTION, started
        if decoding:
            decoding = self._secure(decoding)
            if not decoding:  # all gave way to a prompt that has paused
                return self.schedule()
            if budget is not None:
                self._credit = min(budget, self._credit + budget)
            return Phase.DECODE, decoding
        if self.waiting and not self.policy.expecting() and not self._look_again():
            self.finish(self.waiting[0], "error", self._full(self.waiting[0]))
        return Phase.IDLE, []

    @property
    def prefill_tokens(self) -> int | None:
        """What a prefill may run now; None: all of it."""
        return None if self.policy.prefill_tokens_per_step is None else self._credit

    def spend(self, tokens: int) -> None:
        """Notes that so many tokens of prompts or questions run in this step."""
        self._credit -= tokens

    def finish(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """Ends a sequence in any state and gives all it holds back."""
        if sequence.finished:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self._give_back(sequence)
        sequence.finish(reason, error)

    def _give_back(self, sequence: Sequence, shared: bool = True) -> None:
        """All that it holds of the cache; not its share of a context's segment without ``shared``."""
        if sequence.prefill is not None:
            sequence.prefill.close()
        if sequence.tail is not None:
            sequence.stats.bytes_tail = len(sequence.tail.pages) * self._cache.ledger.page_bytes
            self._cache.close_tail(sequence.tail)
        sequence.prefill = sequence.tail = None
        if sequence.segment is not None and (shared or sequence.context is None):
            self._cache.release(sequence.segment)
            sequence.segment = None
        cascade = sequence.cascade
        if cascade is not None and cascade.slot is not None:
            self._cache.release(cascade.slot)
            cascade.slot = None

    def _secure(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those that decode now, each with a page for its next token; else the last in order give way."""
        for sequence in sorted(decoding, key=lambda s: s.queue_key):
            while sequence.tail is not None and not self._cache.reserve(sequence.tail, sequence.tail_length + 1):
                able = [s for s in self.running if s.tail is not None and s.tail.reserved and s.cascade is None]
                self._preempt(max(reversed(able), key=lambda s: s.queue_key))
        return [s for s in decoding if s.status is Status.RUNNING]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence, shared=False)
        sequence.preempt()
        insort_left(self.waiting, sequence, key=lambda s: s.queue_key)
        self.policy.on_preempt()

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
        return self._cache.fits(sequence.own_segments, sequence.tail_reserve, sequence.prefill_bytes)

    def _start(self, sequence: Sequence) -> None:
        if sequence.budget is not None:
            sequence.segment = self._cache.allocate(sequence.budget.num_rows)
        if sequence.cascade is not None:
            sequence.cascade.slot = self._cache.allocate(sequence.cascade.slot_rows)
        self.waiting.remove(sequence)
        sequence.tail = self._cache.open_tail(sequence.tail_reserve)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _full(self, sequence: Sequence) -> CacheFullError:
        ledger = self._cache.ledger
        needed = sum(map(ledger.segment_bytes, sequence.own_segments)) + ledger.tail_bytes(sequence.tail_reserve)
        borrowed = f" and {sequence.prefill_bytes} while its prompt runs" if sequence.prefill_bytes else ""
        return CacheFullError(
            f"cache full: the request needs {needed} bytes{borrowed}; {self._cache.held_bytes} of "
            f"{self._cache.num_bytes} are held by open contexts: close some, or raise cache_bytes"
        )
