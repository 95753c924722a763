# SPDX-License-Identifier: Apache-2.0
"""What runs a model for the runtime. A backend is one class with these methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...config import Budget
from ..batch import Batch
from ..cache import Segment


@dataclass(frozen=True)
class Prefill:
    """What a prefill leaves beside the filled segment."""

    logits: torch.Tensor  # float32 [1, V], of the last token
    rows: np.ndarray  # int64 [L, Hkv], kept rows
    seconds: dict[str, float]  # by stage


class Executor(Protocol):
    """Runs prefill and extend over one cache. The runtime decides what runs; an executor keeps no request."""

    def prefill(self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment) -> Prefill:
        """One prompt, int32 [T]: fills the segment (K = budget.num_rows rows, positions, head offsets).

        Raises:
            ValueError: scores that are not finite.
        """
        ...

    def plan(self, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The work list of attend for int64 [B, 4]: work int32 [L, capacity, 4], work_count int32 [L]."""
        ...

    def extend(self, batch: Batch, token_ids: torch.Tensor, new_lengths: torch.Tensor | None = None) -> torch.Tensor:
        """New tokens int32 [B, Tq] (the first new_lengths int32 [B] of each row are real) into the tails.

        Returns:
            float32 [B, V], the logits of each sequence's last real token.
        """
        ...
