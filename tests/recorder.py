# SPDX-License-Identifier: Apache-2.0
"""Listens to an LLM's executor: the logits it gives and the rows it keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hubkv_trt.runtime.llm import LLM


class Recorder:
    """Stands between an LLM and its executor and changes nothing.

    Attributes:
        prefills: (positions int32 [K], head_offsets int64 [L*Hkv + 1]) of each prefill.
        logits: float32 [B, V] of every pass, in order.
    """

    def __init__(self, llm: LLM) -> None:
        self._executor = llm._executor
        self.prefill_bytes = self._executor.prefill_bytes
        self.sample = self._executor.sample
        self.prefills: list[tuple[np.ndarray, np.ndarray]] = []
        self.logits: list[torch.Tensor] = []
        llm._executor = self

    def prefill(self, token_ids: Any, budget: Any, alpha: Any, window: Any, segment: Any) -> Any:
        done = self._executor.prefill(token_ids, budget, alpha, window, segment)
        self.prefills.append((segment.positions.numpy().copy(), segment.head_offsets.numpy().copy()))
        self.logits.append(done.logits.clone())
        return done

    def extend(self, *args: Any) -> torch.Tensor:
        logits = self._executor.extend(*args)
        self.logits.append(logits.clone())
        return logits

    def clear(self) -> None:
        self.prefills.clear()
        self.logits.clear()
