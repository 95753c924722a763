# SPDX-License-Identifier: Apache-2.0
"""What changes the logits of a batch before tokens are chosen from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .bans import Bans
from .device_rows import on_device
from .penalties import Penalties
from .sampling_params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class LogitEdits:
    """What one sequence asks for."""

    penalties: Penalties | None
    bans: Bans | None

    def append(self, token: int) -> None:
        """A token was generated."""
        if self.penalties is not None:
            self.penalties.append(token)
        if self.bans is not None:
            self.bans.append(token)


def make_edits(
    params: SamplingParams, prompt: np.ndarray, end_ids: Iterable[int], bad_words: Sequence[tuple[int, ...]]
) -> LogitEdits | None:
    """For a sequence that begins; None where nothing is asked for, which costs nothing later.

    Args:
        params: of the request.
        prompt: token ids [T].
        end_ids: tokens that end it.
        bad_words: token ids of each.
    """
    penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    penalties = Penalties(params, prompt) if penalized else None
    banning = bool(bad_words) or params.min_tokens > 0
    bans = Bans(bad_words, end_ids, params.min_tokens, prompt) if banning else None
    return None if penalties is None and bans is None else LogitEdits(penalties, bans)


def edit_logits(logits: torch.Tensor, edits: Sequence[LogitEdits | None]) -> torch.Tensor:
    """The logits with all edits; only the tokens they are about are looked at.

    Args:
        logits: float32 [B, V]; not changed.
        edits: B, or none at all.

    Returns:
        float32 [B, V]; ``logits`` itself where there is nothing to do. On CUDA the host does not wait.
    """
    asked = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not asked:
        return logits
    size, device = logits.shape[1], logits.device
    logits = logits.clone()
    flat = logits.view(-1)
    penalized = [(row, edit.penalties) for row, edit in asked if edit.penalties is not None]
    if penalized:
        where = on_device(device, np.concatenate([p.tokens + row * size for row, p in penalized]), torch.int64)
        amounts = on_device(device, np.concatenate([p.amounts for _, p in penalized]), torch.float32)
        factors = np.repeat([p.repetition for _, p in penalized], [len(p.tokens) for _, p in penalized])
        repetition = on_device(device, factors, torch.float32)
        x = flat.index_select(0, where)
        x = torch.where(x < 0, x * repetition, x / repetition) - amounts
        flat.index_copy_(0, where, x.clamp_(max=_LARGEST))  # a token that is favoured beyond it is no broken model
    banned = [row * size + token for row, edit in asked if edit.bans is not None for token in edit.bans.tokens()]
    if banned:
        flat.index_fill_(0, on_device(device, banned, torch.int64), -torch.inf)
    return logits
