# SPDX-License-Identifier: Apache-2.0
"""What runs a model for the runtime. A backend is one class with these methods."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ...config import Budget
from ..batch import Batch
from ..cache import Segment
from ..edits import LogitEdits
from ..sampler import Sampled, SamplingParams
from ..sequence import Sequence as Request


@dataclass(frozen=True)
class Prefill:
    """What a prefill leaves beside the filled segment.

    Attributes:
        logits: float32 [1, V], of the last token, on the executor's device.
        rows: waits until the prefill is done and gives int64 [L, Hkv], the kept rows; call it before the next prefill.
            Raises ``ValueError`` where the device found scores that are not finite.
        seconds: by stage, where the executor can tell.
    """

    logits: torch.Tensor
    rows: Callable[[], np.ndarray]
    seconds: dict[str, float]


class Executor(Protocol):
    """Runs prefill and extend over one cache. The runtime decides what runs; an executor keeps no request.

    On a device nothing makes the host wait but ``sample`` and ``Prefill.rows``.
    """

    def prefill_bytes(self, num_tokens: int, budget: Budget) -> int:
        """Bytes of the cache's room for segments that the prefill of T tokens borrows while it runs. Any
        thread may ask.

        Raises:
            ValueError: the engine was not built for such a prompt.
        """
        ...

    def prefill(self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment) -> Prefill:
        """One prompt, int32 [T]: fills the segment (K = budget.num_rows rows, positions, head offsets).

        Raises:
            ValueError: scores that are not finite.
        """
        ...

    def extend(self, batch: Batch, token_ids: torch.Tensor, new_lengths: torch.Tensor | None = None) -> torch.Tensor:
        """New tokens int32 [B, Tq] (the first new_lengths int32 [B] of each row are real) into the tails.

        Args:
            batch: one that joined or lost a sequence is a new ``Batch``.
            token_ids: on the host, or ``Sampled.next_tokens``.
            new_lengths: on the host, each >= 1; None where Tq is 1.

        Returns:
            float32 [B, V], the logits of each sequence's last real token, until the next call of extend.
        """
        ...

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[random.Random],
        edits: Sequence[LogitEdits | None] = (),
    ) -> Sampled:
        """Tokens from logits float32 [B, V] of the last pass, each with its own edits (``runtime.sampler.draw``)."""
        ...


@runtime_checkable
class Condenser(Protocol):
    """An executor that can also compress the cache of a sequence while it decodes."""

    def condense(self, sequence: Request, moved: int, target: Segment) -> np.ndarray:
        """Compresses the cache of a sequence that decodes (HARD-KV): the rows of its compact segment and of the first
        ``moved`` tokens of its tail, which are whole pages, become those that its last queries need.

        Args:
            sequence: with a ``Cascade`` that has its queries.
            target: where they are written; its room suffices.

        Returns:
            int64 [L, Hkv], the rows of each head.
        """
        ...


@runtime_checkable
class LayerwiseExecutor(Protocol):
    """What an executor may be able to do beside: stop in the middle of a prompt, so that others need not wait."""

    def prefill_by_layers(
        self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment
    ) -> Generator[None, None, Prefill]:
        """``Executor.prefill``, stopping before each of the L layers but the first; the same bits.

        Whatever else the executor does may come between two layers. Closing the generator ends the prefill and frees
        what it holds; the segment is the caller's.
        """
        ...
