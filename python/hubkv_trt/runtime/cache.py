# SPDX-License-Identifier: Apache-2.0
"""The KV cache: compact segments and tail pages in one arena.

The arena has two parts. Tail pages ([L, 2, Hkv, P, D] each) lie at its beginning and come from a free list; compact
segments lie behind them, each in one piece from a best-fit allocator. Every slice begins at a multiple of 256 bytes and
is padded to one. On the host, memory is committed when it is first written and goes back when it is freed; on a GPU the
arena is one allocation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..config import require
from .arena import Arena, FreeList, align
from .ledger import Ledger
from .segment import Segment, Tail

__all__ = ["Cache", "CacheFullError", "Segment", "Tail"]


class CacheFullError(RuntimeError):
    """There is no room for what was asked."""


class Cache:
    """All cache memory of one engine.

    Args:
        ledger: the sizes of things.
        segment_bytes: of the part that holds compact segments.
        num_pages: of the page pool.
        arena: makes the arena of that many bytes.

    Attributes:
        page_base: byte offset of page 0 in the arena.
        held_bytes: of all segments and pages in use. Equals the sum of the ledger over everything that is open; what is
            lent does not count.
        peak_bytes: the most that ``held_bytes`` ever was.
    """

    def __init__(
        self, ledger: Ledger, segment_bytes: int, num_pages: int, arena: Callable[[int], Arena] = Arena
    ) -> None:
        require(num_pages >= 1, "num_pages", num_pages, "an integer >= 1")
        require(segment_bytes >= 0, "segment_bytes", segment_bytes, "an integer >= 0")
        self.ledger = ledger
        self.num_pages = num_pages
        self.page_base = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._segment_base = align(num_pages * ledger.page_bytes)
        self._segment_bytes = segment_bytes // 256 * 256
        self._arena = arena(self._segment_base + self._segment_bytes)
        self._free = FreeList(self._segment_base, self._segment_bytes)
        self._free_pages = list(range(num_pages))  # a heap: the lowest first, so that few pages are ever committed
        self._promised = 0  # pages reserved and not yet taken
        self._segments: set[Segment] = set()
        self._lent: set[tuple[int, int]] = set()  # offset, bytes
        self._tails: set[Tail] = set()

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [bytes], what attend and append read and write."""
        return self._arena.tensor

    @property
    def num_bytes(self) -> int:
        """The size of the cache."""
        return self._arena.tensor.numel()

    @property
    def reserved_bytes(self) -> int:
        """``held_bytes`` and the tail pages that are promised and not yet taken."""
        return self.held_bytes + self._promised * self.ledger.page_bytes

    @property
    def free_segment_bytes(self) -> int:
        """What is free in the room for segments, in however many pieces."""
        return self._free.free_bytes

    # -- admission

    def fits(self, segments: Sequence[int], tail_tokens: int, lent_bytes: int = 0) -> bool:
        """Whether new segments of so many rows each and a tail of that many tokens can be had now.

        Args:
            lent_bytes: what ``lend`` shall then be asked for.
        """
        if self.ledger.pages(tail_tokens) > len(self._free_pages) - self._promised:
            return False
        taken: list[tuple[int, int]] = []
        for num_bytes in map(self.ledger.segment_bytes, segments):
            offset = self._free.take(num_bytes)
            if offset is not None:
                taken.append((offset, num_bytes))
        room = align(lent_bytes) <= self._free.largest or not lent_bytes
        for offset, num_bytes in taken:
            self._free.put(offset, num_bytes)
        return room and len(taken) == len(segments)

    def check_can_ever_fit(self, segments: Sequence[int], tail_tokens: int, lent_bytes: int = 0) -> None:
        """Raises ``ValueError`` where even an empty cache has no room."""
        size = sum(map(self.ledger.segment_bytes, segments))
        lent = f" and {align(lent_bytes)} while the prompt runs" if lent_bytes else ""
        require(
            size + align(lent_bytes) <= self._segment_bytes,
            "prompt",
            f"{size} bytes of compact segment ({sum(segments)} rows){lent}",
            f"at most {self._segment_bytes}, the cache's room for segments: raise cache_bytes or the ratio",
        )
        require(
            self.ledger.pages(tail_tokens) <= self.num_pages,
            "max_tokens",
            f"a tail of {tail_tokens} tokens",
            f"at most {self.num_pages * self.ledger.page_tokens}, the cache's room for tails: raise tail_tokens or "
            "lower max_tokens",
        )

    # -- compact segments

    def allocate(self, rows: int) -> Segment:
        """A segment of K rows, held once. Its memory is not cleared.

        Raises:
            CacheFullError: no free range is large enough.
        """
        num_bytes = self.ledger.segment_bytes(rows)
        offset = self._free.take(num_bytes)
        if offset is None:
            raise CacheFullError(
                f"cache full: a segment of {rows} rows needs {num_bytes} bytes in one piece, the "
                f"largest free range has {self._free.largest} ({self._free.free_bytes} of "
                f"{self._segment_bytes} bytes are free)"
            )
        model, at = self.ledger.model, {}
        end = offset
        for name, size in self.ledger.slices(rows).items():
            at[name], end = end, end + size
        row_type = getattr(torch, self.ledger.dtype.value)
        view = self._arena.view
        segment = Segment(
            offset,
            num_bytes,
            rows,
            k_rows=view(at["k_rows"], row_type, rows, model.head_dim),
            v_rows=view(at["v_rows"], row_type, rows, model.head_dim),
            head_offsets=view(at["head_offsets"], torch.int64, model.num_rows_per_token + 1),
            positions=view(at["positions"], torch.int32, rows),
            entry=(at["k_rows"], at["v_rows"], at["head_offsets"], at.get("row_bias", -1)),
            row_bias=view(at["row_bias"], torch.float32, rows) if "row_bias" in at else None,
        )
        self._segments.add(segment)
        self._count(num_bytes)
        return segment

    def share(self, segment: Segment) -> Segment:
        """One more holder of the segment."""
        if segment.references < 1:
            raise RuntimeError("a segment that was freed cannot be shared")
        segment.references += 1
        return segment

    def release(self, segment: Segment) -> None:
        """One holder less; the last gives the memory back."""
        if segment.references < 1:
            raise RuntimeError("a segment was released more often than it was held")
        segment.references -= 1
        if segment.references == 0:
            self._segments.remove(segment)
            self._free.put(segment.offset, segment.num_bytes)
            self._arena.give_back(segment.offset, segment.num_bytes)
            self.held_bytes -= segment.num_bytes

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[int]:
        """Memory for the time of a ``with`` block, out of the room for segments: its byte offset in the arena.

        Work enqueued in the block may still use it afterwards, if whatever comes next is enqueued behind it.

        Raises:
            CacheFullError: no free range is large enough.
        """
        num_bytes = align(num_bytes)
        if num_bytes == 0:
            yield self._segment_base
            return
        offset = self._free.take(num_bytes)
        if offset is None:
            raise CacheFullError(
                f"cache full: a prefill borrows {num_bytes} bytes in one piece, the largest free range has "
                f"{self._free.largest}"
            )
        self._lent.add((offset, num_bytes))
        try:
            yield offset
        finally:
            self._lent.remove((offset, num_bytes))
            self._free.put(offset, num_bytes)
            self._arena.give_back(offset, num_bytes)

    # -- tails

    def open_tail(self, tokens: int) -> Tail:
        """A tail that can grow to ``tokens`` tokens: its pages are reserved, none is taken yet.

        Raises:
            CacheFullError: fewer pages are free.
        """
        tail = Tail(0)
        if not self.reserve(tail, tokens):
            pages, free = self.ledger.pages(tokens), len(self._free_pages) - self._promised
            raise CacheFullError(
                f"cache full: a tail of {tokens} tokens needs {pages} pages, {free} of {self.num_pages} are free"
            )
        self._tails.add(tail)
        return tail

    def reserve(self, tail: Tail, tokens: int) -> bool:
        """Makes sure that the tail can grow to ``tokens`` tokens; False where fewer pages are free."""
        missing = max(0, self.ledger.pages(tokens) - tail.reserved)
        if missing > len(self._free_pages) - self._promised:
            return False
        tail.reserved += missing
        self._promised += missing
        return True

    def grow(self, tail: Tail, tokens: int) -> bool:
        """Takes the pages that a tail of ``tokens`` tokens needs; whether there are new ones."""
        missing = self.ledger.pages(tokens) - len(tail.pages)
        if missing <= 0:
            return False
        if len(tail.pages) + missing > tail.reserved:
            raise RuntimeError(f"a tail of {tokens} tokens is longer than the {tail.reserved} pages reserved for it")
        tail.pages += [heapq.heappop(self._free_pages) for _ in range(missing)]
        self._promised -= missing
        self._count(missing * self.ledger.page_bytes)
        return True

    def drop_pages(self, tail: Tail, count: int) -> None:
        """The first pages of a tail go back to the pool; the tail may grow by as many again."""
        pages, tail.pages = tail.pages[:count], tail.pages[count:]
        self._promised += len(pages)
        self._give_back(pages)

    def tail_rows(self, tail: Tail, tokens: int) -> torch.Tensor:
        """A copy of K and V of the first tokens of a tail, [2, L*Hkv, tokens, D]."""
        model, size = self.ledger.model, self.ledger.page_tokens
        shape = (self.num_pages, model.num_layers, 2, model.num_kv_heads, size, model.head_dim)
        pages = self._arena.view(self.page_base, getattr(torch, self.ledger.dtype.value), *shape)
        rows = pages[tail.pages[: self.ledger.pages(tokens)]]
        return rows.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2)[:, :, :tokens]

    def close_tail(self, tail: Tail) -> None:
        """Gives the tail's pages and reservation back."""
        self._tails.remove(tail)
        self._promised -= tail.reserved - len(tail.pages)
        self._give_back(tail.pages)
        tail.pages, tail.reserved = [], 0

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free_pages, page)
            self._arena.give_back(self.page_base + page * self.ledger.page_bytes, self.ledger.page_bytes)
        self.held_bytes -= len(pages) * self.ledger.page_bytes

    def _count(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    # -- proof

    def audit(self) -> None:
        """Checks that counters, free lists and open things agree and that no two of them overlap.

        Raises:
            RuntimeError: they do not; a bug.
        """
        pages = [page for tail in self._tails for page in tail.pages]
        used = [(s.offset, s.num_bytes) for s in self._segments]
        end = self._segment_base
        for start, size in sorted([*used, *self._lent, *self._free.ranges()]):
            _check(start == end, f"a gap or an overlap at byte {start} of the arena")
            end = start + size
        _check(end == self.num_bytes, f"the ranges end at byte {end} of {self.num_bytes}")
        _check(sorted(pages + self._free_pages) == list(range(self.num_pages)), "a page is lost or in two places")
        _check(all(s.num_bytes == self.ledger.segment_bytes(s.rows) for s in self._segments), "a segment's size")
        _check(all(s.references >= 1 for s in self._segments), "a segment that nobody holds")
        held = sum(size for _, size in used) + len(pages) * self.ledger.page_bytes
        _check(held == self.held_bytes, f"held_bytes is {self.held_bytes}, held are {held}")
        promised = sum(tail.reserved - len(tail.pages) for tail in self._tails)
        _check(promised == self._promised <= len(self._free_pages), "reserved pages")


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"cache audit: {what}")
