# SPDX-License-Identifier: Apache-2.0
"""Generating from a compacted cache equals transformers: the same tokens without compression, and with it the logits of
a forward in which the evicted pairs are masked, head by head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hubkv_trt.config import HubKVConfig, Scope
from hubkv_trt.runtime.llm import LLM, SamplingParams
from masked_reference import kept_mask, masked_logits
from recorder import Recorder

PROMPTS = [
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "List three fruits and say what colour each of them has.",
]


@pytest.fixture(scope="module")
def demo(demo_engine: Path) -> LLM:
    return LLM(demo_engine, cache_bytes=1 << 30)


@pytest.fixture(scope="module")
def text_ids(demo_tokenizer: Any) -> list[int]:
    """A real text of 420 tokens."""
    import pydoc

    return demo_tokenizer(pydoc.render_doc("collections", renderer=pydoc.plaintext))["input_ids"][:420]


def generated(llm: LLM, recorder: Recorder, prompt: list[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits [n, V] that each came from."""
    recorder.clear()
    count = options.pop("max_tokens", 8)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True), **options)
    return output.token_ids, torch.cat(recorder.logits)


def kept_by(recorder: Recorder, llm: LLM, num_tokens: int) -> torch.Tensor:
    model = llm.config.model
    return kept_mask(*recorder.prefills[-1], (model.num_layers, model.num_kv_heads, num_tokens))


# ---- the demo model --------------------------------------------------------------------------------------------------


def test_without_compression_greedy_tokens_are_those_of_transformers(demo: LLM, demo_reference: Any) -> None:
    """Each token is what transformers chooses after those before it; for the last prompt by its own ``generate``."""
    ends = list(demo.config.model.eos_token_ids)
    outputs = demo.generate(PROMPTS, SamplingParams(max_tokens=64), ratio=0.0, chat=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        messages = [{"role": "user", "content": prompt}]
        rendered = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = demo.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = demo_reference(torch.tensor([ids + output.token_ids[:-1]]), use_cache=False).logits[0]
        assert output.token_ids == logits[len(ids) - 1 :].argmax(-1).tolist()
        assert not set(output.token_ids[:-1]) & set(ends)
        assert output.finish_reason == ("stop" if output.token_ids[-1] in ends else "length")
        assert output.finish_reason == "stop" or len(output.token_ids) == 64
        assert output.text == demo.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    with torch.no_grad():
        inputs = torch.tensor([ids])
        wanted = demo_reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=ends,
        )
    assert outputs[-1].token_ids == wanted[0, len(ids) :].tolist()


def test_penalized_greedy_tokens_are_those_of_transformers(demo: LLM, demo_reference: Any, text_ids: list[int]) -> None:
    """With words that the model would say ruled out, and log probabilities of the model's own logits."""
    prompt = text_ids[:120]
    (free,) = demo.generate(prompt, SamplingParams(max_tokens=24), ratio=0.0)
    bad = free.text.split()[:2]
    params = SamplingParams(
        max_tokens=24, min_tokens=24, repetition_penalty=1.2, bad_words=tuple(bad), return_log_probs=True
    )
    (output,) = demo.generate(prompt, params, ratio=0.0)
    assert all(word in free.text and word not in output.text for word in bad)
    with torch.no_grad():
        inputs = torch.tensor([prompt])
        wanted = demo_reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.2,
            bad_words_ids=[demo.tokenizer(text)["input_ids"] for word in bad for text in (word, " " + word)],
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert output.token_ids == wanted.sequences[0, len(prompt) :].tolist()
    log_probs = torch.stack(wanted.logits)[:, 0].log_softmax(-1)[torch.arange(24), output.token_ids]
    torch.testing.assert_close(torch.tensor(output.output_log_probs), log_probs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_compressed_logits_equal_a_masked_forward(
    demo: LLM, demo_reference: Any, text_ids: list[int], ratio: float
) -> None:
    recorder = Recorder(demo)
    prompt = text_ids[:400]
    tokens, logits = generated(demo, recorder, prompt, ratio=ratio, max_tokens=6)
    kept = kept_by(recorder, demo, len(prompt))
    assert abs(1 - kept.float().mean() - ratio) < 1e-3
    wanted = masked_logits(demo_reference, prompt + tokens[:-1], kept)[len(prompt) - 1 :]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)


def test_a_question_over_a_context_equals_a_masked_forward(demo: LLM, demo_reference: Any, text_ids: list[int]) -> None:
    """Several tokens at once (Tq > 1) behind a compacted document, then one at a time."""
    recorder = Recorder(demo)
    document, question = text_ids[:380], text_ids[380:397]
    with demo.compress(document, ratio=0.75) as context:
        kept = kept_by(recorder, demo, len(document))
        tokens, logits = generated(demo, recorder, question, context=context, max_tokens=5)
    wanted = masked_logits(demo_reference, document + question + tokens[:-1], kept)
    torch.testing.assert_close(logits, wanted[len(document) + len(question) - 1 :], rtol=0, atol=1e-3)
    assert demo.cache.held_bytes == 0


