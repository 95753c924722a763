# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ..config import Budget
from .cache import Segment, Tail
from .cascade import Cascade
from .detokenizer import Detokenizer
from .edits import LogitEdits
from .memory import peak_bytes, resident_bytes
from .sampling_params import SamplingParams
from .stats import RequestStats

if TYPE_CHECKING:
    from .context import CompressedContext
    from .prefill_run import PrefillRun


class Status(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestOutput:
    """What a request gave.

    Attributes:
        text: generated text without special tokens, cut before a stop text.
        token_ids: generated tokens; an end-of-sequence token that ended the sequence is the last.
        finish_reason: ``stop`` (end of sequence or stop text), ``length`` (max_tokens, or the model's positions are
            used up), ``error`` or ``aborted``.
        stats: what it cost.
        error: what went wrong, with ``finish_reason`` ``error``.
        output_log_probs: of ``token_ids``, float32 values, where ``SamplingParams.return_log_probs`` asks; else None.
        cum_log_probs: their sum; else None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    error: Exception | None = None
    output_log_probs: list[float] | None = None
    cum_log_probs: float | None = None


class Sequence:
    """The tokens of one request, and what it holds of the cache.

    Args:
        token_ids: int32 [n], n >= 1: a prompt, or a question that follows a context.
        params: None for a document that is only compressed.
        max_tokens: tokens to generate at most; 0 for a document.
        end_ids: tokens that end it.
        detokenizer: a fresh one.
        stream: text is wanted while it is generated.
        edits: of the logits that its tokens are chosen from.
        ratio: the compression ratio asked for.
        budget: of a prompt; None for a question.
        context: what a question follows; it shares its segment.
        prefill_bytes: of the cache's room for segments, which the prefill of a prompt borrows while it runs.
        cascade: compresses its cache while it decodes; None: its tail grows to the end.

    Attributes:
        queue_key: the lowest goes first; equal ones as they came.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        params: SamplingParams | None,
        *,
        max_tokens: int,
        end_ids: frozenset[int],
        detokenizer: Detokenizer,
        stream: bool,
        ratio: float,
        edits: LogitEdits | None = None,
        budget: Budget | None = None,
        context: CompressedContext | None = None,
        prefill_bytes: int = 0,
        cascade: Cascade | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.params = params
        self.max_tokens = max_tokens
        self.budget = budget
        self.context = context
        self.prefill_bytes = prefill_bytes
        self.cascade = cascade
        self.detokenizer = detokenizer
        self.edits = edits
        self.queue_key = 0.0
        self.tail_reserve = 0  # tokens of its tail that are reserved when it starts
        self.generator = random.Random(params.seed if params else None)
        self.status = Status.NEW
        self.finish_reason = ""
        self.error: Exception | None = None
        self.output_ids: list[int] = []
        self.output_log_probs: list[float] | None = [] if params and params.return_log_probs else None
        self.cum_log_probs = None if self.output_log_probs is None else 0.0
        self.compressed: CompressedContext | None = None  # what a document became
        self.segment: Segment | None = None
        self.prefill: PrefillRun | None = None  # that has begun and not ended
        self.kept_rows: Callable[[], np.ndarray] | None = None  # of a prefill that may still be running
        self.tail: Tail | None = None
        self.stats = RequestStats(prompt_tokens=len(token_ids), ratio=ratio)
        self._end_ids = end_ids
        self._decodes = stream or bool(params and params.stop)  # else all text is decoded at the end
        self._arrival = time.perf_counter()
        self._replayed: int | None = None  # output tokens taken again since it was preempted; None: all
        self._context_tokens = 0
        if context is not None:
            self._context_tokens = self.stats.context_tokens = context.num_tokens
            for name in ("effective_ratio", "rows", "bytes_dense", "bytes_kept"):
                setattr(self.stats, name, getattr(context.stats, name))

    # -- what it needs

    @property
    def own_segments(self) -> list[int]:
        """Rows of the segments that it needs of its own: its prompt's, and the slot of its cascade."""
        prompt = [] if self.budget is None else [self.budget.num_rows]
        return prompt if self.cascade is None else [*prompt, self.cascade.slot_rows]

    @property
    def tail_limit(self) -> int:
        """Tokens that the tail may come to hold: the last token generated is never fed."""
        question = 0 if self.context is None else len(self.token_ids)
        whole = question + max(0, self.max_tokens - 1)
        return whole if self.cascade is None else min(whole, max(question, self.cascade.config.tail_tokens))

    # -- where it stands

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def replaying(self) -> bool:
        """Whether what the next pass gives was generated already, before it was preempted."""
        return self._replayed is not None

    @property
    def last_token(self) -> int:
        """The output token to be fed next."""
        return self.output_ids[self._taken - 1]

    @property
    def next_position(self) -> int:
        """The position of the next token to be fed: the tokens of the text that the cache stands for."""
        if self._taken:
            return self._context_tokens + len(self.token_ids) + self._taken - 1
        return self._context_tokens

    @property
    def _taken(self) -> int:
        return len(self.output_ids) if self._replayed is None else self._replayed

    @property
    def tail_length(self) -> int:
        """Tokens in the tail; it begins behind the tokens that the segment stands for."""
        return self.next_position - self.tail_start

    @property
    def tail_start(self) -> int:
        """The position of the first token of the tail."""
        moved = 0 if self.cascade is None else self.cascade.moved_tokens
        return (self._context_tokens or len(self.token_ids)) + moved

    @property
    def segment_rows(self) -> int:
        """Rows of its compact segment."""
        if self.stats.condensed_rows is not None:
            return int(self.stats.condensed_rows.sum())
        return 0 if self.segment is None else self.segment.rows

    # -- what happens to it

    def read_rows(self) -> None:
        """Waits for the prefill and notes what it kept.

        Raises:
            ValueError: see ``Prefill.rows``.
        """
        assert self.kept_rows is not None
        self.stats.rows = self.kept_rows()
        self.kept_rows = None
        self.stats.resident_bytes = resident_bytes()

    def append(self, token: int, log_prob: float = 0.0) -> str:
        """Takes a generated token; the reason if the sequence ends with it, else an empty text."""
        if not self.output_ids:
            self.stats.first_token_seconds = time.perf_counter() - self._arrival
        self.output_ids.append(token)
        if self.output_log_probs is not None and self.cum_log_probs is not None:
            self.output_log_probs.append(log_prob)
            self.cum_log_probs += log_prob
        if self.edits is not None:
            self.edits.append(token)
        if token in self._end_ids:
            return "stop"
        if self._decodes:
            self.detokenizer.push((token,))
            if self.detokenizer.stopped:
                return "stop"
        return "length" if len(self.output_ids) >= self.max_tokens else ""

    def replay(self) -> None:
        """Takes the next of the tokens that it had when it was preempted."""
        assert self._replayed is not None
        self._replayed += 1
        if self._replayed == len(self.output_ids):
            self._replayed = None

    def preempt(self) -> None:
        """Begins anew, later; what it held has been given back. Text, generator and figures go on."""
        self.status = Status.WAITING
        self.stats.preemptions += 1
        self.tail_reserve = self.tail_limit
        self._replayed = 0 if self.output_ids else None

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """The end; what it held has been given back."""
        ended = bool(self.output_ids) and self.output_ids[-1] in self._end_ids
        if not self._decodes:
            self.detokenizer.push(self.output_ids[:-1] if ended else self.output_ids)
        self.detokenizer.finish()
        if self.detokenizer.stopped and error is None:
            reason = "stop"
        self.status, self.finish_reason, self.error = Status.FINISHED, reason, error
        self.context = None  # it may be closed and collected now
        self.stats.output_tokens = len(self.output_ids)
        self.stats.peak_bytes = max(peak_bytes(), self.stats.resident_bytes)  # the kernel keeps its peak loosely

    def output(self) -> RequestOutput:
        """The result of a finished sequence."""
        return RequestOutput(
            self.detokenizer.text,
            self.output_ids,
            self.finish_reason,
            self.stats,
            self.error,
            self.output_log_probs,
            self.cum_log_probs,
        )
