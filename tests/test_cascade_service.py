# SPDX-License-Identifier: Apache-2.0
"""HARD-KV behind a service: requests give what they give alone, and tiers and compressions are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hubkv_trt.config import HardKVConfig
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.segment import Segment
from hubkv_trt.runtime.sequence import Sequence
from hubkv_trt.runtime.service import Service
from hubkv_trt.runtime.ticket import ServiceRequest
from paced_engine import ids, until

CASCADE = HardKVConfig(p=0.8, query_window=8, interval=16, recent=16, layer_budget=64, upper_budget=96)
LONG = SamplingParams(max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_engine: Callable[..., Path]) -> LLM:
    return LLM(tiny_engine("llama"), decode_compression=CASCADE, cache_bytes=64 << 20)


def test_requests_together(llm: LLM) -> None:
    own = dataclasses.replace(LONG, decode_compression=CASCADE.replace(p=0.4, layer_budget=24))
    none = dataclasses.replace(LONG, decode_compression=False)
    asked = [(ids(60), LONG), (ids(90, 1), own), (ids(30, 2), none)]
    alone = [llm.generate(prompt, params)[0] for prompt, params in asked]
    with llm.compress(ids(120, 3)) as context:
        alone += llm.generate(ids(40, 4), LONG, context=context)
    idle = llm.cache.reserved_bytes
    with Service(llm) as service:
        tickets = [service.submit(ServiceRequest(prompt, params)) for prompt, params in asked]
        tickets.append(service.submit(ServiceRequest(ids(40, 4), LONG, context_id="c", document=ids(120, 3))))
        together = [ticket.result(60) for ticket in tickets]
        metrics = service.metrics()
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.stats.condensations for o in together] == [o.stats.condensations for o in alone]
    assert metrics.compressions == sum(o.stats.condensations for o in alone) > 0
    assert metrics.compression_seconds == pytest.approx(sum(o.stats.seconds.get("condense", 0) for o in together))
    assert llm.cache.reserved_bytes == idle
    llm.cache.audit()


def test_a_compression_that_fails_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(ids(60), LONG), (ids(90, 1), LONG), (ids(30, 2), LONG)]
    alone = [llm.generate(prompt, params)[0] for prompt, params in asked]
    idle, condense = llm.cache.reserved_bytes, llm._executor.condense  # type: ignore[attr-defined]

    def failing(sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
        rows = condense(sequence, moved, target)
        if len(sequence.token_ids) == 90 and sequence.stats.condensations == 1:
            raise RuntimeError("a kernel failed")
        return rows

    monkeypatch.setattr(llm._executor, "condense", failing)
    with Service(llm) as service:
        tickets = [service.submit(ServiceRequest(prompt, params)) for prompt, params in asked]
        with pytest.raises(RuntimeError, match="a kernel failed"):
            tickets[1].result(60)
        together = [tickets[i].result(60) for i in (0, 2)]
        metrics = service.metrics()
    assert [o.token_ids for o in together] == [alone[i].token_ids for i in (0, 2)]
    assert (metrics.finished["error"], metrics.running) == (1, 0)
    assert metrics.compressions == 1 + sum(o.stats.condensations for o in together)
    assert llm.cache.reserved_bytes == idle
    llm.cache.audit()


def test_tiers_are_what_the_requests_hold(llm: LLM) -> None:
    ledger = llm.cache.ledger
    with Service(llm) as service:
        ticket = service.submit(ServiceRequest(ids(60), dataclasses.replace(LONG, max_tokens=400)))
        until(lambda: service.metrics().compressions >= 2)
        metrics = service.metrics()
        ticket.cancel()
        ticket.result(30)
        until(lambda: service.metrics().running == 0)
        after = service.metrics()
    heads = ledger.model.num_rows_per_token
    assert heads * CASCADE.recent <= metrics.tier_rows["dense"] <= heads * CASCADE.tail_tokens
    assert 0 < metrics.tier_rows["sparse"] <= heads * CASCADE.layer_budget
    assert 0 < metrics.tier_bytes["dense"] <= ledger.tail_bytes(CASCADE.tail_tokens)
    staging = ledger.segment_bytes(CASCADE.rows(ledger.model))
    assert metrics.tier_bytes["sparse"] == staging
    assert metrics.arena_bytes_used == sum(metrics.tier_bytes.values()) + staging
    assert after.tier_rows == after.tier_bytes == {"dense": 0, "sparse": 0}


def test_a_question_is_refused_before_its_document_is_compressed(llm: LLM) -> None:
    params = dataclasses.replace(LONG, decode_compression=CASCADE.replace(layer_budget=65))
    with Service(llm) as service:
        with pytest.raises(ValueError, match=r"^layer_budget: 65 is not at most 64"):
            service.submit(ServiceRequest("Who?", params, context_id="c", document=ids(50)))
        assert not service.has_context("c")


def test_others_give_way_but_not_those_that_are_compressed(tiny_engine: Callable[..., Path]) -> None:
    """Pages for 128 tokens: the tails of two requests alone would fill them."""
    llm = LLM(tiny_engine("llama"), decode_compression=CASCADE, cache_bytes=64 << 20, tail_tokens=128)
    none = dataclasses.replace(LONG, decode_compression=False)
    asked = [(ids(20), none), (ids(30, 1), LONG), (ids(40, 2), none), (ids(50, 3), LONG)]
    alone = [llm.generate(prompt, params)[0] for prompt, params in asked]
    with Service(llm, overcommit=1.0) as service:
        tickets = [service.submit(ServiceRequest(prompt, params)) for prompt, params in asked]
        together = [ticket.result(60) for ticket in tickets]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    preemptions = [o.stats.preemptions for o in together]
    assert preemptions[1] == preemptions[3] == 0
    assert preemptions[0] + preemptions[2] > 0
    llm.cache.audit()
