# SPDX-License-Identifier: Apache-2.0
"""A real Triton server gives what ``LLM.generate`` gives, by every way in, and gives everything back."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest

from hubkv_trt.cli import main
from hubkv_trt.runtime.llm import LLM, RequestOutput, SamplingParams
from hubkv_trt.serving.client import HubKVClient, ServerError
from soak_clients import Load
from soak_requests import make_requests
from soak_tally import KINDS
from triton_cases import CASES, LONG, MANY, PROMPT, check, grown, post
from triton_site import CACHE_BYTES, SECONDS, TritonSite


@pytest.fixture(scope="module")
def llm(triton_site: TritonSite) -> LLM:
    return LLM(triton_site.engine, cache_bytes=CACHE_BYTES)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, RequestOutput]:
    """Each case, alone."""
    return {
        name: llm.generate(PROMPT, SamplingParams(**params), ratio=ratio)[0]
        for name, (_, params, ratio) in CASES.items()
    }


@pytest.fixture
def client(triton: TritonSite) -> Any:
    with HubKVClient(triton.server.grpc, timeout=SECONDS) as client:
        yield client


def test_cases_differ(expected: dict[str, RequestOutput]) -> None:
    """They would not show much otherwise."""
    assert expected["plain"].text != expected["small"].text[: len(expected["plain"].text)]
    assert {o.finish_reason for o in expected.values()} == {"stop", "length"}
    assert expected["stop_words"].text
    assert expected["stop_words"].finish_reason == "stop"
    assert expected["end_id"].token_ids[-1] == 70
    assert len(expected["penalties"].output_log_probs or []) == 30
    assert expected["penalties"].text[:20] != expected["plain"].text[:20]
    assert len(expected["bad_words"].token_ids) >= 30
    assert "e" not in expected["bad_words"].text
    assert 20 < len(expected["min_tokens"].token_ids) < 60
    assert set(expected["min_tokens"].text) & set(MANY)  # among the first 20


@pytest.mark.parametrize("name", CASES)
def test_grpc_stream(client: HubKVClient, expected: dict[str, RequestOutput], name: str) -> None:
    pieces = list(client.stream(PROMPT, **CASES[name][0]))
    check(pieces, expected[name])
    assert len(pieces) > 1 or not expected[name].text


@pytest.mark.parametrize("name", ["plain", "min_tokens"])
def test_grpc_without_stream(client: HubKVClient, expected: dict[str, RequestOutput], name: str) -> None:
    check([client.generate(PROMPT, **CASES[name][0])], expected[name])


@pytest.mark.parametrize("name", ["drawn", "penalties"])
def test_grpc_unary(triton: TritonSite, expected: dict[str, RequestOutput], name: str) -> None:
    with HubKVClient(triton.server.grpc, "hubkv_unary", timeout=SECONDS) as client:
        check([client.infer(PROMPT, **CASES[name][0])], expected[name])


def test_log_probs_have_the_shapes_of_the_ensemble(triton: TritonSite, expected: dict[str, RequestOutput]) -> None:
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(triton.server.grpc) as client, HubKVClient(triton.server.grpc) as maker:
        tensors = maker._tensors({"text_input": PROMPT, **CASES["penalties"][0]})
        result = client.infer("hubkv_unary", tensors, client_timeout=SECONDS)
    output = expected["penalties"]
    assert result.as_numpy("output_log_probs").shape == (1, 1, len(output.token_ids))
    assert result.as_numpy("cum_log_probs").shape == (1, 1)
    assert {result.as_numpy(name).dtype for name in ("output_log_probs", "cum_log_probs")} == {np.dtype(np.float32)}
    body = {"text_input": PROMPT, **CASES["penalties"][0]}
    answer = json.loads(post(triton.url("hubkv", "generate"), body))
    assert answer["output_log_probs"] == pytest.approx(output.output_log_probs, rel=1e-6)
    assert answer["cum_log_probs"] == pytest.approx(output.cum_log_probs, rel=1e-6)


@pytest.mark.parametrize("model", ["hubkv", "hubkv_unary"])
def test_http_generate(triton: TritonSite, expected: dict[str, RequestOutput], model: str) -> None:
    answer = json.loads(post(triton.url(model, "generate"), {"text_input": PROMPT, **CASES["drawn"][0]}))
    assert answer["text_output"] == expected["drawn"].text
    assert answer["finish_reason"] == expected["drawn"].finish_reason
    assert answer["kv_rows_kept"] == expected["drawn"].stats.rows.sum()  # type: ignore[union-attr]


def test_http_generate_stream(triton: TritonSite, expected: dict[str, RequestOutput]) -> None:
    body = {"text_input": PROMPT, "stream": True, **CASES["drawn"][0]}
    lines = post(triton.url("hubkv", "generate_stream"), body).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected["drawn"].text
    assert events[-1]["num_output_tokens"] == len(expected["drawn"].token_ids)


def test_token_ids(client: HubKVClient, llm: LLM, expected: dict[str, RequestOutput]) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    check([client.generate(input_ids=ids, **CASES["plain"][0])], expected["plain"])


def test_the_text_comes_first_on_request(client: HubKVClient, expected: dict[str, RequestOutput]) -> None:
    inputs = {**CASES["plain"][0], "exclude_input_in_output": False}
    assert client.generate(PROMPT, **inputs).text == PROMPT + expected["plain"].text
    assert "".join(p.text for p in client.stream(PROMPT, **inputs)) == PROMPT + expected["plain"].text


def test_chat(client: HubKVClient, llm: LLM) -> None:
    (output,) = llm.generate("Who?", SamplingParams(max_tokens=8), chat=True)
    check([client.generate("Who?", hubkv_chat=True, max_tokens=8)], output)


def test_mixed_load(triton: TritonSite, llm: LLM) -> None:
    """200 good and bad requests of 32 clients at a batch of 4 (``make soak``: 5,000): none lost, none wrong."""
    before = triton.idle_totals()
    tally = Load(triton, make_requests(llm), clients=32, seconds=SECONDS).run(first=0, count=200)
    assert not tally.lost
    assert not tally.wrong
    assert tally.done.total() == 200
    assert tally.done.keys() == KINDS.keys()
    tally.check_counters(before, triton.idle_totals())


def test_full_queue(triton: TritonSite) -> None:
    """A model with room for two that wait: those beyond are refused at once, the others are answered."""
    import tritonclient.grpc as grpc

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with HubKVClient(triton.server.grpc) as maker:
        tensors = maker._tensors({"text_input": PROMPT, "max_tokens": 100})
    with grpc.InferenceServerClient(triton.server.grpc) as client:
        for _ in range(12):
            client.async_infer("hubkv_unary", tensors, lambda result, error: answers.put((result, error)),
                               client_timeout=SECONDS)  # fmt: skip
        results = [answers.get(timeout=SECONDS) for _ in range(12)]
    texts = {result.as_numpy("text_output").item() for result, error in results if error is None}
    errors = [error for _, error in results if error is not None]
    assert len(texts) == 1
    assert 1 <= len(errors) <= 10
    for error in errors:
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert "queue full" in error.message()
    triton.wait_until_idle("hubkv_unary")


def test_contexts(triton: TritonSite, client: HubKVClient, llm: LLM) -> None:
    document, questions = PROMPT * 2 + "\n\n", ["What?", "And who else?"]
    with llm.compress(document, ratio=0.75) as context:
        outputs = llm.generate(questions, SamplingParams(max_tokens=10), context=context)
        stats = context.stats
    made = client.generate(context_id="book", context_text=document, hubkv_ratio=0.75)
    assert (made.text, made.figures["kv_bytes"]) == ("", stats.bytes_kept)
    for question, output in zip(questions, outputs, strict=True):
        piece = client.generate(question, context_id="book", max_tokens=10)
        assert piece.text == output.text
        assert piece.figures["kv_rows_kept"] == stats.rows.sum()  # type: ignore[union-attr]
    triton.wait_for(lambda values: values["hubkv_contexts"] == 1 and values['hubkv_kv_bytes{of="kept"}'] > 0)
    assert client.generate(context_id="book", release_context=True).figures["finish_reason"] == "released"
    assert client.generate(context_id="book", release_context=True).figures["finish_reason"] == "unknown"
    with pytest.raises(ServerError, match="context_id: 'book' is not known"):
        client.generate("What?", context_id="book")
    with HubKVClient(triton.server.grpc, "hubkv_unary", timeout=SECONDS) as unary:
        with pytest.raises(ServerError, match="context_id: 'book' is not known") as refused:
            unary.infer("What?", context_id="book")
        assert refused.value.code == "NOT_FOUND"
    triton.wait_until_idle()


def test_deadline(triton: TritonSite) -> None:
    """Triton's own ``timeout`` of a request, in microseconds: what there is then is the answer."""
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(triton.server.grpc) as client, HubKVClient(triton.server.grpc) as maker:
        tensors = maker._tensors({"text_input": PROMPT, **LONG})
        result = client.infer("hubkv_unary", tensors, timeout=300_000, client_timeout=SECONDS)
        assert result.as_numpy("finish_reason").item() == b"deadline"
    answer = json.loads(post(triton.url("hubkv", "generate"), {"text_input": PROMPT, "timeout": 300_000, **LONG}))
    assert answer["finish_reason"] == "deadline"
    assert 0 <= answer["num_output_tokens"] < LONG["max_tokens"]
    triton.wait_until_idle()


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics(triton: TritonSite, client: HubKVClient, llm: LLM, expected: dict[str, RequestOutput]) -> None:
    before = triton.wait_until_idle()
    list(client.stream(PROMPT, **CASES["small"][0]))
    output = expected["small"]
    tokens = len(output.token_ids)
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_tokens_total{phase="decode"}') == tokens
    assert grown(before, after, "hubkv_first_token_seconds_count") == 1
    assert after['hubkv_arena_bytes{of="size"}'] == llm.cache.num_bytes
    assert grown(before, after, 'hubkv_tokens_total{phase="prefill"}') == output.stats.prompt_tokens
    assert (
        0 < grown(before, after, "hubkv_prefill_seconds_total") <= grown(before, after, "hubkv_first_token_seconds_sum")
    )
    assert grown(before, after, "hubkv_inter_token_seconds_count") == tokens - 1
    assert grown(before, after, 'hubkv_inter_token_seconds_bucket{le="+Inf"}') == tokens - 1
    assert grown(before, after, "hubkv_first_token_seconds_sum") > 0
    assert sum(grown(before, after, key) for key in after if key.startswith("hubkv_rows_kept_total")) == \
        output.stats.rows.sum()  # type: ignore[union-attr]  # fmt: skip
    assert grown(before, after, "hubkv_preemptions_total") == 0


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command(
    triton: TritonSite, llm: LLM, expected: dict[str, RequestOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    server = ["client", "--url", triton.server.grpc, "--timeout", str(SECONDS)]
    options = ["--prompt", PROMPT, "--max-tokens", "12", "--ratio", "0.9", "--stats"]
    for more in ([], ["--no-stream"]):
        status = main([*server, *options, *more])
        printed = capsys.readouterr()
        assert (status, printed.out) == (0, expected["small"].text + "\n")
        assert json.loads(printed.err)["kv_bytes"] == expected["small"].stats.bytes_kept
    asked = ["--prompt", PROMPT, "--max-tokens", "30", "--min-tokens", "30", "--log-probs"]
    asked += ["--repetition-penalty", "1.3"]
    asked += ["--presence-penalty", "0.4", "--frequency-penalty", "0.2", "--bad-word", "zq", "--stop", "qz"]
    (output,) = llm.generate(
        PROMPT,
        SamplingParams(max_tokens=30, min_tokens=30, repetition_penalty=1.3, presence_penalty=0.4,
                       frequency_penalty=0.2, bad_words=("zq",), stop=("qz",), return_log_probs=True),
    )  # fmt: skip
    for more in ([], ["--no-stream"]):
        assert main([*server, *asked, *more]) == 0
        printed = capsys.readouterr()
        assert printed.out == output.text + "\n"
        assert json.loads(printed.err)["output_log_probs"] == output.output_log_probs
    assert main([*server, "--prompt", PROMPT, "--top-p", "7"]) == 1
    assert capsys.readouterr().err.startswith("hubkv: error: top_p: 7.0 is not")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a --prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "give a --prompt"),
        (["--document", "a"], "--document: needs a --context"),
        (["--release"], "--release: needs a --context"),
        (["--chat", "--context", "c", "--prompt", "a"], "--chat: goes with the --document"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", *words]) == 2
    assert message in capsys.readouterr().err
