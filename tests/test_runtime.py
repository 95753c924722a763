# SPDX-License-Identifier: Apache-2.0
"""The runtime's manners: what requests may ask, how they end, and what a stream gives."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.llm import LLM, RequestError, SamplingParams
from paced_engine import ids

# ---- how a request ends ----------------------------------------------------------------------------------------------


def test_a_request_ends_at_max_tokens(tiny: LLM) -> None:
    (output,) = tiny.generate(ids(50), SamplingParams(max_tokens=7, ignore_eos=True))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == output.stats.output_tokens == 7


def test_an_end_token_ends_a_request_and_gives_no_text(tiny: LLM) -> None:
    (free,) = tiny.generate(ids(50), SamplingParams(max_tokens=12, ignore_eos=True))
    first = next(i for i, t in enumerate(free.token_ids) if i >= 3 and t not in free.token_ids[:i])
    (ended,) = tiny.generate(
        ids(50), SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free.token_ids[first],))
    )
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.text == decoded(tiny, free.token_ids[:first])


def test_the_models_end_token_counts_unless_ignored(tiny_engine: Callable[..., Path]) -> None:
    engine = load_engine(tiny_engine("llama"))
    (free,) = LLM(engine).generate(ids(50), SamplingParams(max_tokens=12, ignore_eos=True))
    end = free.token_ids[5]
    model = engine.config.model.replace(eos_token_ids=(end,))
    llm = LLM(dataclasses.replace(engine, config=engine.config.replace(model=model)))
    (ended,) = llm.generate(ids(50), SamplingParams(max_tokens=12))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert ended.finish_reason == "stop"
    (ignoring,) = llm.generate(ids(50), SamplingParams(max_tokens=12, ignore_eos=True))
    assert ignoring.token_ids == free.token_ids


def decoded(llm: LLM, token_ids: list[int]) -> str:
    return llm.tokenizer.decode(token_ids, skip_special_tokens=True).rstrip("\ufffd")


def test_a_request_ends_where_the_models_positions_end(tiny_engine: Callable[..., Path]) -> None:
    llm = LLM(tiny_engine("llama", max_input_len=1024))
    (output,) = llm.generate(ids(1020), SamplingParams(max_tokens=50, ignore_eos=True), ratio=0.9)
    assert len(output.token_ids) == 4
    assert output.finish_reason == "length"
    with pytest.raises(ValueError, match="prompt: '1024 tokens' is not less than 1024"):
        llm.generate(ids(1024))
    with (
        llm.compress(ids(1000), ratio=0.9) as context,
        pytest.raises(ValueError, match="prompt: '1024 tokens' is not less than 1024"),
    ):
        llm.generate(ids(24), context=context)


def test_stop_texts_end_a_request(tiny: LLM) -> None:
    (free,) = tiny.generate(ids(60, 3), SamplingParams(max_tokens=40, ignore_eos=True))
    stop = free.text[5:8]
    (ended,) = tiny.generate(ids(60, 3), SamplingParams(max_tokens=40, ignore_eos=True, stop=stop))
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) < 40
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]


# ---- streaming -------------------------------------------------------------------------------------------------------


def test_a_stream_equals_generate(tiny: LLM) -> None:
    prompts = [ids(n, n) for n in (5, 90, 33, 60, 12, 7)]
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=n, stop=s)
        for n, t, s in (
            (20, 0.0, ()),
            (9, 0.9, ()),
            (30, 1.2, ("a", "é")),
            (1, 0.0, ()),
            (25, 0.7, ("zz",)),
            (14, 0.0, ()),
        )
    ]
    wanted = tiny.generate(prompts, params, ratio=0.5)
    texts, tokens, outputs = [""] * 6, [[] for _ in range(6)], [None] * 6
    for piece in tiny.stream(prompts, params, ratio=0.5):
        assert outputs[piece.index] is None, "a piece after the last"
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        outputs[piece.index] = piece.output
    for text, token_ids, output, other in zip(texts, tokens, outputs, wanted, strict=True):
        assert text == output.text == other.text
        assert token_ids == output.token_ids == other.token_ids
        assert output.finish_reason == other.finish_reason


def test_leaving_a_stream_gives_its_memory_back(tiny: LLM) -> None:
    for _ in tiny.stream([ids(100), ids(50)], SamplingParams(max_tokens=30, ignore_eos=True)):
        assert tiny.cache.held_bytes > 0
        break
    gc.collect()
    assert tiny.cache.held_bytes == 0
    tiny.stream(ids(10))  # never begun
    assert tiny.cache.held_bytes == 0


def test_a_call_inside_a_stream_runs_beside_it(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = tiny.generate([ids(100), ids(40, 1)], params)
    text, inner = "", None
    for piece in tiny.stream(ids(100), params):
        text += piece.text
        inner = inner or tiny.generate(ids(40, 1), params)[0]
    assert text == wanted[0].text
    assert inner.token_ids == wanted[1].token_ids


def test_seeds_are_reproducible(tiny: LLM) -> None:
    def run(seed: int | None, beside: int) -> list[int]:
        params = [SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)]
        params += [SamplingParams(max_tokens=9 + i, temperature=0.5, seed=i, ignore_eos=True) for i in range(beside)]
        return tiny.generate([ids(60)] * (1 + beside), params, ratio=0.5)[0].token_ids

    assert run(7, 0) == run(7, 0) == run(7, 3)
    assert len({tuple(run(seed, 0)) for seed in range(5)}) > 1


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_context_and_its_question_are_the_text_of_the_chat(tiny: LLM) -> None:
    document, question = "A long document.\n", "And what is it about?"
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with tiny.compress(document, ratio=0.0, chat=True) as context:
        (over_context,) = tiny.generate(question, params, context=context)
        tokens = context.num_tokens + over_context.stats.prompt_tokens
    (alone,) = tiny.generate(document + question, params, ratio=0.0, chat=True)
    rendered = tiny.tokenizer.apply_chat_template(
        [{"role": "user", "content": document + question}], add_generation_prompt=True, tokenize=False
    )
    assert tokens == alone.stats.prompt_tokens == len(tiny.tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert over_context.token_ids == alone.token_ids


def test_messages_go_through_the_chat_template(tiny: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    params = SamplingParams(max_tokens=10)
    rendered = tiny.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    wanted = tiny.generate(tiny.tokenizer(rendered, add_special_tokens=False)["input_ids"], params)[0]
    assert tiny.generate(messages, params)[0].token_ids == wanted.token_ids
    first, _ = tiny.generate([messages, "x"], params)
    assert first.token_ids == wanted.token_ids
    last = [*messages[:1], {"role": "user", "content": "Hel"}]
    with tiny.compress(last, ratio=0.0) as context:
        assert (
            tiny.generate("lo", params, context=context)[0].token_ids
            == tiny.generate(messages, params, ratio=0.0)[0].token_ids
        )


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt: '' is empty"),
        ([], {}, "prompts: the list is empty"),
        ([[]], {}, "prompt: the list of token ids is empty"),
        ([5, 259], {}, r"prompt: token 1: id 259 is not in the vocabulary, 0\.\.258"),
        ([-1], {}, "prompt: token 0: id -1 is not in the vocabulary"),
        ([5, 6.5], {}, "prompt: token 1: 6.5 is not a token id"),
        (["fine", ""], {}, r"prompts\[1\]: prompt: '' is empty"),
        (["fine", [1, 999]], {}, r"prompts\[1\]: prompt: token 1: id 999"),
        (3.5, {}, "prompts: 3.5 is not a text"),
        (["fine", None], {}, r"prompts\[1\]: prompt: None is not a text"),
        ("\udcff", {}, "prompt: .* cannot be tokenized"),
        ([3] * 513, {}, "prompt: '513 tokens' is not at most 512, the engine's max_input_len"),
        ([3], {"ratio": 1.0}, "ratio: 1.0 is not a compression ratio in"),
        ([3], {"ratio": -0.1}, "ratio: -0.1"),
        ([3], {"ratio": float("nan")}, "ratio: nan"),
        ([3], {"ratio": "half"}, "ratio: 'half'"),
        (["a", "b"], {"ratio": [0.5]}, "ratio: 1 values for 2 prompts"),
        (["a", "b"], {"sampling_params": [SamplingParams()]}, "sampling_params: 1 values for 2 prompts"),
        ("a", {"sampling_params": {"temperature": 1}}, "sampling_params: .* is not a SamplingParams"),
        ("a", {"context": "document"}, "context: 'document' is not a CompressedContext"),
        ([{"role": "user"}], {}, "messages: message 0 has no text as role and content"),
    ],
)
def test_bad_requests_are_named_and_nothing_runs(tiny: LLM, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.generate(prompt, **options)
    with pytest.raises(ValueError, match=message):
        tiny.stream(prompt, **options)
    assert tiny.cache.held_bytes == 0


def test_a_context_belongs_to_its_llm_and_has_its_ratio(tiny: LLM, tiny_engine: Callable[..., Path]) -> None:
    other = LLM(tiny_engine("llama"))
    with other.compress(ids(50)) as context:
        with pytest.raises(ValueError, match="is not of this LLM"):
            tiny.generate(ids(3), context=context)
        with pytest.raises(ValueError, match=r"ratio: 0\.5 is not None with a context"):
            other.generate(ids(3), context=context, ratio=0.5)
        with pytest.raises(ValueError, match="chat: True is not False with a context"):
            other.generate("a", context=context, chat=True)
        with pytest.raises(ValueError, match="prompt: '' is empty"):
            other.generate("", context=context)
        with pytest.raises(ValueError, match="a question over a context is a text or token ids"):
            other.generate([{"role": "user", "content": "a"}], context=context)


def test_a_dense_engine_compresses_nothing(tiny_engine: Callable[..., Path]) -> None:
    llm = LLM(tiny_engine("llama", hubkv=None))
    with pytest.raises(ValueError, match=r"ratio: 0\.5 is not 0: this engine was built without --hubkv"):
        llm.generate(ids(10), ratio=0.5)
    (output,) = llm.generate(ids(10), SamplingParams(max_tokens=3), ratio=0.0)
    assert (output.stats.rows == 10).all()


def test_a_failing_request_gives_its_memory_back_and_disturbs_no_other(tiny_engine: Callable[..., Path]) -> None:
    """A model whose token 77 has a broken embedding: prompts with it have scores that are not finite."""
    engine = load_engine(tiny_engine("qwen2"))
    weights = dict(engine.weights)
    weights["embedding.weight"] = weights["embedding.weight"].clone()
    weights["embedding.weight"][77] = math.nan
    broken = LLM(dataclasses.replace(engine, weights=weights))
    good = [[t for t in ids(40, seed) if t != 77] for seed in range(3)]
    params = SamplingParams(max_tokens=10, stop_token_ids=(77,))
    wanted = LLM(engine).generate(good, params)
    message = r"1 of 4 requests failed; prompts\[1\]: scores: .* NaN or infinite"
    with pytest.raises(RequestError, match=message) as caught:
        broken.generate([good[0], [5, 77, 6] * 10, good[1], good[2]], params)
    outputs = caught.value.outputs
    assert outputs[1].finish_reason == "error"
    assert outputs[1].token_ids == []
    assert [outputs[i].token_ids for i in (0, 2, 3)] == [o.token_ids for o in wanted]
    assert broken.cache.held_bytes == 0
    broken.cache.audit()
    with pytest.raises(ValueError, match="scores: "):
        broken.generate([5, 77, 6] * 10)
    with pytest.raises(ValueError, match="scores: "):
        broken.compress([5, 77, 6] * 10)
    with broken.compress(good[0]) as context:  # a question's logits are not finite
        with pytest.raises(ValueError, match="logits: NaN or infinite"):
            broken.generate([77], context=context)
        assert broken.cache.held_bytes == context.num_bytes
    broken.cache.audit()
