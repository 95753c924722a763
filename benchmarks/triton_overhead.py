# SPDX-License-Identifier: Apache-2.0
"""What the way through a server costs: the same requests by ``LLM.generate``, by ``Service`` and by gRPC streams.

The first two run in this process, the third goes to a Triton server on this machine, with its client here, too. They
take turns, in another order in every round, and must give the same texts. The figures go to FOLDER/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import progress
from hubkv_trt.commands.common import run
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.service import Service
from hubkv_trt.runtime.ticket import ServiceRequest
from hubkv_trt.serving.client import HubKVClient
from hubkv_trt.serving.repository import ModelParameters, write_model
from hubkv_trt.serving.triton_server import TritonServer
from triton_cell import DOCUMENT, ROOT

PREFILL_FIRST = 1 << 20  # tokens a step: all prompts, then decoding, as LLM.generate has it
RATIO = 0.75


class Ways:
    """Three ways to the same answers.

    Args:
        llm: in this process.
        server: the other one.
        prompts: token ids of the requests, which are sent together.
        output: tokens of each answer.
    """

    def __init__(self, llm: LLM, server: TritonServer, prompts: list[list[int]], output: int) -> None:
        self._llm = llm
        self._url = server.grpc
        self._prompts = prompts
        self._params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.all: dict[str, Callable[[], list[str]]] = {
            "LLM.generate": self.generate,
            "Service": self.service,
            "gRPC": self.grpc,
        }

    def generate(self) -> list[str]:
        return [output.text for output in self._llm.generate(self._prompts, self._params, ratio=RATIO)]

    def service(self) -> list[str]:
        with Service(self._llm, prefill_tokens_per_step=PREFILL_FIRST) as service:

            def ask(prompt: list[int]) -> str:
                ticket = service.submit(ServiceRequest(prompt=prompt, params=self._params, ratio=RATIO))
                return "".join(increment.text for increment in ticket)

            return self._together(ask)

    def grpc(self) -> list[str]:
        def ask(prompt: list[int]) -> str:
            inputs = {"max_tokens": self._params.max_tokens, "end_id": -1, "hubkv_ratio": RATIO}
            with HubKVClient(self._url) as client:
                return "".join(piece.text for piece in client.stream(input_ids=prompt, **inputs))

        return self._together(ask)

    def _together(self, ask: Callable[[list[int]], str]) -> list[str]:
        with ThreadPoolExecutor(len(self._prompts)) as pool:
            return list(pool.map(ask, self._prompts))


def take_turns(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways.all}
    texts = None
    for number in range(rounds + 1):
        names = list(ways.all)
        for name in names[number % 3 :] + names[: number % 3]:
            start = time.perf_counter()
            got = ways.all[name]()
            taken = time.perf_counter() - start
            if texts is not None and got != texts:
                raise RuntimeError(f"{name}: other texts than before")
            texts = got
            if number > 0:
                seconds[name].append(taken)
            progress(f"round {number}: {name} {taken:.2f} s")
    return seconds


def command(arguments: argparse.Namespace) -> int:
    """Measures and writes what it finds."""
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    tokens = load_engine(arguments.engine).load_tokenizer()(DOCUMENT.read_text(encoding="utf-8"))["input_ids"]
    prompts = [tokens[i * 151 :][: arguments.prompt] for i in range(arguments.requests)]
    parameters = ModelParameters(str(arguments.engine), prefill_tokens_per_step=PREFILL_FIRST)
    write_model(ROOT / "triton_repo" / "hubkv", folder / "repository", parameters, force=True)
    with TritonServer(arguments.environment, folder / "repository", log=folder / "overhead.server.log") as server:
        llm = LLM(arguments.engine)
        server.wait_until_ready(timeout=120)
        seconds = take_turns(Ways(llm, server, prompts, arguments.output), arguments.rounds)
    shape = {name: getattr(arguments, name) for name in ("requests", "prompt", "output")}
    (folder / "overhead.json").write_text(
        json.dumps({"name": "overhead", **shape, "seconds": seconds}, indent=1) + "\n"
    )
    over = statistics.median(g / b for g, b in zip(seconds["gRPC"], seconds["LLM.generate"], strict=True))
    print(f"overhead: gRPC takes {over - 1:+.1%} over LLM.generate")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the results")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-triton", help="where nvidia-pytriton is")
    parser.add_argument("--requests", type=int, default=4, help="at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    sys.exit(run(command, parser.parse_args()))
