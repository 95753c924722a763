# SPDX-License-Identifier: Apache-2.0
"""The service: whatever comes or goes beside it, a request gets what it gets alone, and all memory comes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.metrics import Histogram
from hubkv_trt.runtime.service import QueueFullError, ServiceClosedError
from hubkv_trt.runtime.stream import Increment
from hubkv_trt.runtime.ticket import ServiceRequest, Ticket
from paced_engine import PacedEngine, first_seen, ids, until


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> PacedEngine:
    return PacedEngine(tiny_engine("llama"))


@pytest.fixture(scope="module")
def alone(tiny_engine: Callable[..., Path]) -> Callable[[ServiceRequest], Any]:
    """What a request gives in an engine that does nothing else."""
    llm = LLM(tiny_engine("llama"))
    return lambda r: llm.generate([r.prompt], r.params, ratio=r.ratio)[0]


def request(length: int = 20, seed: int = 0, tokens: int = 6, ratio: float = 0.5, **options: Any) -> ServiceRequest:
    sampling = options.pop("sampling", {})
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
    return ServiceRequest(prompt=ids(length, seed), params=params, ratio=ratio, **options)


def endless(**options: Any) -> ServiceRequest:
    return request(tokens=900, **options)


# ---- what a request gets -----------------------------------------------------------------------------------------


def varied(seed: int) -> ServiceRequest:
    """Requests of all kinds."""
    rng = random.Random(seed)
    sampling: dict[str, Any] = {}
    if rng.random() < 0.7:
        sampling = {"temperature": rng.choice([0.5, 1.0, 3.0]), "seed": seed, "top_p": rng.choice([0.6, 0.95, 1.0])}
        sampling["top_k"] = rng.choice([0, 0, 7])
    if rng.random() < 0.3:
        sampling["stop"] = ("e", "zq")
    return request(
        rng.choice([1, 5, 40, 120, 300]),
        seed,
        rng.choice([1, 2, 9, 25]),
        rng.choice([0.0, 0.3, 0.5, 0.75, 0.9]),
        sampling=sampling,
        stream=rng.random() < 0.8,
        priority=rng.choice([0, 0, 1]),
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_every_request_what_it_gets_alone(
    engine: PacedEngine, alone: Callable[[ServiceRequest], Any], seed: int
) -> None:
    requests = [varied(100 * seed + i) for i in range(24)]
    wanted = [alone(r) for r in requests]
    results: dict[int, tuple[list[Increment], Any]] = {}

    with engine.service(prefill_tokens_per_step=random.Random(seed).choice([1, 64, 1000])) as service:

        def client(number: int) -> None:
            rng = random.Random(10 * seed + number)
            tickets: list[tuple[int, Ticket]] = []
            for index in range(number, len(requests), 3):
                tickets.append((index, service.submit(requests[index])))
                if rng.random() < 0.4:
                    threading.Event().wait(rng.random() * 0.03)
                if rng.random() < 0.3:
                    rng.choice(tickets)[1].cancel()
            for index, ticket in tickets:
                results[index] = list(ticket), ticket.result(30)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        metrics = service.metrics()

    assert len(results) == len(requests)
    for index, (increments, output) in results.items():
        whole = wanted[index]
        assert "".join(i.text for i in increments) == output.text
        assert [t for i in increments for t in i.token_ids] == output.token_ids
        assert [i.output for i in increments] == [None] * (len(increments) - 1) + [output]
        if output.finish_reason == "aborted":
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        else:
            assert (output.text, output.token_ids, output.finish_reason) == (
                whole.text, whole.token_ids, whole.finish_reason,
            )  # fmt: skip
    assert sum(metrics.finished.values()) == len(requests)
    assert metrics.finished["error"] == 0
    started = [output for _, output in results.values() if output.token_ids]
    assert metrics.decode_tokens == sum(len(output.token_ids) for output in started)
    assert metrics.first_token_seconds.count == len(started)
    assert metrics.inter_token_seconds.count == metrics.decode_tokens - len(started)
    assert metrics.prefill_tokens == sum(output.stats.prompt_tokens for output in started)
    assert sum(metrics.rows_kept.values()) == sum(int(output.stats.rows.sum()) for output in started)


def test_a_request_that_is_not_streamed_gives_one_piece(engine: PacedEngine) -> None:
    with engine.service() as service:
        (piece,) = service.submit(request(stream=False))
        assert piece.output is not None
        assert piece.text == piece.output.text


def test_a_callback_gets_the_pieces_and_one_that_raises_ends_only_its_own_request(engine: PacedEngine) -> None:
    def broken(increment: Increment) -> None:
        raise OSError("the client has gone")

    with engine.service() as service:
        pieces: list[Increment] = []
        good = service.submit(request(seed=1, tokens=20), pieces.append)
        bad = service.submit(endless(seed=2), broken)
        output = good.result(30)
        assert output.finish_reason == "length"
        assert pieces[-1].output is output
        assert bad.result(30).finish_reason == "aborted"


def test_bad_requests_are_refused_by_the_name_of_the_field(engine: PacedEngine) -> None:
    with engine.service() as service:
        for options, field in [
            ({"prompt": []}, "prompt"),
            ({"prompt": [1, 10**6]}, "prompt"),
            ({"prompt": ids(600)}, "prompt"),
            ({"prompt": "a\udcffb"}, "prompt"),
            ({"prompt": "x", "ratio": 1.5}, "ratio"),
        ]:
            with pytest.raises(ValueError, match=f"^{field}: "):
                service.submit(ServiceRequest(**options))
    for options, field in [
        ({}, "prompt"),
        ({"prompt": "x", "priority": 0.5}, "priority"),
        ({"prompt": "x", "deadline_seconds": 0}, "deadline_seconds"),
        ({"prompt": "x", "document": "y"}, "document"),
        ({"prompt": "x", "context_id": ""}, "context_id"),
        ({"prompt": "x", "context_id": "c", "ratio": 0.5}, "ratio"),
        ({"prompt": "x", "params": {}}, "params"),
    ]:
        with pytest.raises(ValueError, match=f"^{field}: "):
            ServiceRequest(**options)
    for name, value in (
        ("max_waiting", 0),
        ("prefill_tokens_per_step", 0),
        ("aging_seconds", 0),
        ("overcommit", -0.1),
        ("overcommit", 2),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "), engine.service(**{name: value}):
            pass


# ---- when it gets it -----------------------------------------------------------------------------------------------


def test_a_higher_priority_goes_first_for_as_long_as_it_is_worth(engine: PacedEngine) -> None:
    for aging, order in ((100.0, [30, 10, 20]), (1e-9, [10, 20, 30])):
        with engine.service(aging_seconds=aging) as service:
            with engine.held():
                tickets = [service.submit(request(3))]
                until(lambda: engine.at_gate)
                tickets += [service.submit(request(n, seed=n, priority=p)) for n, p in ((10, 0), (20, 0), (30, 1))]
            for ticket in tickets:
                ticket.result(30)
        assert first_seen(engine.steps) == [3, *order]


def test_a_large_request_is_not_overtaken_by_small_ones(tiny_engine: Callable[..., Path]) -> None:
    ledger = LLM(tiny_engine("llama")).cache.ledger
    room = ledger.segment_bytes(500 * ledger.model.num_rows_per_token) + 2048
    engine = PacedEngine(tiny_engine("llama"), cache_bytes=room + ledger.tail_bytes(512), tail_tokens=512)
    with engine.service() as service:
        first = [service.submit(request(40, seed=i, tokens=30, ratio=0.0)) for i in range(2)]
        large = service.submit(request(500, tokens=3, ratio=0.0))
        later = [service.submit(request(10, seed=i, tokens=30, ratio=0.0)) for i in range(4)]
        for ticket in (*first, large, *later):
            assert ticket.result(60).finish_reason == "length"
    assert first_seen(engine.steps) == [40, 40, 500, 10, 10, 10, 10]


def test_the_queue_is_limited_and_a_refusal_says_so(engine: PacedEngine) -> None:
    with engine.service(max_waiting=3) as service:
        with engine.held():
            tickets = [service.submit(request(seed=i)) for i in range(3)]
            with pytest.raises(QueueFullError, match="queue full: 3 requests wait"):
                service.submit(request())
            assert service.metrics().refused == 1
        assert [t.result(30).finish_reason for t in tickets] == ["length"] * 3
        until(lambda: service.metrics().waiting == 0)
        assert service.submit(request()).result(30).finish_reason == "length"


# ---- how it ends ---------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(
    engine: PacedEngine, alone: Callable[[ServiceRequest], Any]
) -> None:
    with engine.service() as service:
        late = service.submit(endless(seed=4, deadline_seconds=0.05))
        good = service.submit(request(seed=3, tokens=30))
        assert late.result(30).finish_reason == "deadline"
        assert good.result(30).token_ids == alone(request(seed=3, tokens=30)).token_ids
        with engine.held():
            service.submit(request(3))
            until(lambda: engine.at_gate)
            queued = service.submit(request(seed=5, deadline_seconds=0.01))
            threading.Event().wait(0.02)
        assert queued.result(30).finish_reason == "deadline"
        assert queued.result().token_ids == []
        assert service.metrics().finished["deadline"] == 2


def test_memory_is_back_one_step_after_a_cancellation(engine: PacedEngine) -> None:
    with engine.service() as service:
        ticket = service.submit(endless())
        next(iter(ticket))
        assert service.metrics().running == 1
        assert service.metrics().arena_bytes_reserved > service.metrics().arena_bytes_used > 0
        assert service.metrics().kv_bytes_saved > 0
        with engine.held():
            until(lambda: engine.at_gate)
            ticket.cancel()
            before = len(engine.steps)
        assert ticket.result(30).finish_reason == "aborted"
        assert len(engine.steps) <= before + 1
        assert service.metrics().arena_bytes_reserved == 0
        ticket.cancel()  # of a finished one: nothing
        assert service.submit(request()).result(30).finish_reason == "length"


def test_closing_ends_every_stream_and_gives_everything_back(engine: PacedEngine) -> None:
    with engine.service() as service:
        tickets = [service.submit(endless(seed=i)) for i in range(7)]  # more than run together
        next(iter(tickets[0]))
        threading.Timer(0.05, service.close).start()
        for ticket in tickets:
            assert list(ticket)[-1].output.finish_reason == "aborted"
        with pytest.raises(ServiceClosedError, match="closed"):
            service.submit(request())
        service.close()
    (output,) = engine.llm.generate(ids(20), SamplingParams(max_tokens=2))  # the engine is its owner's again
    assert output.token_ids


def test_a_loop_that_fails_answers_everybody(engine: PacedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the scheduler is broken")

    with engine.service() as service:
        tickets = [service.submit(endless(seed=i)) for i in range(3)]
        next(iter(tickets[0]))
        monkeypatch.setattr(engine.llm, "step", fail)
        for ticket in tickets:
            with pytest.raises(ServiceClosedError, match="the scheduler is broken"):
                ticket.result(30)
        with pytest.raises(ServiceClosedError, match="the scheduler is broken"):
            service.submit(request())


def test_buckets_add_up() -> None:
    histogram = Histogram(bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert (histogram.count, histogram.sum) == (4, 5.5)
