# SPDX-License-Identifier: Apache-2.0
"""HARD-KV behind a real Triton server: per-request switches, figures and metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hubkv_trt.cli import main
from hubkv_trt.config import HardKVConfig
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.serving.client import HubKVClient, ServerError
from triton_cases import PROMPT, check, grown
from triton_site import CACHE_BYTES, SECONDS, TritonSite

CASCADE = HardKVConfig(p=0.8, query_window=8, interval=16, recent=16, layer_budget=64, upper_budget=96)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
INPUTS = {"max_tokens": 100, "end_id": -1}


@pytest.fixture(scope="module")
def llm(triton_site: TritonSite) -> LLM:
    return LLM(triton_site.engine, cache_bytes=CACHE_BYTES, decode_compression=CASCADE)


@pytest.fixture(scope="module")
def client(triton_site: TritonSite) -> Iterator[HubKVClient]:
    """Of a model that was made with ``decode_compression``."""
    from tritonclient.grpc import InferenceServerClient

    triton_site.add_model("cascade", decode_compression=CASCADE)
    with InferenceServerClient(triton_site.server.grpc) as control:
        control.load_model("cascade", client_timeout=SECONDS)
        with HubKVClient(triton_site.server.grpc, "cascade", timeout=SECONDS) as client:
            yield client
        control.unload_model("cascade", client_timeout=SECONDS)


@pytest.mark.parametrize(
    ("inputs", "changes"),
    [
        ({}, {}),
        ({"hubkv_decode_p": 0.0, "hubkv_decode_budget": 0}, {}),
        ({"hubkv_decode_p": 0.3}, {"p": 0.3}),
        ({"hubkv_decode_p": 1.0, "hubkv_decode_budget": 16}, {"p": 1.0, "layer_budget": 16}),
    ],
)
def test_requests_name_their_own(client: HubKVClient, llm: LLM, inputs: dict[str, Any], changes: Any) -> None:
    params = dataclasses.replace(LONG, decode_compression=CASCADE.replace(**changes))
    (output,) = llm.generate(PROMPT, params)
    assert output.stats.condensations >= 4
    check(list(client.stream(PROMPT, **INPUTS, **inputs)), output)


def test_refusals_name_the_input(client: HubKVClient) -> None:
    for name, value in [
        ("hubkv_decode_p", 1.5),
        ("hubkv_decode_p", -0.1),
        ("hubkv_decode_p", float("nan")),
        ("hubkv_decode_budget", 65),
        ("hubkv_decode_budget", 3),
        ("hubkv_decode_budget", -1),
    ]:
        with pytest.raises(ServerError, match=f"^{name}: "):
            client.generate(PROMPT, max_tokens=2, **{name: value})


def test_tiers_are_counted(triton: TritonSite, client: HubKVClient) -> None:
    idle = triton.wait_for(lambda values: values.get('hubkv_requests{state="running"}') == 0, "cascade")
    piece = client.generate(PROMPT, **INPUTS)
    after = triton.wait_for(
        lambda values: (
            grown(idle, values, "hubkv_decode_compressions_total") == piece.figures["kv_decode_compressions"]
        ),
        "cascade",
    )
    assert grown(idle, after, "hubkv_decode_compression_seconds_total") > 0
    stream = client.stream(PROMPT, max_tokens=700, end_id=-1)
    next(stream)
    names = [f'hubkv_tier_{what}{{tier="{tier}"}}' for what in ("rows", "bytes") for tier in ("dense", "sparse")]
    triton.wait_for(lambda values: all(values[name] > 0 for name in names), "cascade")
    stream.close()
    triton.wait_for(lambda values: all(values[name] == 0 for name in names), "cascade")


def test_command(client: HubKVClient, triton: TritonSite, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["client", "--url", triton.server.grpc, "--model", "cascade", "--prompt", PROMPT, "--max-tokens", "100"]
    assert main([*asked, "--min-tokens", "100", "--decode-p", "0.5", "--decode-budget", "16", "--stats"]) == 0
    figures = json.loads(capsys.readouterr().err)
    assert figures["kv_decode_compressions"] >= 4
    assert 0 < figures["kv_rows_decode"] <= 16 * figures["kv_rows_kept"]
    assert main([*asked, "--decode-p", "2"]) == 1
    assert capsys.readouterr().err.startswith("hubkv: error: hubkv_decode_p: 2.0 is not")
