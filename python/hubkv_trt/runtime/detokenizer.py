# SPDX-License-Identifier: Apache-2.0
"""From token ids to text, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a decoder gives for the bytes of a character that is not complete yet


class Detokenizer:
    """The text of one growing list of token ids; special tokens give no text.

    Text is decoded in windows that begin at a token border where the text so far was whole, and is taken over only when
    it does not end inside a character, so that no broken character is ever given out. What is still incomplete when the
    sequence ends is dropped.

    Args:
        tokenizer: of transformers.
        stop: stop texts.
        min_tokens: a stop text that is complete within so many tokens is text like any other.

    Attributes:
        text: whole characters decoded so far, cut at a stop text.
        stopped: a stop text was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._window = 0  # the window begins here: tokens before it are not decoded again
        self._read = 0  # tokens before this one are in the text
        self._given = 0  # characters already taken

    def push(self, token_ids: Sequence[int]) -> None:
        """Adds tokens; sets ``stopped`` and cuts the text if it now holds a stop text."""
        if self.stopped:
            return
        self._ids.extend(token_ids)
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return
        start = len(self.text)
        self.text += after[len(before) :]
        self._window, self._read = self._read, len(self._ids)
        self._find_stop(start)

    def take(self, final: bool = False) -> str:
        """The text since the last call that no later token can change.

        Characters that may be the beginning of a stop text are held back until they are not, or until ``final``.
        """
        end = len(self.text)
        if not final and not self.stopped:
            end -= max((self._overlap(stop) for stop in self._stop), default=0)
        text = self.text[self._given : end]
        self._given = max(self._given, end)
        return text

    def finish(self) -> None:
        """No more tokens: takes over what is whole in front of an incomplete character."""
        if self.stopped:
            return
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :]).rstrip(_INCOMPLETE)
        start = len(self.text)
        self.text += after[len(before) :]
        self._window = self._read = len(self._ids)
        self._find_stop(start)

    def _find_stop(self, start: int) -> None:
        """Looks for the first stop text that ends behind character ``start``."""
        if len(self._ids) <= self._min_tokens:
            return
        found = [at for stop in self._stop if (at := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the text that are the beginning of ``stop``."""
        longest = min(len(stop) - 1, len(self.text) - self._given)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
