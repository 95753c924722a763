# SPDX-License-Identifier: Apache-2.0
"""A prompt that is being prefilled, some layers at a time where the executor can stop between them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .executors.executor import Executor, Prefill


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


def in_one_piece(executor: Executor, *arguments: Any) -> Generator[None, None, Prefill]:
    """The prefill (arguments of ``Executor.prefill``) of an executor that cannot stop."""
    yield from ()
    return executor.prefill(*arguments)
