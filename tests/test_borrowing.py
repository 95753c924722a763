# SPDX-License-Identifier: Apache-2.0
"""Prompts that borrow from the cache while they run: admission counts it, and it comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt.config import Budget, budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.cache import CacheFullError, Ledger, Segment
from hubkv_trt.runtime.executors.eager import EagerExecutor
from hubkv_trt.runtime.executors.executor import Prefill
from hubkv_trt.runtime.llm import LLM, SamplingParams


def ids(count: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(count)).tolist()


class Borrowing(EagerExecutor):
    """Takes dense rows of a prompt from the cache while it runs, as an executor on a GPU takes its context memory."""

    def prefill_bytes(self, num_tokens: int, budget: Budget) -> int:
        return self._cache.ledger.dense_bytes(num_tokens)

    def prefill(self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment) -> Prefill:
        num_bytes = self.prefill_bytes(len(token_ids), budget)
        with self._cache.lend(num_bytes) as offset:
            self._cache.arena[offset : offset + num_bytes].fill_(0xFF)
            return super().prefill(token_ids, budget, alpha, window, segment)


def borrowing(engine: Path, **sizes: int) -> LLM:
    llm = LLM(engine, **sizes)
    opened = load_engine(engine)
    llm._executor = Borrowing(opened.config, {**opened.weights, **opened.gate}, llm.cache)
    llm._requests._prefill_bytes = llm._executor.prefill_bytes
    return llm


def test_prompts_wait_for_what_their_prefill_borrows(tiny_engine: Callable[..., Path]) -> None:
    """With room for one prompt at a time, and not for its prefill beside an open context."""
    prompts = [ids(n) for n in (200, 190, 30, 205)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = LLM(tiny_engine("llama")).generate(prompts, params, ratio=0.5)
    config = load_engine(tiny_engine("llama")).config
    assert config.hubkv is not None
    ledger = Ledger(config.model, config.dtype)
    rows = budget(config.model, config.hubkv, 205, 0.5).num_rows
    room = ledger.sequence_bytes(rows, 16) + ledger.dense_bytes(205) + 1024
    llm = borrowing(tiny_engine("llama"), cache_bytes=room, tail_tokens=16)
    outputs = llm.generate(prompts, params, ratio=0.5)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert llm.cache.peak_bytes < room - ledger.dense_bytes(205) + 1
    with llm.compress(prompts[0], ratio=0.5), pytest.raises(CacheFullError, match=r"and \d+ while its prompt runs"):
        llm.generate(prompts[1], params, ratio=0.5)
    with pytest.raises(ValueError, match=r"prompt: .* bytes of compact segment .* and \d+ while the prompt runs"):
        llm.generate(ids(230), params, ratio=0.5)
    llm.cache.audit()
    assert llm.cache.held_bytes == 0
