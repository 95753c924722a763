# SPDX-License-Identifier: Apache-2.0
"""A prompt that is being prefilled, some layers at a time where the executor can stop between them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ..config import EngineConfig
from .executors.executor import Executor, LayerwiseExecutor, Prefill
from .sequence import Sequence


class PrefillRun:
    """Counts a prefill in tokens: after j of its n pieces, floor(T * j / n) of the T tokens have been run.

    Args:
        pieces: ends with the result; stops before each piece but the first.
        num_tokens: T.
        num_pieces: n: L where the executor stops between layers, else 1.

    Attributes:
        tokens: run so far.
    """

    def __init__(self, pieces: Generator[None, None, Prefill], num_tokens: int, num_pieces: int) -> None:
        self.tokens = 0
        self._pieces = pieces
        self._num_tokens = num_tokens
        self._num_pieces = num_pieces
        self._pieces_run = 0

    def advance(self, tokens: int | None) -> Prefill | None:
        """Runs pieces until so many more tokens have been run (None: to the end); the result where that ends it.
        Pieces are not cut: fewer than T / n + 1 tokens may be run beyond."""
        goal = self._num_tokens if tokens is None else self.tokens + tokens
        while tokens is None or self.tokens < goal:
            try:
                next(self._pieces)
            except StopIteration as end:
                self.tokens = self._num_tokens
                return end.value
            self._pieces_run += 1
            self.tokens = self._num_tokens * self._pieces_run // self._num_pieces
        return None

    def close(self) -> None:
        """Ends it where it is; what it holds is freed."""
        self._pieces.close()


def begin_prefill(executor: Executor, config: EngineConfig, sequence: Sequence) -> PrefillRun:
    """The prefill of a prompt that holds its segment; nothing has been run yet."""
    stats, segment, budget, num_tokens = sequence.stats, sequence.segment, sequence.budget, len(sequence.token_ids)
    assert segment is not None
    assert budget is not None
    alpha = window = 0.0
    if config.hubkv is not None:
        alpha, window = config.hubkv.alpha(stats.ratio), config.hubkv.window(num_tokens)
    stats.effective_ratio = budget.effective_ratio
    stats.bytes_dense = num_tokens * config.model.kv_bytes_per_token(config.dtype)
    stats.bytes_kept = segment.num_bytes
    arguments = (sequence.token_ids, budget, alpha, int(window), segment)
    if isinstance(executor, LayerwiseExecutor):
        return PrefillRun(executor.prefill_by_layers(*arguments), num_tokens, config.model.num_layers)
    return PrefillRun(_in_one_piece(executor, *arguments), num_tokens, 1)


def _in_one_piece(executor: Executor, *arguments: Any) -> Generator[None, None, Prefill]:
    """The prefill (arguments of ``Executor.prefill``) of an executor that cannot stop."""
    yield from ()
    return executor.prefill(*arguments)
