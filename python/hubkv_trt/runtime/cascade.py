# SPDX-License-Identifier: Apache-2.0
"""HARD-KV's state of one sequence: when its cache is compressed while it decodes, and which queries judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config import HardKVConfig, ModelConfig
from .cache import Cache, Segment
from .ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from .sequence import Sequence


class Cascade:
    """The tail (dense tier) of a sequence grows to ``config.tail_tokens``; then all but its recent tokens join the
    compact segment (sparse tier), of which each head keeps what the last queries need.

    Args:
        config: the parameters.
        model: gives L, Hq and D.
        slot_rows: room for a compact segment, the same for all sequences of an LLM.

    Attributes:
        slot: that room, held from the start of the sequence; None when its compact segment lies in it, in place of that
            of its prompt.
        moved_tokens: how many tokens have left the tail.
    """

    def __init__(self, config: HardKVConfig, model: ModelConfig, slot_rows: int) -> None:
        self.config = config
        self.slot_rows = slot_rows
        self.slot: Segment | None = None
        self.moved_tokens = 0
        self._shape = (model.num_layers, config.query_window, model.num_heads, model.head_dim)
        self._queries: torch.Tensor | None = None
        self._seen = 0

    def replace_segment(self, sequence: Sequence, staging: Segment, cache: Cache) -> Segment:
        """Makes what was written to ``staging`` the sequence's segment; the room that takes staging's place."""
        assert sequence.segment is not None
        old, sequence.segment = sequence.segment, staging
        if self.slot is None:
            return old
        free, self.slot = self.slot, None
        cache.release(old)
        return free

    def due(self, tail_length: int) -> bool:
        """Whether the tail is full."""
        return tail_length >= self.config.tail_tokens

    def movable(self, tail_length: int) -> int:
        """The tokens that leave a full tail: whole pages of those before the recent ones."""
        return (tail_length - self.config.recent) // PAGE_TOKENS * PAGE_TOKENS

    def watches(self, tail_length: int, num_new: int) -> bool:
        """Whether queries of the next ``num_new`` tokens will judge: the tail is full within a window after them."""
        return tail_length + num_new + self.config.query_window > self.config.tail_tokens

    def see(self, queries: torch.Tensor) -> None:
        """Notes the rotated queries of new tokens, [L, n, Hq, D]."""
        window = self.config.query_window
        if self._queries is None:
            self._queries = queries.new_empty(self._shape)
        queries = queries[:, -window:]
        count = queries.shape[1]
        if (excess := self._seen + count - window) > 0:
            self._queries[:, : self._seen - excess] = self._queries[:, excess : self._seen].clone()
            self._seen -= excess
        self._queries[:, self._seen : self._seen + count] = queries
        self._seen += count

    def take_queries(self) -> torch.Tensor:
        """The queries since the last compression, at most W of them, oldest first: [L, n, Hq, D], until ``see``."""
        assert self._queries is not None
        queries, self._seen = self._queries[:, : self._seen], 0
        return queries
