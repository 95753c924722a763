# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for beside its prompt, end to end on tiny models: against transformers' ``generate``, alone
and in a batch, over a context, in streams and in the service."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.service import Service
from hubkv_trt.runtime.ticket import ServiceRequest
from paced_engine import ids
from recorder import Recorder

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def tiny(tiny_engine: Callable[..., Path]) -> LLM:
    return LLM(tiny_engine("llama"))


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_those_of_transformers(tiny: LLM, reference: Any, seed: int) -> None:
    prompt = ids(40, seed)
    (free,) = tiny.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True), ratio=0.0)
    bad = [chr(33 + t - 3) for t in free.token_ids[:3] if 3 <= t < 97]  # bytes that are letters of their own
    (output,) = tiny.generate(
        prompt,
        SamplingParams(max_tokens=24, min_tokens=24, repetition_penalty=1.4, bad_words=tuple(bad)),
        ratio=0.0,
    )
    words = [tiny.tokenizer(text)["input_ids"] for word in bad for text in (word, " " + word)]
    with torch.no_grad():
        wanted = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            repetition_penalty=1.4,
            pad_token_id=0,
            **({"bad_words_ids": words} if words else {}),
        )
    assert output.token_ids == wanted[0, len(prompt) :].tolist() != free.token_ids


def test_a_question_counts_its_document(tiny: LLM) -> None:
    """Without compression it is the prompt that the two are together."""
    document, question = ids(80, 1), ids(9, 2)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **PENALTIES)
    (whole,) = tiny.generate(document + question, params, ratio=0.0)
    with tiny.compress(document, ratio=0.0) as context:
        (asked,) = tiny.generate(question, params, context=context)
    assert asked.token_ids == whole.token_ids
    (free,) = tiny.generate(document + question, SamplingParams(max_tokens=20, ignore_eos=True), ratio=0.0)
    assert len(set(whole.token_ids)) > len(set(free.token_ids))


def test_bad_words_do_not_come(tiny: LLM) -> None:
    prompt = ids(50, 3)
    for length in (1, 2):
        (free,) = tiny.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=2))
        letters = free.text.encode("ascii", "ignore").decode()
        bad = tuple(sorted({letters[i : i + length] for i in range(0, len(letters) - 1, 2)}))[:8]
        assert bad
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=2, bad_words=bad)
        (output,) = tiny.generate(prompt, params)
        assert all(word not in output.text for word in bad)
        assert any(word in free.text for word in bad)


def test_min_tokens(tiny: LLM) -> None:
    prompt = ids(50, 4)
    (free,) = tiny.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    end = free.token_ids[4]
    asked: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": (end,)}
    (ended,) = tiny.generate(prompt, SamplingParams(**asked))
    assert len(ended.token_ids) <= 5
    (longer,) = tiny.generate(prompt, SamplingParams(**asked, min_tokens=12))
    assert end not in longer.token_ids[:12]
    assert len(longer.token_ids) > 12


def test_a_stop_text_within_min_tokens_is_text(tiny: LLM) -> None:
    prompt, free = ids(50, 5), SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=1)
    (output,) = tiny.generate(prompt, free)
    ends = [i for i, t in enumerate(output.token_ids) if tiny.tokenizer.decode([t]) == "e" or i == 3]
    letter = tiny.tokenizer.decode([output.token_ids[ends[0]]])
    later = [i for i, t in enumerate(output.token_ids) if tiny.tokenizer.decode([t]) == letter]
    for least in (later[0], later[0] + 1, 40):
        params = SamplingParams(
            max_tokens=40, min_tokens=least, ignore_eos=True, temperature=1.0, seed=1, stop=(letter,)
        )
        pieces = list(tiny.stream(prompt, params))
        stopped = next((i for i in later if i >= least), None)
        count = 40 if stopped is None else stopped + 1
        last = pieces[-1].output
        assert last is not None
        assert last.token_ids == output.token_ids[:count]
        assert last.finish_reason == ("length" if stopped is None else "stop")
        assert "".join(piece.text for piece in pieces) == last.text
        assert (letter in last.text) == (least > later[0])


