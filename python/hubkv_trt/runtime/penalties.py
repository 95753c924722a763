# SPDX-License-Identifier: Apache-2.0
"""Which logits of a sequence are penalized, and by how much."""

from __future__ import annotations

import numpy as np

from ..config.base import FLOAT32_MAX
from .sampling_params import SamplingParams


class Penalties:
    """The tokens of one sequence that count, kept up to date as it grows: a step costs what it adds.

    The logit x of a token that was generated n times becomes

        (x / repetition if x >= 0 else x * repetition) - (presence * min(n, 1) + frequency * n)

    for the tokens of prompt and output (those of the prompt only where there is a repetition penalty: n is 0). Sources:
    transformers' ``RepetitionPenaltyLogitsProcessor`` (arXiv 1909.05858) and OpenAI's API.

    Args:
        params: with at least one penalty.
        prompt: token ids [T].

    Attributes:
        repetition: the factor.
    """

    def __init__(self, params: SamplingParams, prompt: np.ndarray) -> None:
        self.repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        known = np.flatnonzero(np.bincount(prompt)) if self.repetition != 1 else np.empty(0, np.int64)
        self._slots = dict(zip(known.tolist(), range(len(known)), strict=True))
        self._counts: dict[int, int] = {}
        self._tokens = known  # with room behind
        self._amounts = np.zeros(len(known), np.float32)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n], each once."""
        return self._tokens[: len(self._slots)]

    @property
    def amounts(self) -> np.ndarray:
        """float32 [n], what is subtracted from each."""
        return self._amounts[: len(self._slots)]

    def append(self, token: int) -> None:
        """A token was generated."""
        count = self._counts[token] = self._counts.get(token, 0) + 1
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            room = np.zeros(max(64, slot), np.int64)
            self._tokens = np.concatenate([self._tokens, room])
            self._amounts = np.concatenate([self._amounts, room.astype(np.float32)])
        self._tokens[slot] = token
        amount = self._presence + self._frequency * count
        self._amounts[slot] = min(max(amount, -FLOAT32_MAX), FLOAT32_MAX)