# ---- tiny random models: every architecture, every scope -------------------------------------------------------------


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_models_equal_a_masked_forward(
    tiny_engine: Callable[..., Path], tiny_model: Callable[..., Path], architecture: str, scope: Scope
) -> None:
    llm = LLM(tiny_engine(architecture, hubkv=HubKVConfig(scope=scope)))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(architecture), dtype=torch.float32).eval()
    recorder = Recorder(llm)
    ids = torch.randint(3, 250, (170,), generator=torch.Generator().manual_seed(5)).tolist()
    for ratio in (0.0, 0.4, 0.95):
        prompt = ids[:150]
        tokens, logits = generated(llm, recorder, prompt, ratio=ratio, max_tokens=20)
        kept = kept_by(recorder, llm, len(prompt))
        wanted = masked_logits(reference, prompt + tokens[:-1], kept)[len(prompt) - 1 :]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)

        with llm.compress(prompt, ratio=ratio) as context:
            kept = kept_by(recorder, llm, len(prompt))
            tokens, logits = generated(llm, recorder, ids[150:], context=context, max_tokens=3)
        wanted = masked_logits(reference, ids + tokens[:-1], kept)[len(ids) - 1 :]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)
    llm.cache.audit()
    assert llm.cache.held_bytes == 0


def test_a_dense_engine_equals_transformers(tiny_engine: Callable[..., Path], tiny_model: Callable[..., Path]) -> None:
    llm = LLM(tiny_engine("llama", hubkv=None))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    recorder = Recorder(llm)
    prompt = list(range(3, 103))
    tokens, logits = generated(llm, recorder, prompt, max_tokens=20)
    with torch.no_grad():
        wanted = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)


# ---- ways to the same numbers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_engine: Callable[..., Path]) -> LLM:
    return LLM(tiny_engine("llama"))


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_batch_equals_single_runs(tiny: LLM) -> None:
    """Different lengths, ratios and ends; more prompts than run at once, so that sequences join and leave."""
    prompts = [random_ids(n, n) for n in (1, 7, 40, 63, 64, 150, 301, 20, 20)]
    ratios = [0.0, 0.5, 0.3, 0.9, 0.99, 0.75, 0.5, 0.0, 0.7]
    params = [SamplingParams(max_tokens=n) for n in (30, 1, 17, 40, 33, 2, 25, 40, 16)]
    together = tiny.generate(prompts, params, ratio=ratios)
    for prompt, ratio, p, output in zip(prompts, ratios, params, together, strict=True):
        (alone,) = tiny.generate(prompt, p, ratio=ratio)
        assert output.token_ids == alone.token_ids
        assert output.text == alone.text
        assert output.finish_reason == alone.finish_reason
        assert (output.stats.rows == alone.stats.rows).all()
        assert output.stats.bytes_kept == alone.stats.bytes_kept
    assert tiny.cache.held_bytes == 0
    tiny.cache.audit()


def test_extending_token_by_token_equals_at_once(tiny: LLM) -> None:
    recorder = Recorder(tiny)
    with tiny.compress(random_ids(200, 1), ratio=0.6) as context:
        question = random_ids(9, 2)
        tokens, logits = generated(tiny, recorder, question, context=context, max_tokens=40)
        for cut in (1, 7, 16, 39):
            again, at_once = generated(tiny, recorder, question + tokens[:cut], context=context, max_tokens=1)
            assert again == tokens[cut : cut + 1]
            torch.testing.assert_close(at_once[0], logits[cut], rtol=0, atol=1e-4)


def test_questions_over_a_context_equal_the_prompt_asked_alone(tiny: LLM) -> None:
    """Where compression is the same (none), a document compressed once and a prompt with all of it give the same."""
    document = random_ids(120, 3)
    questions = [random_ids(n, 100 + n) for n in (3, 17, 1, 30, 12, 8)]
    params = SamplingParams(max_tokens=24)
    with tiny.compress(document, ratio=0.0) as context:
        over_context = tiny.generate(questions, params, context=context)
    alone = tiny.generate([document + q for q in questions], params, ratio=0.0)
    assert [o.token_ids for o in over_context] == [o.token_ids for o in alone]


def test_prompts_and_questions_over_several_contexts_run_together(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    with tiny.compress(random_ids(90, 6), ratio=0.5) as one, tiny.compress(random_ids(33, 7), ratio=0.2) as other:
        contexts = [one, None, other, one]
        prompts = [random_ids(n, n) for n in (4, 50, 6, 11)]
        together = tiny.generate(prompts, params, context=contexts)
        alone = [tiny.generate(p, params, context=c)[0] for p, c in zip(prompts, contexts, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_questions_asked_together_equal_questions_asked_alone(tiny: LLM) -> None:
    questions = [random_ids(n, 200 + n) for n in (3, 17, 1, 30, 12)]
    params = SamplingParams(max_tokens=24)
    with tiny.compress(random_ids(250, 4), ratio=0.8) as context:
        together = tiny.generate(questions, params, context=context)
        alone = [tiny.generate(q, params, context=context)[0] for q in questions]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
