# SPDX-License-Identifier: Apache-2.0
"""What one request cost, and what of it was kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class RequestStats:
    """Figures of one request. Bytes are the ledger's (``runtime/ledger.py``), seconds are wall time.

    Attributes:
        prompt_tokens: T of the prompt, or the tokens of a question.
        context_tokens: tokens of the compressed context that the question follows; 0 without one.
        output_tokens: tokens generated.
        ratio: the compression ratio asked for.
        effective_ratio: the fraction of KV pairs removed; lower than asked where protected tokens need more rows.
        rows: int64 [L, Hkv], kept rows of each layer and head; None before prefill.
        bytes_dense: K and V of all prompt (and context) tokens without compression.
        bytes_kept: the compact segment, tables and padding included; a context's segment is shared by its questions.
        bytes_tail: the pages of the tail when the request ended.
        condensations: how often its cache was compressed while it decoded.
        condensed_rows: int64 [L, Hkv], rows of its compact segment after the last of these; None before the first.
        seconds: ``prefill`` and in it ``scorer``, ``refine``, ``select``, ``compact``; ``extend``, the pass of a
            question over its context; ``decode``, the steps after the first token, each of which a batch shares;
            ``condense``, the compressions of its cache between these steps; ``replay``, decode steps that brought a
            preempted request back to where it was.
        first_token_seconds: from the request's arrival to its first token.
        decode_steps: tokens that came from steps counted in ``decode``.
        preemptions: how often it had to begin anew.
        resident_bytes: of the process, after prefill.
        peak_bytes: the most the process ever had, at the end of the request.
    """

    prompt_tokens: int = 0
    context_tokens: int = 0
    output_tokens: int = 0
    ratio: float = 0.0
    effective_ratio: float = 0.0
    rows: np.ndarray | None = None
    bytes_dense: int = 0
    bytes_kept: int = 0
    bytes_tail: int = 0
    condensations: int = 0
    condensed_rows: np.ndarray | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float = 0.0
    decode_steps: int = 0
    preemptions: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0

    @property
    def seconds_per_token(self) -> float:
        """Mean time of a decode step that this request took part in; 0 before the second token."""
        return self.seconds.get("decode", 0.0) / self.decode_steps if self.decode_steps else 0.0

    def condensed(self, rows: np.ndarray, seconds: float) -> None:
        """Notes a compression while decoding."""
        self.condensations += 1
        self.condensed_rows = rows
        self.seconds["condense"] = self.seconds.get("condense", 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON data, rows as nested lists."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("rows", "condensed_rows"):
            data[name] = None if data[name] is None else data[name].tolist()
        data["seconds"] = dict(self.seconds)
        data["seconds_per_token"] = self.seconds_per_token
        return data
