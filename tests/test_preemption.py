# SPDX-License-Identifier: Apache-2.0
"""A cache that promises more than it has: requests begin anew, and nobody can tell from what they give."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hubkv_trt.runtime.llm import LLM, RequestOutput, SamplingParams
from hubkv_trt.runtime.scheduler import Policy
from hubkv_trt.runtime.ticket import ServiceRequest, Ticket
from paced_engine import PacedEngine, ids, until

POOL_TOKENS = 128  # 8 pages
DOCUMENT = ids(90, 1)


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> PacedEngine:
    return PacedEngine(tiny_engine("llama"), tail_tokens=POOL_TOKENS)


def request(kind: int, tokens: int, **options: Any) -> ServiceRequest:
    """Prompts of many lengths and questions over a context, greedy and drawn."""
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": kind} if kind % 2 else {}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
    if kind % 3 == 2:
        return ServiceRequest(
            prompt=ids(4 + kind, kind), document=DOCUMENT, context_id="c", ratio=0.5, params=params, **options
        )
    return ServiceRequest(prompt=ids(1 + 11 * kind, kind), params=params, ratio=0.1 * kind, **options)


@pytest.fixture(scope="module")
def alone(tiny_engine: Callable[..., Path]) -> Callable[[int], RequestOutput]:
    """What a request of the kind gives in an engine that does nothing else; fewer tokens are the first of these."""
    llm = LLM(tiny_engine("llama"))

    @cache
    def run(kind: int) -> RequestOutput:
        wanted = request(kind, 110)
        if wanted.document is None:
            return llm.generate([wanted.prompt], wanted.params, ratio=wanted.ratio)[0]
        with llm.compress(wanted.document, ratio=wanted.ratio) as context:
            return llm.generate([wanted.prompt], wanted.params, context=context)[0]

    return run


def check(ticket: Ticket, wanted: RequestOutput, tokens: int) -> RequestOutput:
    """Its pieces are its output, and that is what it gives alone."""
    pieces = list(ticket)
    output = ticket.result(60)
    assert "".join(piece.text for piece in pieces) == output.text
    assert [t for piece in pieces for t in piece.token_ids] == output.token_ids
    assert output.token_ids == wanted.token_ids[: len(output.token_ids)]
    if output.finish_reason == "length":
        assert len(output.token_ids) == tokens
    return output


@given(
    load=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 110), st.integers(0, 1), st.integers(0, 9)), min_size=3, max_size=8
    ),
    overcommit=st.sampled_from([0.0, 0.5, 1.0]),
    prefill_tokens=st.sampled_from([1, 40, 1000]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_gives_what_it_gives_alone(
    engine: PacedEngine,
    alone: Callable[[int], RequestOutput],
    load: list[tuple[int, int, int, int]],
    overcommit: float,
    prefill_tokens: int,
) -> None:
    """Kinds, lengths, priorities, and some that are cancelled; the cache's books are checked after every step."""
    with engine.service(overcommit=overcommit, prefill_tokens_per_step=prefill_tokens, aging_seconds=0.05) as service:
        with engine.held():
            tickets = [service.submit(request(kind, tokens, priority=priority)) for kind, tokens, priority, _ in load]
        for ticket, (*_, fate) in zip(tickets, load, strict=True):
            if fate == 0:
                ticket.cancel()
        outputs = [check(t, alone(kind), tokens) for t, (kind, tokens, *_) in zip(tickets, load, strict=True)]
        metrics = service.metrics()
    assert metrics.preemptions == sum(output.stats.preemptions for output in outputs)
    assert metrics.preemptions == 0 or overcommit > 0
    assert metrics.decode_tokens == sum(len(output.token_ids) for output in outputs)
    assert metrics.finished["error"] == 0


def test_the_last_in_order_gives_way_and_comes_back(engine: PacedEngine, alone: Callable[[int], RequestOutput]) -> None:
    """Four requests of seven pages each, in a pool of eight; the first never waits, and no token is counted twice."""
    kinds = (0, 1, 5, 4)
    for overcommit in (1.0, 0.0):
        with engine.service(overcommit=overcommit) as service:
            with engine.held():
                tickets = [service.submit(request(kind, 110)) for kind in kinds]
            outputs = [check(t, alone(kind), 110) for t, kind in zip(tickets, kinds, strict=True)]
            metrics = service.metrics()
        preemptions = [output.stats.preemptions for output in outputs]
        assert metrics.preemptions == sum(preemptions)
        assert metrics.decode_tokens == 440
        assert metrics.inter_token_seconds.count == 436
        assert all(output.stats.decode_steps == 109 for output in outputs)
        if overcommit:
            assert preemptions[0] == 0
            assert all(preemptions[1:])
            assert all(("replay" in o.stats.seconds) == (o is not outputs[0]) for o in outputs)
        else:
            assert preemptions == [0] * 4


@pytest.mark.parametrize("way", ["cancel", "deadline", "release", "close"])
def test_one_that_waits_to_begin_anew_can_end_there(
    engine: PacedEngine, alone: Callable[[int], RequestOutput], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it had given; a context that is released meanwhile stays until its question has ended."""
    with engine.service(overcommit=1.0) as service:
        with engine.held():
            first = service.submit(request(0, 110))
            second = service.submit(request(5, 110, deadline_seconds=600))
        until(lambda: service.metrics().preemptions)
        with engine.held():
            until(lambda: engine.at_gate)
            assert service.metrics().waiting == 1
            assert service.metrics().running == 1
            assert service.metrics().contexts == 1
            if way == "cancel":
                second.cancel()
            elif way == "release":
                service.release_context("c")
            elif way == "deadline":
                monkeypatch.setattr(time, "perf_counter", lambda: time.monotonic() + 1e9)
        if way == "close":
            service.close()
        output = check(second, alone(5), 110)
        assert output.finish_reason == {"cancel": "aborted", "close": "aborted", "release": "length"}.get(way, way)
        assert len(output.token_ids) > 10
        check(first, alone(0), 110)


def test_what_is_reserved_at_the_start(engine: PacedEngine) -> None:
    """n - floor(f * n) tokens of a tail of n, but no less than a question and one decode step."""
    llm = engine.llm
    with llm.compress(DOCUMENT, ratio=0.5) as context:
        for f, max_tokens, length, wanted in (
            (0.0, 101, 0, 100),
            (0.25, 101, 0, 75),
            (1.0, 101, 0, 1),
            (1.0, 1, 0, 0),
            (0.5, 61, 20, 40),
            (1.0, 61, 20, 21),
            (1.0, 1, 20, 20),
        ):
            llm._scheduler.policy = Policy(overcommit=f)
            params = SamplingParams(max_tokens=max_tokens)
            if length:
                (made,) = llm._requests.generation([ids(length)], params, None, context, False, False)
            else:
                (made,) = llm._requests.generation([ids(9)], params, 0.5, None, False, False)
            llm._scheduler.add(made)
            assert made.tail_reserve == wanted
            llm._scheduler.finish(made, "aborted")
    llm._scheduler.policy = Policy()
