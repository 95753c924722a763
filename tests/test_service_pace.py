# SPDX-License-Identifier: Apache-2.0
"""Prompts run in the gaps of decoding, some layers at a time, and may end in any of them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import ops as stages
from hubkv_trt.runtime.executors.executor import Prefill
from hubkv_trt.runtime.llm import SamplingParams
from hubkv_trt.runtime.prefill_run import PrefillRun
from hubkv_trt.runtime.scheduler import Phase
from hubkv_trt.runtime.ticket import ServiceRequest
from paced_engine import PacedEngine, first_seen, ids, until


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> PacedEngine:
    return PacedEngine(tiny_engine("llama"))


def request(length: int, tokens: int = 6, **options: Any) -> ServiceRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return ServiceRequest(prompt=ids(length, length), params=params, ratio=0.5, **options)


@given(st.integers(1, 500), st.integers(1, 40), st.lists(st.integers(1, 300), min_size=1))
@settings(max_examples=200, deadline=None)
def test_pieces_are_counted_to_the_token(num_tokens: int, num_pieces: int, budgets: list[int]) -> None:
    """What is run is what was asked for, and less than a piece and a token beyond; all of it together is T."""
    result = Prefill(torch.empty(0), lambda: None, {})  # type: ignore[arg-type, return-value]

    def pieces() -> Generator[None, None, Prefill]:
        for _ in range(num_pieces - 1):
            yield
        return result

    run = PrefillRun(pieces(), num_tokens, num_pieces)
    for budget in budgets * 500:
        before = run.tokens
        done = run.advance(budget)
        assert run.tokens - before < budget + num_tokens / num_pieces + 1
        if done is not None:
            assert run.tokens == num_tokens
            break
        assert run.tokens - before >= budget
    assert done is result


@pytest.mark.parametrize("budget", [10, 64, 1000])
def test_running_requests_keep_their_pace_while_prompts_come(engine: PacedEngine, budget: int) -> None:
    """Between two decode steps no more runs than decoding has paid for, and less than a layer and a token beyond."""
    lengths = [30, 100, 70, 7, 5, 60]
    layer = max(lengths) / engine.llm.config.model.num_layers
    with engine.service(prefill_tokens_per_step=budget) as service:
        with engine.held():
            tickets = [service.submit(request(n, tokens=60)) for n in lengths[:4]]
            tickets += [service.submit(request(n, tokens=2)) for n in lengths[4:]]
        for ticket in tickets:
            ticket.result(60)
    assert first_seen(engine.steps) == lengths
    assert sum(engine.spent) == sum(lengths)
    credit = budget
    decoding = False
    for (phase, _), spent in zip(engine.steps, engine.spent, strict=True):
        if phase is Phase.DECODE:
            credit, decoding = min(budget, credit + budget), True
        elif decoding:
            assert credit > 0, "a prompt ran that decoding had not paid for"
            credit -= spent
            assert credit > -layer - 1


def rows_in_memory(length: int) -> int:
    """Tensors that have rows of so many tokens."""
    return sum(type(x) is torch.Tensor and x.dim() > 1 and x.shape[0] == length for x in gc.get_objects())


@pytest.mark.parametrize("way", ["cancel", "deadline", "failure", "close"])
def test_nothing_is_left_of_a_prompt_that_ends_in_a_pause(
    engine: PacedEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache and its dense rows are free within a step; the request beside it gives what it gives alone."""
    length, llm = 331, engine.llm
    (alone,) = llm.generate(ids(40, 40), SamplingParams(max_tokens=200, ignore_eos=True), ratio=0.5)
    with engine.service(prefill_tokens_per_step=1) as service:
        beside = service.submit(request(40, tokens=200))
        next(iter(beside))
        before = service.metrics()
        prompt = service.submit(request(length, deadline_seconds=600))
        until(lambda: engine.steps[-1:] and any(s.prefill is not None for s in llm._scheduler.running))
        with engine.held():
            until(lambda: engine.at_gate)
            (paused,) = [s for s in llm._scheduler.running if s.prefill is not None]
            assert 0 < paused.prefill.tokens < length
            assert rows_in_memory(length) > 0
            metrics = service.metrics()
            assert (metrics.running, metrics.waiting, metrics.prefill_tokens) == (2, 0, 40)
            assert metrics.arena_bytes_reserved == llm.cache.reserved_bytes
            assert metrics.kv_bytes_dense == before.kv_bytes_dense + llm.cache.ledger.dense_bytes(length)
            assert metrics.kv_bytes_kept == before.kv_bytes_kept + paused.segment.num_bytes
            if way == "cancel":
                prompt.cancel()
            elif way == "deadline":
                monkeypatch.setattr(time, "perf_counter", lambda: time.monotonic() + 1e9)
            elif way == "failure":
                fail = ValueError("scores: 3 of 9 values are NaN or infinite")
                monkeypatch.setattr(stages, "refine", raising(fail))
            else:
                threading.Thread(target=service.close).start()
                until(lambda: service._desk.closing)
            del paused
        if way == "failure":
            with pytest.raises(ValueError, match="3 of 9"):
                prompt.result(30)
        else:
            assert prompt.result(30).finish_reason == {"deadline": "deadline"}.get(way, "aborted")
            assert prompt.result().token_ids == []
        assert rows_in_memory(length) == 0
        output = beside.result(30)
        assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        assert (output.finish_reason == "length") == (way != "close")
        assert service.metrics().prefill_tokens == 40


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_prompt_alone_can_be_cancelled_in_its_prefill(engine: PacedEngine) -> None:
    with engine.service(prefill_tokens_per_step=100) as service:
        with engine.held():
            ticket = service.submit(request(331))
            until(lambda: engine.at_gate)
            engine.after_step = ticket.cancel
        assert ticket.result(30).finish_reason == "aborted"
        assert engine.spent[0] == 110
        assert len(engine.steps) == 1


def test_a_prompt_that_nothing_waits_for_runs_whole(engine: PacedEngine) -> None:
    engine.spent.clear()
    engine.llm.generate(ids(331), SamplingParams(max_tokens=1))
    assert engine.spent == [331]
