# SPDX-License-Identifier: Apache-2.0
"""Prompts that borrow from the cache while they run: admission counts it, and it comes back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt.config import Budget, DType, budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.engine.profiles import prefill_profiles
from hubkv_trt.runtime.cache import Cache, CacheFullError, Segment
from hubkv_trt.runtime.cache_size import create_cache, largest_prompt, most_pages
from hubkv_trt.runtime.executors.eager import EagerExecutor
from hubkv_trt.runtime.executors.executor import Prefill
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.runtime.llm import LLM, SamplingParams
from tensorrt_config import make_config


def ids(count: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(count)).tolist()


class Borrowing(EagerExecutor):
    """Takes dense rows of a prompt from the cache while it runs, as an executor on a GPU takes its context memory."""

    def prefill_bytes(self, num_tokens: int, budget: Budget) -> int:
        return self._cache.ledger.dense_bytes(num_tokens)

    def prefill_by_layers(
        self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment
    ) -> Generator[None, None, Prefill]:
        num_bytes = self.prefill_bytes(len(token_ids), budget)
        with self._cache.lend(num_bytes) as offset:
            self._cache.arena[offset : offset + num_bytes].fill_(0xFF)
            return (yield from super().prefill_by_layers(token_ids, budget, alpha, window, segment))


def borrowing(engine: Path, **sizes: int) -> LLM:
    llm = LLM(engine, **sizes)
    opened = load_engine(engine)
    weights = {**opened.weights, **opened.gate}
    llm._executor = Borrowing(opened.config, weights, llm.cache, opened.load_tokenizer)
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


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_what_is_lent_is_nobody_elses_and_no_part_of_the_books() -> None:
    cache = Cache(Ledger(make_config().model, DType.BFLOAT16), 1 << 20, 4)
    first = cache.allocate(100)
    held = cache.held_bytes
    assert cache.fits([100], 16, 900_000)
    assert not cache.fits([100], 16, 1 << 20)
    assert not cache.fits([], 0, 1 << 20)
    with cache.lend(900_001) as offset:
        cache.audit()
        assert offset % 256 == 0
        assert offset >= first.offset + first.num_bytes
        assert cache.held_bytes == held == cache.peak_bytes
        assert not cache.fits([1000], 0)
        with (
            pytest.raises(CacheFullError, match=r"a prefill borrows 500224 bytes in one piece, the largest"),
            cache.lend(500_001),
        ):
            pass
    assert cache.fits([1000], 0)
    with pytest.raises(KeyError), cache.lend(100):
        raise KeyError
    with cache.lend(0):
        cache.audit()
    cache.audit()
    cache.check_can_ever_fit([100], 16, 900_000)
    with pytest.raises(
        ValueError, match=r"\d+ bytes of compact segment \(100 rows\) and 1048576 while the prompt runs"
    ):
        cache.check_can_ever_fit([100], 16, 1 << 20)


def test_the_default_cache_holds_the_largest_prompt_too() -> None:
    config = make_config()
    ledger = Ledger(config.model, config.dtype)
    cache = create_cache(config, lent_bytes=5_000_000, available=1 << 30)
    plain = create_cache(config, available=1 << 30)
    assert cache.num_bytes - plain.num_bytes == -(-5_000_000 // 256) * 256
    assert cache.num_pages == most_pages(config)
    small = create_cache(config, lent_bytes=5_000_000, available=6_000_000)
    assert small.num_bytes <= 6_000_000
    assert small.num_pages <= most_pages(config)
    tokens, kept = largest_prompt(config)
    assert (tokens, kept) == (512, budget(config.model, config.hubkv, 512, 0.75))
    assert kept.rows_per_group <= prefill_profiles(config)[0]["K/S"][2]
    assert ledger.segment_bytes(kept.num_rows) < cache.num_bytes
