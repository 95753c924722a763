# SPDX-License-Identifier: Apache-2.0
"""Clients that leave a real Triton server, a model that leaves, and the server itself: all memory comes back, others
notice nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hubkv_trt.serving.client import HubKVClient, Piece, ServerError
from hubkv_trt.serving.repository import ModelParameters, write_model
from hubkv_trt.serving.triton_server import TritonServer
from triton_cases import CASES, LONG, PROMPT, grown
from triton_site import CACHE_BYTES, ENVIRONMENT, SECONDS, TEMPLATE, TritonSite

SHUTDOWN_SECONDS = 30.0  # the server gives what runs ten of them


def test_cancelled_streams(triton: TritonSite) -> None:
    before = triton.wait_until_idle()
    for wanted in (1, 5):
        with HubKVClient(triton.server.grpc, timeout=SECONDS) as client:
            stream = client.stream(PROMPT, **LONG)
            for _ in range(wanted):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
    after = triton.wait_until_idle()
    assert grown(before, after, 'hubkv_requests_finished_total{reason="aborted"}') == 2


def test_cancelled_while_queued(triton: TritonSite) -> None:
    """More requests than a batch holds, all cancelled; others that ran beside them notice nothing."""
    before = triton.wait_until_idle()
    with HubKVClient(triton.server.grpc, timeout=SECONDS) as client:
        alone = client.generate(PROMPT, **CASES["drawn"][0]).text
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
        assert "".join(piece.text for piece in client.stream(PROMPT, **CASES["drawn"][0])) == alone
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


def test_unloaded_model(triton: TritonSite) -> None:
    """Triton lets a model that is unloaded finish what runs and takes nothing new; the other models go on."""
    from tritonclient.grpc import InferenceServerClient

    triton.add_model("leaving")
    with (
        InferenceServerClient(triton.server.grpc) as admin,
        HubKVClient(triton.server.grpc, "leaving", timeout=SECONDS) as client,
        HubKVClient(triton.server.grpc, timeout=SECONDS) as other,
    ):
        admin.load_model("leaving", client_timeout=SECONDS)
        stream = client.stream(PROMPT, **LONG)
        next(stream)
        admin.unload_model("leaving", client_timeout=SECONDS)
        with pytest.raises(ServerError, match="leaving"), HubKVClient(triton.server.grpc, "leaving") as late:
            late.generate(PROMPT)
        *_, last = stream
        assert last.figures["num_output_tokens"] == LONG["max_tokens"]
        assert other.generate(PROMPT, max_tokens=2).final


def test_server_that_is_shut_down_while_streaming(triton: TritonSite, tmp_path: Path) -> None:
    """Every stream ends, whole or with an error that has a code; processes and shared memory are gone in time."""
    parameters = ModelParameters(str(triton.engine), cache_bytes=CACHE_BYTES)
    write_model(TEMPLATE, tmp_path / "repository", parameters)
    shared = set(os.listdir("/dev/shm"))
    log = tmp_path / "triton.log"
    with TritonServer(ENVIRONMENT, tmp_path / "repository", log=log) as server:
        server.wait_until_ready(timeout=120)
        regions = set(os.listdir("/dev/shm")) - shared
        children = psutil.Process(server.pid).children(recursive=True)
        assert regions
        assert children
        texts: list[str] = [""] * 3
        ends: list[Piece | ServerError | None] = [None] * 3

        def read(index: int) -> None:
            with HubKVClient(server.grpc, timeout=SECONDS) as client:
                try:
                    for piece in client.stream(PROMPT, **LONG, temperature=1.5, seed=index):
                        texts[index] += piece.text
                        ends[index] = piece
                except ServerError as error:
                    ends[index] = error

        threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + SECONDS
        while not all(texts):
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.01)
        assert server.stop(timeout=SHUTDOWN_SECONDS) == 0, log.read_text(errors="replace")
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for end in ends:
        if isinstance(end, ServerError):
            assert str(end)
        else:
            assert end is not None
            assert end.figures["num_output_tokens"] == LONG["max_tokens"]
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not regions & set(os.listdir("/dev/shm"))
