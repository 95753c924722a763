# SPDX-License-Identifier: Apache-2.0
"""The contexts of a service, by id."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..config import require
from .arena import align
from .cache import Cache
from .context import CompressedContext
from .sequence import Sequence


class Entry:
    """One context, from its first request on.

    Attributes:
        context_id: its name.
        document: the sequence that compresses it.
        ending: what ends each question's turn (``CompressedContext.ending``).
        context: None until it is compressed, and after it was closed.
        users: requests over it that have not ended.
        listed: whether the id still means it.
    """

    def __init__(self, context_id: str, document: Sequence, ending: str) -> None:
        self.context_id = context_id
        self.document = document
        self.ending = ending
        self.context: CompressedContext | None = None
        self.users = 0
        self.listed = True

    def check_same(self, token_ids: np.ndarray, ratio: float) -> None:
        """Raises ``ValueError`` where the id stands for something else."""
        same = self.document.stats.ratio == ratio and np.array_equal(self.document.token_ids, token_ids)
        require(same, "context_id", self.context_id, "another than that of a different document or ratio: release it")


class Contexts:
    """Keeps contexts until they are released or make room for others, the one not used for longest first. A context
    with users is never evicted; one that is released with users goes with the last of them.

    Not thread-safe: the service holds its lock. Memory is given back in the service's thread only (``settle``,
    ``make_room``).

    Args:
        cache: where they lie.
        on_evict: called for each context that makes room.
    """

    def __init__(self, cache: Cache, on_evict: Callable[[], None]) -> None:
        self._cache = cache
        self._on_evict = on_evict
        self._entries: dict[str, Entry] = {}  # least recently used first
        self._leaving: list[Entry] = []  # not listed, not closed

    def __len__(self) -> int:
        """Contexts that hold memory."""
        return sum(entry.context is not None for entry in self.all())

    @property
    def to_settle(self) -> bool:
        """Whether ``settle`` may have something to do."""
        return bool(self._leaving)

    def all(self) -> list[Entry]:
        """Everything that holds memory or will, those that are leaving too."""
        return [*self._entries.values(), *self._leaving]

    def find(self, context_id: str) -> Entry | None:
        return self._entries.get(context_id)

    def add(self, entry: Entry) -> None:
        self._entries[entry.context_id] = entry

    def use(self, entry: Entry) -> None:
        """One more request over it."""
        entry.users += 1
        self._touch(entry)

    def leave(self, entry: Entry) -> None:
        """A request over it has ended."""
        entry.users -= 1
        self._touch(entry)

    def release(self, entry: Entry) -> None:
        """Takes the id away; ``settle`` gives the memory back when no request needs it."""
        if entry.listed:
            del self._entries[entry.context_id]
            entry.listed = False
            self._leaving.append(entry)

    def settle(self) -> None:
        """Closes what is not listed and not used any more."""
        for entry in [e for e in self._leaving if e.users == 0 and e.document.finished]:
            self._leaving.remove(entry)
            _close(entry)

    def make_room(self, sequence: Sequence) -> bool:
        """Evicts until the request fits, if that can be; whether it does."""
        cache, segments = self._cache, sequence.own_segments
        if not segments or not cache.fits([], sequence.tail_reserve):
            return False
        idle = [e for e in self._entries.values() if e.users == 0 and e.context is not None]
        needed = sum(map(cache.ledger.segment_bytes, segments)) + align(sequence.prefill_bytes)
        if cache.free_segment_bytes + sum(e.context.num_bytes for e in idle if e.context) < needed:
            return False
        for entry in idle:
            del self._entries[entry.context_id]
            entry.listed = False
            _close(entry)
            self._on_evict()
            if cache.fits(segments, sequence.tail_reserve, sequence.prefill_bytes):
                return True
        return False

    def _touch(self, entry: Entry) -> None:
        if entry.listed:
            self._entries[entry.context_id] = self._entries.pop(entry.context_id)


def _close(entry: Entry) -> None:
    if entry.context is not None:
        entry.context.close()
        entry.context = None
