# SPDX-License-Identifier: Apache-2.0
"""Clients that load a Triton server with good and bad requests by every way in, and count what becomes of them.

A load is the same for the same numbers: request number n is always of the same kind and asks for the same.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from typing import Any

from hubkv_trt.serving.client import HubKVClient, Piece, ServerError
from soak_requests import DOCUMENTS, PROMPTS, Answer, Case, Requests
from soak_tally import KINDS, LEAVING, Tally
from triton_cases import LONG, post
from triton_site import TritonSite

BUSY = ("queue full", "cache full")  # messages of UNAVAILABLE
AGAIN_SECONDS = 1.0  # after a refusal

BAD: list[tuple[str, dict[str, Any]]] = [  # the field that the message begins with
    ("hubkv_ratio", {"hubkv_ratio": 1.0}),
    ("hubkv_ratio", {"hubkv_ratio": float("nan")}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 1.5}),
    ("end_id", {"end_id": 1 << 30}),
    ("text_input", {"text_input": ""}),
    ("text_input", {"text_input": b"\xff\xfe"}),
    ("text_input", {"text_input": "a" * (1 << 20)}),
    ("stop_words", {"stop_words": ["x"] * 65}),
    ("beam_width", {"beam_width": 2}),
    ("num_return_sequences", {"num_return_sequences": 2}),
]


class Load:
    """Sends requests to a site's two models.

    Args:
        site: the server.
        requests: with their answers.
        clients: that ask at the same time.
        seconds: for one answer, refusals included.
        progress: called after each request.
    """

    def __init__(
        self,
        site: TritonSite,
        requests: Requests,
        clients: int,
        seconds: float,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self._site = site
        self._requests = requests
        self._clients = clients
        self._seconds = seconds
        self.progress = progress
        self._lock = threading.Lock()
        self._numbers = iter(())  # type: ignore[var-annotated]
        self._tally = Tally()

    def run(self, first: int, count: int, kills: int = 0) -> Tally:
        """Requests first .. first + count - 1, and ``kills`` client processes that are killed while they stream."""
        self._numbers, self._tally = iter(range(first, first + count)), Tally()
        threads = [threading.Thread(target=self._work) for _ in range(self._clients)]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            self._kill_one()
        for thread in threads:
            thread.join()
        with HubKVClient(self._site.server.grpc, timeout=self._seconds) as client:
            for name in DOCUMENTS:
                client.generate(context_id=name, release_context=True)
        return self._tally

    def _work(self) -> None:
        grpc, seconds = self._site.server.grpc, self._seconds
        with HubKVClient(grpc, timeout=seconds) as client, HubKVClient(grpc, "hubkv_unary", timeout=seconds) as unary:
            while True:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                self._one(number, client, unary)
                self.progress()

    def _one(self, number: int, client: HubKVClient, unary: HubKVClient) -> None:
        draw = random.Random(number)
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                problem = self._ask(kind, random.Random(number), client, unary)
                break
            except (ServerError, urllib.error.HTTPError) as error:
                message = _message(error)
                if not message.startswith(BUSY):
                    problem = f"error {message[:200]!r}"
                    break
                with self._lock:
                    self._tally.refused[kind] += 1
                if time.monotonic() > deadline:
                    problem = "refused to the end"
                    break
                time.sleep(AGAIN_SECONDS)
            except Exception as error:
                with self._lock:
                    self._tally.lost.append(f"request {number} ({kind}): {error!r}")
                return
        with self._lock:
            if problem:
                self._tally.wrong.append(f"request {number} ({kind}): {problem}")
            else:
                self._tally.done[kind] += 1

    def _ask(self, kind: str, draw: random.Random, client: HubKVClient, unary: HubKVClient) -> str:
        """Sends one request; what is wrong with its answer, or nothing."""
        if kind in LEAVING:
            self._leave(kind, draw, client)
            return ""
        if kind == "release":
            reason = client.generate(context_id=draw.choice(list(DOCUMENTS)), release_context=True)
            return "" if reason.figures["finish_reason"] in ("released", "unknown") else str(reason)
        if kind == "bad":
            return self._bad(draw, client, unary)
        http = kind in ("deadline", "http generate", "http stream")
        every = self._requests
        case = draw.choice(every.questions if kind == "question" else every.plain if http else every.prompts)
        answer = self._requests.answer(case)
        if kind == "deadline":
            return self._late(case, draw, answer)
        if kind.startswith("http"):
            return _difference(self._http(kind, case), answer)
        if kind == "grpc stream" or (kind == "question" and draw.random() < 0.5):
            pieces = list(client.stream(**case.inputs))
        else:
            pieces = [(unary.infer if kind == "grpc unary" else client.generate)(**case.inputs)]
        return _difference(_answer(pieces), answer)

    def _http(self, kind: str, case: Case) -> Answer:
        if kind == "http generate":
            events = [json.loads(post(self._site.url("hubkv", "generate"), case.inputs))]
        else:
            body = {**case.inputs, "stream": True}
            lines = post(self._site.url("hubkv", "generate_stream"), body).decode().splitlines()
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        last = events[-1]
        return Answer("".join(e["text_output"] for e in events), last["finish_reason"], last["num_output_tokens"])

    def _late(self, case: Case, draw: random.Random, answer: Answer) -> str:
        """A request with a deadline has the beginning of the answer, or all of it."""
        body = {**case.inputs, "timeout": draw.randrange(1000, 300_000)}
        got = json.loads(post(self._site.url("hubkv", "generate"), body))
        if got["finish_reason"] == "deadline":
            return "" if answer.text.startswith(got["text_output"]) else f"{got['text_output']!r} of {answer}"
        return _difference(Answer(got["text_output"], got["finish_reason"], got["num_output_tokens"]), answer)

    def _bad(self, draw: random.Random, client: HubKVClient, unary: HubKVClient) -> str:
        name, wrong = draw.choice(BAD)
        plain = draw.random() < 0.5
        try:
            (unary.infer if plain else client.generate)(**{"text_input": PROMPTS[0], "max_tokens": 2, **wrong})
        except ServerError as error:
            if error.code == ("INVALID_ARGUMENT" if plain else "") and str(error).startswith(f"{name}: "):
                return ""
            raise
        return f"accepted {str(wrong)[:80]}"

    def _leave(self, kind: str, draw: random.Random, client: HubKVClient) -> None:
        inputs = {"text_input": draw.choice(PROMPTS), "stream": True, **LONG}
        if kind == "left":
            stream = client.stream(**inputs)
            for _ in range(draw.randrange(1, 4)):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
        elif kind == "left in queue":
            tensors = client._tensors(inputs)
            client._client.start_stream(lambda result, error: None)
            client._client.async_stream_infer("hubkv", tensors)
            time.sleep(0.2 * draw.random())
            client._client.stop_stream(cancel_requests=True)
        else:
            connection = http.client.HTTPConnection(self._site.server.http, timeout=self._seconds)
            connection.request("POST", "/v2/models/hubkv/generate_stream", json.dumps(inputs))
            line = connection.getresponse().readline()
            connection.sock.close()
            connection.close()
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise ServerError(event["error"], "")

    def _kill_one(self) -> None:
        """``hubkv client`` streams, and is killed."""
        words = [
            sys.executable,
            "-m",
            "hubkv_trt.cli",
            "client",
            "--url",
            self._site.server.grpc,
            "--prompt",
            PROMPTS[0],
        ]
        options = ["--max-tokens", "700", "--temperature", "1.5", "--seed", "1", "--stop", "never said"]
        process = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.read(1)  # nothing where it was refused
        os.kill(process.pid, signal.SIGKILL)
        process.wait(self._seconds)
        process.stdout.close()
        with self._lock:
            self._tally.killed += 1


def _answer(pieces: list[Piece]) -> Answer:
    figures = pieces[-1].figures
    return Answer("".join(p.text for p in pieces), figures["finish_reason"], figures["num_output_tokens"])


def _difference(got: Answer, expected: Answer) -> str:
    return "" if got == expected else f"{got} instead of {expected}"


def _message(error: ServerError | urllib.error.HTTPError) -> str:
    if isinstance(error, urllib.error.HTTPError):
        text = error.read().decode(errors="replace").removeprefix("data: ")
        return str(json.loads(text).get("error", text)) if text.startswith("{") else text
    return str(error)
