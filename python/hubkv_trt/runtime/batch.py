# SPDX-License-Identifier: Apache-2.0
"""The tables of sequences that extend together, as attend and append read them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from ..graph.ops import CacheInputs, ExtendInputs
from .cache import Cache
from .sequence import Sequence

Plan = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""segments int64 [B, 4] -> work int32 [L, capacity, 4], work_count int32 [L]."""


class Batch:
    """B sequences between two changes of membership. The work list is planned once; a step only moves lengths forward.

    Args:
        sequences: each with a segment and an open tail.
        cache: where they lie.
        plan: makes the work list.
    """

    def __init__(self, sequences: Seq[Sequence], cache: Cache, plan: Plan) -> None:
        self.sequences = list(sequences)
        self._cache = cache
        tails = [s.tail for s in self.sequences if s.tail is not None]
        self._table = np.full((len(tails), max(tail.reserved for tail in tails)), -1, np.int32)
        self._held = np.array([len(tail.pages) for tail in tails], np.int32)
        for row, tail in zip(self._table, tails, strict=True):
            row[: len(tail.pages)] = tail.pages
        self._ends = np.array([s.tail_length for s in self.sequences], np.int32)
        self._block_table = torch.from_numpy(self._table)
        self._tail_lengths = torch.from_numpy(self._ends)
        self._positions = torch.tensor([s.next_position for s in self.sequences], dtype=torch.int32)
        self._segments = torch.tensor([s.segment.entry for s in self.sequences if s.segment], dtype=torch.int64)
        self._work, self._work_count = plan(self._segments)
        self._rows = torch.arange(len(tails), dtype=torch.int32)
        self._ones = torch.ones(len(tails), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    def inputs(self, token_ids: torch.Tensor, new_lengths: torch.Tensor | None = None) -> ExtendInputs[torch.Tensor]:
        """What the extend graph reads; takes the tail pages that the new tokens need.

        Args:
            token_ids: int32 [B, Tq], padded behind with any valid id.
            new_lengths: int32 [B], how many of each row are real, >= 1; None where Tq is 1.
        """
        num_new = token_ids.shape[1]
        new_lengths = self._ones if new_lengths is None else new_lengths
        needed = -(-(self._ends + new_lengths.numpy()) // self._cache.ledger.page_tokens)
        for b in np.flatnonzero(needed > self._held):
            self._take_pages(int(b), int(new_lengths[b]))
        positions, last = self._positions, self._rows
        if num_new > 1:
            positions = (positions[:, None] + torch.arange(num_new, dtype=torch.int32)).flatten()
            last = self._rows * num_new + new_lengths - 1
        cache = CacheInputs(
            arena=self._cache.arena,
            segments=self._segments,
            block_table=self._block_table,
            tail_lengths=self._tail_lengths,
            new_lengths=new_lengths,
            work=self._work,
            work_count=self._work_count,
            page_tokens=self._cache.ledger.page_tokens,
            page_base=self._cache.page_base,
        )
        return ExtendInputs(token_ids.flatten(), positions, last, cache, len(self.sequences))

    def advance(self, new_lengths: torch.Tensor) -> None:
        """The new tokens (int32 [B] of each sequence) are in the tails now."""
        self._tail_lengths += new_lengths
        self._positions += new_lengths

    def _take_pages(self, b: int, new: int) -> None:
        tail = self.sequences[b].tail
        assert tail is not None
        self._cache.grow(tail, int(self._ends[b]) + new)
        self._table[b, : len(tail.pages)] = tail.pages
        self._held[b] = len(tail.pages)