def test_log_probs(tiny: LLM) -> None:
    """The log softmax of the model's logits at each token, whatever was done to them; streams give the same."""
    recorder = Recorder(tiny)
    params = SamplingParams(max_tokens=15, ignore_eos=True, temperature=1.5, seed=3, return_log_probs=True, **PENALTIES)
    try:
        (output,) = tiny.generate(ids(60, 6), params)
    finally:
        tiny._executor = recorder._executor
    logits = torch.cat(recorder.logits).double().log_softmax(-1)
    assert output.output_log_probs is not None
    assert output.cum_log_probs is not None
    wanted = logits[torch.arange(15), torch.tensor(output.token_ids)]
    torch.testing.assert_close(torch.tensor(output.output_log_probs, dtype=torch.float64), wanted, rtol=0, atol=1e-5)
    assert math.isclose(output.cum_log_probs, sum(output.output_log_probs))
    pieces = list(tiny.stream(ids(60, 6), params))
    assert [p for piece in pieces for p in piece.output_log_probs or []] == output.output_log_probs
    assert all(len(piece.output_log_probs or []) == len(piece.token_ids) for piece in pieces)
    assert pieces[-1].cum_log_probs == output.cum_log_probs
    (plain,) = tiny.generate(ids(60, 6), SamplingParams(max_tokens=2))
    assert (plain.output_log_probs, plain.cum_log_probs) == (None, None)


ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "return_log_probs": True},
    {},
    {"temperature": 1.2, "seed": 1, "min_p": 0.2, "return_log_probs": True},
    {"temperature": 1.0, "seed": 2, "top_k": 30, "frequency_penalty": 0.7, "presence_penalty": -0.2},
    {"bad_words": ("a", "e", "in"), "min_tokens": 10},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "bad_words": ("!",), "return_log_probs": True, **PENALTIES},
]


def test_a_request_gives_the_same_alone_in_a_batch_and_in_the_service(tiny: LLM) -> None:
    prompts = [ids(n, n) for n in (30, 77, 5, 120, 64, 200)]
    params = [SamplingParams(max_tokens=18 - i, **asked) for i, asked in enumerate(ASKED)]

    def told(output: Any) -> tuple[Any, ...]:
        return output.token_ids, output.text, output.finish_reason, output.output_log_probs, output.cum_log_probs

    alone = [told(tiny.generate(prompt, p)[0]) for prompt, p in zip(prompts, params, strict=True)]
    assert [told(output) for output in tiny.generate(prompts, params)] == alone
    with Service(tiny) as service:
        tickets = [service.submit(ServiceRequest(prompt, p)) for prompt, p in zip(prompts, params, strict=True)]
        assert [told(ticket.result(60)) for ticket in tickets] == alone


def test_a_question_in_the_service(tiny: LLM) -> None:
    """It counts its document as in a call, and what is wrong with it is told before the document is compressed."""
    document = "A document that repeats itself, as documents do. " * 5
    params = SamplingParams(max_tokens=16, bad_words=("a", "e"), min_tokens=16, return_log_probs=True, **PENALTIES)
    with tiny.compress(document, ratio=0.5) as context:
        (wanted,) = tiny.generate("Does it?", params, context=context)
    broken = SamplingParams(bad_words=("\udcff",))
    with Service(tiny) as service:
        with pytest.raises(ValueError, match=r"^bad_words: "):
            service.submit(ServiceRequest("Does it?", broken, 0.5, context_id="c", document=document))
        assert not service.has_context("c")
        output = service.submit(ServiceRequest("Does it?", params, 0.5, context_id="c", document=document)).result(60)
    assert (output.text, output.output_log_probs) == (wanted.text, wanted.output_log_probs)


def test_requests_that_rule_everything_out_are_refused(tiny: LLM) -> None:
    every = tuple(range(tiny.config.model.vocab_size))
    with pytest.raises(ValueError, match=r"^stop_token_ids: "):
        tiny.generate(ids(5), SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=every))
    with pytest.raises(ValueError, match=r"^bad_words: "):
        tiny.generate(ids(5), SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=every, bad_words=("x",)))
    with pytest.raises(ValueError, match=r"^bad_words: .*cannot be tokenized"):
        tiny.generate(ids(5), SamplingParams(bad_words=("\udcff",)))
    (output,) = tiny.generate(ids(5), SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=(10**9,)))
    assert len(output.token_ids) == 3  # a token that there is not
