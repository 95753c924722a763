# SPDX-License-Identifier: Apache-2.0
"""A real Triton server gives what ``LLM.generate`` gives, by every way in, and gives everything back."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.runtime.llm import LLM, RequestOutput, SamplingParams
from hubkv_trt.serving.client import HubKVClient, Piece, ServerError
from triton_site import CACHE_BYTES, SECONDS, TritonSite

PROMPT = "A hub keeps what its neighbours repeat. " * 6
LONG = {"max_tokens": 700, "end_id": -1}  # seconds of decoding

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    # inputs of the request; SamplingParams and ratio of the same request to LLM.generate
    "plain": ({"max_tokens": 24}, {"max_tokens": 24}, None),
    "dense": ({"max_tokens": 12, "hubkv_ratio": 0.0}, {"max_tokens": 12}, 0.0),
    "small": ({"max_tokens": 12, "hubkv_ratio": 0.9}, {"max_tokens": 12}, 0.9),
    "drawn": (
        {"max_tokens": 40, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7, "hubkv_ratio": 0.5},
        {"max_tokens": 40, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7},
        0.5,
    ),
    "random_seed": (
        {"max_tokens": 20, "top_k": 8, "random_seed": 2**63 + 1},
        {"max_tokens": 20, "temperature": 1.0, "top_k": 8, "seed": 2**63 + 1},
        None,
    ),
    "top_k_1": ({"max_tokens": 9, "temperature": 1.3, "top_k": 1, "top_p": 0.0}, {"max_tokens": 9}, None),
    "stop_words": (
        {"max_tokens": 200, "temperature": 1.5, "seed": 3, "stop_words": ["e", "a", "1"], "end_id": -1},
        {"max_tokens": 200, "temperature": 1.5, "seed": 3, "stop": ("e", "a", "1"), "ignore_eos": True},
        None,
    ),
    "end_id": (
        {"max_tokens": 300, "temperature": 1.5, "seed": 5, "end_id": 70},
        {"max_tokens": 300, "temperature": 1.5, "seed": 5, "stop_token_ids": (70,), "ignore_eos": True},
        None,
    ),
    # what clients of TensorRT-LLM's models send although it asks for nothing
    "neutral": (
        {"max_tokens": 5, "bad_words": [""], "stop_words": [""], "beam_width": 1, "length_penalty": 1.0, "pad_id": 2,
         "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_length": 1, "return_log_probs": False,
         "return_context_logits": False, "num_return_sequences": 1, "exclude_input_in_output": True},
        {"max_tokens": 5},
        None,
    ),
}  # fmt: skip


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


def check(pieces: list[Piece], output: RequestOutput) -> None:
    """The pieces are the output: its text, and its figures with the last."""
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.final for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    stats = output.stats
    assert pieces[-1].figures == {
        "sequence_index": 0,
        "finish_reason": output.finish_reason,
        "num_input_tokens": stats.prompt_tokens,
        "num_output_tokens": len(output.token_ids),
        "kv_rows_kept": int(stats.rows.sum()),  # type: ignore[union-attr]
        "kv_bytes": stats.bytes_kept,
        "kv_bytes_dense": stats.bytes_dense,
    }


def test_cases_differ(expected: dict[str, RequestOutput]) -> None:
    """They would not show much otherwise."""
    assert expected["plain"].text != expected["small"].text[: len(expected["plain"].text)]
    assert {o.finish_reason for o in expected.values()} == {"stop", "length"}
    assert expected["stop_words"].text
    assert expected["stop_words"].finish_reason == "stop"
    assert expected["end_id"].token_ids[-1] == 70


@pytest.mark.parametrize("name", CASES)
def test_grpc_stream(client: HubKVClient, expected: dict[str, RequestOutput], name: str) -> None:
    pieces = list(client.stream(PROMPT, **CASES[name][0]))
    check(pieces, expected[name])
    assert len(pieces) > 1 or not expected[name].text


@pytest.mark.parametrize("name", ["plain", "stop_words"])
def test_grpc_without_stream(client: HubKVClient, expected: dict[str, RequestOutput], name: str) -> None:
    check([client.generate(PROMPT, **CASES[name][0])], expected[name])


@pytest.mark.parametrize("name", ["drawn", "end_id"])
def test_grpc_unary(triton: TritonSite, expected: dict[str, RequestOutput], name: str) -> None:
    with HubKVClient(triton.server.grpc, "hubkv_unary", timeout=SECONDS) as client:
        check([client.infer(PROMPT, **CASES[name][0])], expected[name])


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


def test_many_at_once(triton: TritonSite, expected: dict[str, RequestOutput]) -> None:
    """Twice as many clients as a batch holds, all different: each gets what it gets alone."""
    failures: list[str] = []

    def ask(name: str) -> None:
        try:
            with HubKVClient(triton.server.grpc, timeout=SECONDS) as client:
                check(list(client.stream(PROMPT, **CASES[name][0])), expected[name])
        except BaseException as error:
            failures.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures
    triton.wait_until_idle()


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
    with pytest.raises(ServerError, match="context_id: 'book' is not known") as refused:
        client.generate("What?", context_id="book")
    assert refused.value.code == "NOT_FOUND"
    triton.wait_until_idle()


def test_deadline(triton: TritonSite) -> None:
    """Triton's own ``timeout`` of a request, in microseconds: what there is then is the answer."""
    answer = json.loads(post(triton.url("hubkv", "generate"), {"text_input": PROMPT, "timeout": 300_000, **LONG}))
    assert answer["finish_reason"] == "deadline"
    assert 0 <= answer["num_output_tokens"] < LONG["max_tokens"]
    triton.wait_until_idle()


