# SPDX-License-Identifier: Apache-2.0
"""What the early attempts read: scores without the values that are not finite, and which of them count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import require


@dataclass(frozen=True)
class Scored:
    """The scores of one prompt.

    Attributes:
        values: float32 [L, Hkv, T], 0 where a score is NaN or infinite.
        finite: bool [L, Hkv, T], where the score is a number.
        inner: bool [T], the positions that are not protected.
    """

    values: Tensor
    finite: Tensor
    inner: Tensor

    @classmethod
    def of(cls, scores: Tensor, sink_tokens: int = 0, window: int = 0) -> Scored:
        """From scores float32 [L, Hkv, T], of whose tokens the first ``sink_tokens`` and last ``window`` are protected.

        Raises:
            ValueError: the scores have another shape or type.
        """
        require(scores.ndim == 3 and scores.dtype == torch.float32, "scores", (scores.dtype, tuple(scores.shape)),
                "float32 [L, Hkv, T]")  # fmt: skip
        num_tokens = scores.shape[2]
        inner = torch.ones(num_tokens, dtype=torch.bool)
        inner[:sink_tokens] = False
        inner[num_tokens - min(window, num_tokens) :] = False
        finite = scores.isfinite()
        return cls(torch.where(finite, scores, 0), finite, inner)

    def restore(self, values: Tensor, scores: Tensor) -> Tensor:
        """Values [L, Hkv, T] as ``refine`` leaves them: scores that are no numbers unchanged, protected tokens +inf."""
        return torch.where(self.inner, torch.where(self.finite, values, scores), torch.inf)
