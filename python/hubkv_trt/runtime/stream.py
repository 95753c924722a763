# SPDX-License-Identifier: Apache-2.0
"""What a request has given since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import RequestOutput, Sequence


@dataclass(frozen=True)
class Increment:
    """A piece of a stream.

    Attributes:
        index: which prompt of the call.
        text: what is new; the pieces of a prompt add up to ``RequestOutput.text``.
        token_ids: tokens since the last piece; a token whose text is held back comes with a later piece.
        output: the whole result, in the last piece of a prompt; else None.
        output_log_probs: of ``token_ids``, where they were asked for; else None.
        cum_log_probs: the sum of all so far.
    """

    index: int
    text: str
    token_ids: list[int]
    output: RequestOutput | None = None
    output_log_probs: list[float] | None = None
    cum_log_probs: float | None = None


class TextStream:
    """Cuts what a sequence generates into increments.

    Args:
        sequence: made with ``stream=True``.
        index: of the prompt, for the increments.
    """

    def __init__(self, sequence: Sequence, index: int = 0) -> None:
        self._sequence = sequence
        self._index = index
        self._given = 0  # tokens already told

    def take(self) -> Increment | None:
        """What is new; None where no text is and the sequence goes on. Nothing follows one with an output."""
        sequence = self._sequence
        text = sequence.detokenizer.take(final=sequence.finished)
        if not text and not sequence.finished:
            return None
        new, self._given = slice(self._given, None), len(sequence.output_ids)
        return Increment(
            self._index,
            text,
            sequence.output_ids[new],
            sequence.output() if sequence.finished else None,
            None if sequence.output_log_probs is None else sequence.output_log_probs[new],
            sequence.cum_log_probs,
        )
