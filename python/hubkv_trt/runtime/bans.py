# SPDX-License-Identifier: Apache-2.0
"""Which tokens may not come next."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Bans:
    """Tokens that one sequence may not produce now.

    A token that ends the sequence is banned while it has less than ``min_tokens`` tokens. The last token of a bad word
    is banned where prompt and output end with the tokens before it (TensorRT-LLM's ``bad_words``, transformers'
    ``NoBadWordsLogitsProcessor``). A step costs a look at the words that the last token could lead to.

    Args:
        words: token ids of each bad word, none empty.
        end_ids: tokens that end the sequence.
        min_tokens: see above.
        prompt: token ids [T].
    """

    def __init__(
        self, words: Iterable[tuple[int, ...]], end_ids: Iterable[int], min_tokens: int, prompt: np.ndarray
    ) -> None:
        words = set(words)
        self._always = sorted(word[0] for word in words if len(word) == 1)
        self._ends = sorted(end_ids)
        self._early = min_tokens  # tokens that may not end the sequence yet
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._memory = max((len(word) - 1 for word in words), default=0)
        self._recent: list[int] = prompt[len(prompt) - min(self._memory, len(prompt)) :].tolist()

    def append(self, token: int) -> None:
        """A token was generated."""
        self._early -= 1
        if self._memory:
            self._recent.append(token)
            del self._recent[: -self._memory]

    def tokens(self) -> list[int]:
        """Those banned now; one may be there twice."""
        banned = self._always + (self._ends if self._early > 0 else [])
        if self._recent:
            for word in self._after.get(self._recent[-1], ()):
                if tuple(self._recent[1 - len(word) :]) == word[:-1]:
                    banned.append(word[-1])
        return banned
