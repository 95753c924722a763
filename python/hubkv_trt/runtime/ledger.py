# SPDX-License-Identifier: Apache-2.0
"""The ledger of the KV cache's bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import DType, ModelConfig
from .arena import align

PAGE_TOKENS = 16  # P


@dataclass(frozen=True)
class Ledger:
    """How many bytes of the cache things take: the one place where this is computed.

    Attributes:
        model: gives L, Hkv and D.
        dtype: of the rows.
        page_tokens: P.
        row_bias: segments have a bias for each row.
    """

    model: ModelConfig
    dtype: DType
    page_tokens: int = PAGE_TOKENS
    row_bias: bool = False

    def slices(self, rows: int) -> dict[str, int]:
        """Bytes of each slice of a compact segment of K rows, padding included, in the order they lie in memory."""
        row = self.model.head_dim * self.dtype.itemsize
        bias = {"row_bias": align(rows * 4)} if self.row_bias else {}  # float32 [K]
        return {
            "k_rows": align(rows * row),  # [K, D]
            "v_rows": align(rows * row),  # [K, D]
            "head_offsets": align((self.model.num_rows_per_token + 1) * 8),  # int64 [L*Hkv + 1]
            "positions": align(rows * 4),  # int32 [K]
            **bias,
        }

    def segment_bytes(self, rows: int) -> int:
        """Bytes of a compact segment of K rows."""
        return sum(self.slices(rows).values())

    @property
    def page_bytes(self) -> int:
        """Bytes of a tail page [L, 2, Hkv, P, D]; a multiple of 256 as D is one of 8 and P one of 16."""
        return self.page_tokens * self.model.kv_bytes_per_token(self.dtype)

    def pages(self, tokens: int) -> int:
        """Pages of a tail of that many tokens."""
        return -(-tokens // self.page_tokens)

    def tail_bytes(self, tokens: int) -> int:
        """Bytes of the pages of a tail."""
        return self.pages(tokens) * self.page_bytes

    def sequence_bytes(self, rows: int, tail_tokens: int) -> int:
        """Bytes of a sequence: its compact segment of K rows and its tail."""
        return self.segment_bytes(rows) + self.tail_bytes(tail_tokens)

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of all K and V rows of that many tokens: what a cache without compression holds, tables left out."""
        return tokens * self.model.kv_bytes_per_token(self.dtype)
