# SPDX-License-Identifier: Apache-2.0
"""Contexts of the service: compressed once, asked often, shared, and given back when nobody needs them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.runtime.cache import CacheFullError
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.scheduler import Phase, Policy
from hubkv_trt.runtime.service import Service, UnknownContextError
from hubkv_trt.runtime.ticket import ServiceRequest
from paced_engine import PacedEngine, first_seen, ids, until


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> PacedEngine:
    return PacedEngine(tiny_engine("llama"))


def document(name: str, length: int = 100, seed: int = 0, **options: Any) -> ServiceRequest:
    return ServiceRequest(document=ids(length, seed), context_id=name, **{"ratio": 0.5, **options})


def question(name: str, length: int = 5, seed: int = 9, tokens: int = 6, **options: Any) -> ServiceRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return ServiceRequest(prompt=ids(length, seed), context_id=name, params=params, **options)


def asked_alone(engine: Path, length: int, seed: int, questions: list[ServiceRequest]) -> list[list[int]]:
    llm = LLM(engine)
    with llm.compress(ids(length, seed), ratio=0.5) as context:
        return [llm.generate([q.prompt], q.params, context=context)[0].token_ids for q in questions]


def test_questions_share_a_context_and_get_what_they_get_alone(
    engine: PacedEngine, tiny_engine: Callable[..., Path]
) -> None:
    questions = [question("a", length=n, seed=n, tokens=12) for n in (1, 3, 4, 9, 17, 60)]
    wanted = asked_alone(tiny_engine("llama"), 100, 0, questions)
    with engine.service() as service:
        with engine.held():
            compressed = service.submit(document("a"))
            assert service.has_context("a")
            tickets = [service.submit(q) for q in questions]  # before the document is compressed
        output = compressed.result(30)
        assert (output.text, output.finish_reason) == ("", "stop")
        assert output.stats.rows is not None
        assert [t.result(30).token_ids for t in tickets] == wanted
        assert service.submit(document("a")).result(30).stats.rows is output.stats.rows  # known: nothing is done
        metrics = service.metrics()
        assert (metrics.contexts, metrics.prefill_tokens) == (1, 100)
        assert metrics.question_tokens == sum(len(q.prompt) for q in questions)  # type: ignore[arg-type]
        assert metrics.kv_bytes_kept == metrics.arena_bytes_used == output.stats.bytes_kept
        assert first_seen(engine.steps) == [100]


def test_a_document_and_its_question_may_come_in_one_request(
    engine: PacedEngine, tiny_engine: Callable[..., Path]
) -> None:
    both = question("a", document=ids(100), ratio=0.5)
    wanted = asked_alone(tiny_engine("llama"), 100, 0, [both])
    with engine.service() as service:
        with engine.held():
            tickets = [service.submit(both) for _ in range(3)]
        assert [t.result(30).token_ids for t in tickets] == wanted * 3
        assert first_seen(engine.steps) == [100]


def test_in_a_chat_each_question_ends_the_documents_turn(tiny_engine: Callable[..., Path]) -> None:
    llm = LLM(tiny_engine("llama"))
    llm.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}!"
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with llm.compress("a document\n", chat=True, ratio=0.5) as context:
        (wanted,) = llm.generate("what?", params, context=context)
    with Service(llm) as service:
        request = ServiceRequest(document="a document\n", chat=True, ratio=0.5, context_id="c")
        service.submit(request)
        ticket = service.submit(ServiceRequest(prompt="what?", params=params, context_id="c"))
        assert ticket.result(30).token_ids == wanted.token_ids
    assert wanted.stats.prompt_tokens > len("what?")


def test_an_id_stands_for_one_document(engine: PacedEngine) -> None:
    with engine.service() as service:
        with pytest.raises(UnknownContextError, match=r"^context_id: 'a' is not known"):
            service.submit(question("a"))
        service.submit(document("a")).result(30)
        for other in (document("a", seed=1), document("a", ratio=0.75)):
            with pytest.raises(ValueError, match=r"^context_id: 'a' is not another than that"):
                service.submit(other)
        assert service.release_context("a")
        assert not service.release_context("a")
        with pytest.raises(UnknownContextError):
            service.submit(question("a"))
        until(lambda: service.metrics().contexts == 0)
        assert service.submit(document("a", seed=1)).result(30).finish_reason == "stop"


def test_a_released_context_stays_until_its_last_question_has_ended(engine: PacedEngine) -> None:
    with engine.service() as service:
        service.submit(document("a"))
        running = service.submit(question("a", tokens=300))
        next(iter(running))
        service.release_context("a")
        service.submit(document("b", length=30)).result(30)
        assert service.metrics().contexts == 2
        running.cancel()
        until(lambda: service.metrics().contexts == 1)


def test_the_context_that_was_not_used_for_longest_makes_room(tiny_engine: Callable[..., Path]) -> None:
    llm = LLM(tiny_engine("llama"))
    ledger = llm.cache.ledger
    one = ledger.segment_bytes(200 * ledger.model.num_rows_per_token)
    engine = PacedEngine(tiny_engine("llama"), cache_bytes=3 * one + ledger.tail_bytes(512), tail_tokens=512)
    with engine.service() as service:
        for index, name in enumerate("abc"):
            service.submit(document(name, 200, index, ratio=0.0)).result(30)
        assert service.metrics().contexts == 3
        service.submit(question("a")).result(30)
        service.submit(document("d", 200, 4, ratio=0.0)).result(30)
        assert [service.has_context(name) for name in "abcd"] == [True, False, True, True]
        assert service.metrics().evictions == 1

        # one that is in use never goes: the new document waits for it
        with engine.held():
            tickets = [service.submit(question(name, tokens=40)) for name in "acd"]
            waiting = service.submit(document("e", 200, 5, ratio=0.0))
        assert [t.result(30).finish_reason for t in tickets] == ["length"] * 3
        assert waiting.result(30).finish_reason == "stop"
        assert service.metrics().evictions == 2
        assert service.metrics().contexts == 3
        assert service.has_context("e")

        # a document that stands before questions over what holds its room lets them go first
        names = [name for name in "acde" if service.has_context(name)]
        with engine.held():
            first = service.submit(document("f", 200, 6, ratio=0.0, priority=1))
            tickets = [service.submit(question(name)) for name in names]
        assert [t.result(30).finish_reason for t in (*tickets, first)] == ["length"] * 3 + ["stop"]


def test_a_document_that_nobody_waits_for_is_dropped(engine: PacedEngine) -> None:
    with engine.service() as service:
        blocking = service.submit(ServiceRequest(prompt=ids(10), params=SamplingParams(max_tokens=100)))
        with engine.held():
            tickets = [service.submit(document("a")), service.submit(question("a"))]
            for ticket in tickets:
                ticket.cancel()
        assert [t.result(30).finish_reason for t in tickets] == ["aborted"] * 2
        until(lambda: not service.has_context("a"))
        blocking.cancel()


def test_a_document_that_fails_fails_its_questions(engine: PacedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("scores: 3 of 9 values are NaN or infinite")

    with engine.service() as service:
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm._executor, "prefill_by_layers", fail)
            with engine.held():
                tickets = [service.submit(document("a")), service.submit(question("a"))]
            for ticket in tickets:
                with pytest.raises(ValueError, match="scores: 3 of 9"):
                    ticket.result(30)
        assert not service.has_context("a")
        assert service.submit(document("a")).result(30).finish_reason == "stop"
        with pytest.raises(ValueError, match=r"^prompt: "):  # too long behind the document: found when it is asked
            service.submit(question("a", length=1000)).result(30)


def test_questions_run_between_decode_steps_too(engine: PacedEngine) -> None:
    with engine.service(prefill_tokens_per_step=4) as service:
        service.submit(document("a")).result(30)
        with engine.held():
            tickets = [service.submit(question("a", length=8, seed=i, tokens=9)) for i in range(4)]
        for ticket in tickets:
            ticket.result(30)
    phases = [phase for phase, _ in engine.steps[1:]]
    starts = [i for i, phase in enumerate(phases) if phase is Phase.QUESTION]
    assert len(starts) == 4  # one by one: what a question gives does not depend on others
    assert all(later - earlier > 8 // 4 for earlier, later in pairwise(starts))


def test_the_first_of_the_queue_does_not_fail_while_requests_are_on_their_way(
    tiny_engine: Callable[..., Path],
) -> None:
    ledger = LLM(tiny_engine("llama")).cache.ledger
    one = ledger.segment_bytes(200 * ledger.model.num_rows_per_token)
    llm = LLM(tiny_engine("llama"), cache_bytes=one + ledger.tail_bytes(64), tail_tokens=64)
    on_their_way = True
    llm._scheduler.policy = Policy(expecting=lambda: on_their_way)
    with llm.compress(ids(200), ratio=0.0):
        (first,) = llm._requests.generation([ids(200)], SamplingParams(max_tokens=4), 0.0, None, False, False)
        llm._scheduler.add(first)
        assert [llm.step()[0] for _ in range(5)] == [Phase.IDLE] * 5
        assert not first.finished
        on_their_way = False
        while not first.finished:
            assert llm.step()[0] is Phase.IDLE
        assert isinstance(first.error, CacheFullError)
