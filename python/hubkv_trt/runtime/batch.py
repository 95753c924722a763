# SPDX-License-Identifier: Apache-2.0
"""The tables of sequences that extend together, as attend and append read them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from .cache import Cache
from .cascade import Cascade
from .sequence import Sequence


@dataclass(frozen=True)
class Tables:
    """What one step of a batch reads beside tokens, on the host; fields as in ``include/hubkv/hubkv.h``."""

    segments: torch.Tensor  # int64 [B, 4]
    block_table: torch.Tensor  # int32 [B, maxPages], -1 where there is no page yet
    tail_lengths: torch.Tensor  # int32 [B]
    new_lengths: torch.Tensor  # int32 [B]
    positions: torch.Tensor  # int32 [B*Tq], sequence-major: the true position of each token in its text
    last_tokens: torch.Tensor  # int32 [B], which of the B*Tq rows is each sequence's last real token


class Batch:
    """B sequences between two changes of membership. A step moves lengths forward; ``refresh`` takes over what a
    compression while decoding changed. The tables keep their shapes and addresses.

    Args:
        sequences: each with a segment and an open tail.
        cache: where they lie.

    Attributes:
        work: the work list of attend, work int32 [L, capacity, 4] and work_count int32 [L], for an executor that
            keeps it with the batch.
        stale: segments were replaced since ``work`` was made.
        pages_taken: grows whenever the block table changes.
    """

    def __init__(self, sequences: Seq[Sequence], cache: Cache) -> None:
        self.sequences = list(sequences)
        self.work: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stale = False
        self.pages_taken = 0
        self._cache = cache
        tails = [s.tail for s in self.sequences if s.tail is not None]
        self._tails = tails
        most = max(cache.ledger.pages(s.tail_limit) for s in self.sequences)
        self._table = np.full((len(tails), most), -1, np.int32)
        self._held = np.array([len(tail.pages) for tail in tails], np.int32)
        for row, tail in zip(self._table, tails, strict=True):
            row[: len(tail.pages)] = tail.pages
        self._ends = np.array([s.tail_length for s in self.sequences], np.int32)
        self._block_table = torch.from_numpy(self._table)
        self._tail_lengths = torch.from_numpy(self._ends)
        self._positions = torch.tensor([s.next_position for s in self.sequences], dtype=torch.int32)
        self._segments = torch.tensor([s.segment.entry for s in self.sequences if s.segment], dtype=torch.int64)
        self._rows = torch.arange(len(tails), dtype=torch.int32)
        self._ones = torch.ones(len(tails), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    def holds(self, sequences: Seq[Sequence]) -> bool:
        """Whether it is these, with the tails that they have now: one that was preempted comes back with another."""
        return self.sequences == sequences and all(s.tail is t for s, t in zip(sequences, self._tails, strict=True))

    def tables(self, num_new: int, new_lengths: torch.Tensor | None = None) -> Tables:
        """The tables of a step; takes the tail pages that the new tokens need. Good until the next call here.

        Args:
            num_new: Tq.
            new_lengths: int32 [B], how many of the Tq tokens of each sequence are real; None where Tq is 1.
        """
        new_lengths = self._ones if new_lengths is None else new_lengths
        needed = -(-(self._ends + new_lengths.numpy()) // self._cache.ledger.page_tokens)
        for b in np.flatnonzero(needed > self._held):
            self._take_pages(int(b), int(new_lengths[b]))
        positions, last = self._positions, self._rows
        if num_new > 1:
            ends = (new_lengths - 1).clamp_(min=0)  # padding stands where the last real token does
            offsets = torch.minimum(torch.arange(num_new, dtype=torch.int32), ends[:, None])
            positions = (positions[:, None] + offsets).flatten()
            last = self._rows * num_new + ends
        return Tables(self._segments, self._block_table, self._tail_lengths, new_lengths, positions, last)

    def watching(self, num_new: int) -> list[tuple[int, Cascade]]:
        """The sequences (b) that need the queries of their next ``num_new`` tokens to compress their caches."""
        cascades = [(b, s.cascade) for b, s in enumerate(self.sequences) if s.cascade is not None]
        return [(b, cascade) for b, cascade in cascades if cascade.watches(int(self._ends[b]), num_new)]

    def advance(self, new_lengths: torch.Tensor) -> None:
        """The new tokens (int32 [B] of each sequence) are in the tails now."""
        self._tail_lengths += new_lengths
        self._positions += new_lengths

    def refresh(self, sequence: Sequence) -> None:
        """The segment of a sequence was replaced, and pages have left its tail."""
        assert sequence.tail is not None
        assert sequence.segment is not None
        b, pages = self.sequences.index(sequence), sequence.tail.pages
        self._table[b] = -1
        self._table[b, : len(pages)] = pages
        self._held[b] = len(pages)
        self._ends[b] = sequence.tail_length
        self._segments[b] = torch.tensor(sequence.segment.entry)
        self.stale = True
        self.pages_taken += 1

    def _take_pages(self, b: int, new: int) -> None:
        tail = self.sequences[b].tail
        assert tail is not None
        self._cache.grow(tail, int(self._ends[b]) + new)
        self._table[b, : len(tail.pages)] = tail.pages
        self._held[b] = len(tail.pages)
        self.pages_taken += 1
