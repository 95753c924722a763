# SPDX-License-Identifier: Apache-2.0
"""A document that was compressed once, for many questions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .cache import Cache, Segment
from .stats import RequestStats


class CompressedContext:
    """The compact segment of a document, made by ``LLM.compress``. Every question over it extends a tail of its own.

    It holds cache until it is closed, by ``close()``, at the end of a ``with`` block, or when it is garbage collected.
    Questions that are under way keep the segment until they end.

    Attributes:
        token_ids: int32 [T], the document.
        num_tokens: T; a question's tokens stand at positions T, T + 1, ...
        ending: text that each question's turn ends with (the rest of the chat template); empty without a chat.
        stats: what compressing cost.
    """

    def __init__(self, cache: Cache, segment: Segment, token_ids: np.ndarray, stats: RequestStats) -> None:
        self._segment: Segment | None = cache.share(segment)
        self._cache = cache
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)
        self.ending = ""
        self.stats = stats

    @property
    def closed(self) -> bool:
        return self._segment is None

    @property
    def segment(self) -> Segment:
        """Raises ``ValueError`` after ``close()``."""
        if self._segment is None:
            raise ValueError("context: it is closed; compress the document again")
        return self._segment

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache that it holds."""
        return 0 if self._segment is None else self._segment.num_bytes

    def belongs_to(self, cache: Cache) -> bool:
        """Whether its segment lies in that cache."""
        return self._cache is cache

    def close(self) -> None:
        """Gives the memory back; a second call does nothing."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._cache.release(segment)

    def __enter__(self) -> CompressedContext:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_segment", None) is not None and not finalizing():  # modules are gone by then
            self.close()