# ---- clients that leave ----------------------------------------------------------------------------------------------


def test_cancelled_streams(triton: TritonSite, client: HubKVClient) -> None:
    before = triton.wait_until_idle()
    for wanted in (1, 5):
        stream = client.stream(PROMPT, **LONG)
        for _ in range(wanted):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 2


def test_cancelled_while_queued(triton: TritonSite, expected: dict[str, RequestOutput]) -> None:
    """More requests than a batch holds, all cancelled; others that ran beside them notice nothing."""
    before = triton.wait_until_idle()
    clients = [HubKVClient(triton.server.grpc, timeout=SECONDS) for _ in range(6)]
    tensors = [client._tensors({"text_input": PROMPT, "stream": True, **LONG}) for client in clients]
    for client, inputs in zip(clients, tensors, strict=True):
        client._client.start_stream(lambda result, error: None)
        client._client.async_stream_infer("hubkv", inputs)
    triton.wait_for(lambda values: values['hubkv_requests{state="waiting"}'] > 0)
    for client in clients:
        client._client.stop_stream(cancel_requests=True)
        client.close()
    with HubKVClient(triton.server.grpc, timeout=SECONDS) as client:
        check(list(client.stream(PROMPT, **CASES["drawn"][0])), expected["drawn"])
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 6


def test_unary_cancel(triton: TritonSite) -> None:
    before = triton.wait_until_idle("hubkv_unary")
    with HubKVClient(triton.server.grpc, "hubkv_unary", timeout=0.4) as client, pytest.raises(ServerError) as error:
        client.infer(PROMPT, **LONG)
    assert error.value.code == "DEADLINE_EXCEEDED"
    after = triton.wait_until_idle("hubkv_unary")
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 1


def test_closed_http_connection(triton: TritonSite) -> None:
    before = triton.wait_until_idle()
    connection = http.client.HTTPConnection(triton.server.http, timeout=SECONDS)
    connection.request("POST", "/v2/models/hubkv/generate_stream",
                       json.dumps({"text_input": PROMPT, "stream": True, **LONG}))  # fmt: skip
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.sock.close()
    connection.close()
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 1


def test_killed_client(triton: TritonSite, tmp_path: Path) -> None:
    """``hubkv client`` streams; one that is killed while it does so is noticed."""
    before = triton.wait_until_idle()
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    command = [sys.executable, "-m", "hubkv_trt.cli", "client", "--url", triton.server.grpc, "--prompt-file", str(file)]
    options = ["--max-tokens", "700", "--temperature", "1.5", "--seed", "1", "--stop", "never said"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 1


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
    assert grown(before, after, "hubkv_inter_token_seconds_count") == tokens - 1
    assert grown(before, after, 'hubkv_inter_token_seconds_bucket{le="+Inf"}') == tokens - 1
    assert grown(before, after, "hubkv_first_token_seconds_sum") > 0
    assert sum(grown(before, after, key) for key in after if key.startswith("hubkv_rows_kept_total")) == \
        output.stats.rows.sum()  # type: ignore[union-attr]  # fmt: skip
    assert grown(before, after, "hubkv_preemptions_total") == 0


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def post(url: str, body: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=SECONDS) as answer:
        return answer.read()  # type: ignore[no-any-return]
