# SPDX-License-Identifier: Apache-2.0
"""One measurement of benchmarks/triton.sh: a server of its own, under load of the real perf_analyzer.

A cell is written NAME-rRATIO-cCONCURRENCY. Two kinds:

tokens     the arena has the bytes of two dense sequences, prompt and output; every request generates all it may
sequences  the arena has the bytes of four dense prompts, and outputs are short: all that fit run at once

The figures go to FOLDER/CELL.json, what perf_analyzer exports to FOLDER/CELL.profile.json and FOLDER/CELL.latency.csv.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hubkv_trt.commands.common import run
from hubkv_trt.config import budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.arena import ALIGNMENT
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.serving.client import HubKVClient
from hubkv_trt.serving.counters import read_metrics
from hubkv_trt.serving.repository import ModelParameters, write_model
from hubkv_trt.serving.triton_server import TritonServer

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "examples" / "station_handbook.txt"
SAMPLE_SECONDS = 0.1  # the server publishes four times a second
SHORT = 16  # output tokens of sequences that shall only be there at once


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        kind: ``tokens`` or ``sequences``.
        ratio: of every request.
        concurrency: requests that perf_analyzer keeps under way.
        prompt, output: tokens of each.
        dense: sequences without compression that the arena has room for.
    """

    kind: str
    ratio: float
    concurrency: int
    prompt: int
    output: int
    dense: int

    @staticmethod
    def parse(text: str, prompt: int, output: int) -> Cell:
        """From its name. Raises ``ValueError`` where it is none."""
        found = re.fullmatch(r"(tokens|sequences)-r(0|0?\.\d+)-c([1-9]\d*)", text)
        if found is None:
            raise ValueError(f"cell: {text!r} is not KIND-rRATIO-cCONCURRENCY, such as tokens-r0.75-c8")
        kind = found[1]
        if kind == "tokens":
            return Cell(kind, float(found[2]), int(found[3]), prompt, output, dense=2)
        return Cell(kind, float(found[2]), int(found[3]), prompt, min(output, SHORT), dense=4)


@dataclass(frozen=True)
class Plan:
    """An arena, and what has room in it.

    Attributes:
        cache_bytes, tail_tokens: of the model.
        sequence_bytes: of one of this cell's sequences.
        fitting: of them that have room at once.
        requests: that are sent.
        step_bytes: that a decode step of all that run reads: weights, segments, tails that are half full.
    """

    cache_bytes: int
    tail_tokens: int
    sequence_bytes: int
    fitting: int
    requests: int
    step_bytes: int


def make_plan(engine: Path, cell: Cell, most: int) -> Plan:
    """The same bytes for every ratio.

    tokens: the pool of tail pages is as large as the sequences that fit can use. sequences: it is the same for all
    ratios, too, and large enough for ``most`` sequences, so that one server could run all of them.
    """
    config = load_engine(engine).config
    ledger, hubkv = Ledger(config.model, config.dtype), config.hubkv
    assert hubkv is not None
    dense = budget(config.model, hubkv, cell.prompt, 0.0).num_rows
    rows = budget(config.model, hubkv, cell.prompt, cell.ratio).num_rows
    tail = cell.output - 1  # the last token is never fed
    each = ledger.sequence_bytes(rows, tail)
    slack = most * (ledger.segment_bytes(0) + 3 * ALIGNMENT)  # tables and padding of so many segments
    if cell.kind == "tokens":
        size = cell.dense * ledger.sequence_bytes(dense, tail) + slack
        fitting = min(size // each, most)
        pages = fitting * ledger.pages(tail)
        requests = cell.concurrency if cell.concurrency <= cell.dense else max(cell.concurrency, 2 * fitting)
    else:
        pages = most * ledger.pages(tail)
        size = cell.dense * ledger.segment_bytes(dense) + pages * ledger.page_bytes + slack
        fitting = min((size - pages * ledger.page_bytes) // ledger.segment_bytes(rows), most)
        requests = cell.concurrency
    weights = sum(path.stat().st_size for path in engine.glob("*.safetensors"))
    step = weights + min(fitting, cell.concurrency) * (each - ledger.tail_bytes(tail) // 2)
    return Plan(size, pages * ledger.page_tokens, each, fitting, requests, step)


def write_inputs(engine: Path, cell: Cell, path: Path) -> None:
    """Input data for perf_analyzer: 16 prompts of exactly so many tokens, the handbook begun at other places."""
    tokens = load_engine(engine).load_tokenizer()(DOCUMENT.read_text(encoding="utf-8"))["input_ids"]
    tokens = tokens * -(-cell.prompt // len(tokens))
    data = []
    for i in range(16):
        start = i * 151 % len(tokens)
        ids = (tokens[start:] + tokens[:start])[: cell.prompt]
        data.append(
            {
                "input_ids": {"content": ids, "shape": [len(ids)]},
                "max_tokens": [cell.output],
                "hubkv_ratio": [cell.ratio],
                "end_id": [-1],  # nothing ends an answer early
                "stream": [True],
            }
        )
    path.write_text(json.dumps({"data": data}))


class Watch(threading.Thread):
    """Reads a server's metrics again and again: ``samples`` are (time.time(), values)."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._url = f"http://{server.metrics}/metrics"
        self._ended = threading.Event()

    def read(self) -> dict[str, float]:
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            return read_metrics(answer.read().decode(), "hubkv")

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.samples.append((time.time(), self.read()))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def measure(cell: Cell, plan: Plan, server: TritonServer, folder: Path, name: str) -> dict[str, Any]:
    """Lets perf_analyzer send the requests of one cell; its figures."""
    with HubKVClient(server.grpc, timeout=120) as client:  # the first use of an engine reads its weights
        ids = json.loads((folder / f"{name}.inputs.json").read_text())["data"][0]["input_ids"]["content"]
        client.generate(input_ids=ids, max_tokens=2, hubkv_ratio=cell.ratio)
    time.sleep(1)
    watch = Watch(server)
    before = watch.read()
    watch.start()
    command = [str(ROOT / "benchmarks" / "perf_analyzer.sh"), "-m", "hubkv", "--service-kind", "triton", "-i", "grpc"]
    command += ["-u", server.grpc, "--async", "--streaming", "--input-data", str(folder / f"{name}.inputs.json")]
    command += ["--concurrency-range", str(cell.concurrency), "--request-count", str(plan.requests)]
    command += ["-f", str(folder / f"{name}.latency.csv"), "--verbose-csv"]
    export = folder / f"{name}.profile.json"
    export.unlink(missing_ok=True)  # perf_analyzer does not write over it
    command += ["--profile-export-file", str(export)]
    try:
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=3000)
        time.sleep(1)
    finally:
        watch.stop()
    after = watch.read()
    grown = {key: after[key] - before[key] for key in after}
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    start = min(r["timestamp"] for r in requests) / 1e9
    end = max(r["response_timestamps"][-1] for r in requests) / 1e9
    loaded = [values for at, values in watch.samples if start <= at <= end]
    running = [values['hubkv_requests{state="running"}'] for values in loaded]
    tokens = grown['hubkv_tokens_total{phase="decode"}']
    if tokens != cell.output * plan.requests or len(requests) != plan.requests:
        raise RuntimeError(f"{name}: {len(requests)} requests with {tokens:g} tokens; see {folder / name}.log")
    first = [(r["response_timestamps"][0] - r["timestamp"]) / 1e9 for r in requests]
    gaps = [(r["response_timestamps"][-1] - r["response_timestamps"][0]) / 1e9 / (cell.output - 1) for r in requests]
    return {
        "seconds": end - start,
        "output_tokens": tokens,
        "tokens_per_second": tokens / (end - start),
        "prefill_seconds": grown["hubkv_prefill_seconds_total"],
        "first_token_seconds": statistics.median(first),
        "first_token_seconds_max": max(first),
        "inter_token_seconds": statistics.median(gaps),
        "inter_token_seconds_max": max(gaps),
        "running_peak": max(running),
        "running_mean": statistics.fmean(running),
        "waiting_peak": max(values['hubkv_requests{state="waiting"}'] for values in loaded),
        "arena_peak_bytes": max(values['hubkv_arena_bytes{of="reserved"}'] for values in loaded),
    }


def command(arguments: argparse.Namespace) -> int:
    """Measures and writes what it finds."""
    folder, name = arguments.folder, arguments.cell
    cell = Cell.parse(name, arguments.prompt, arguments.output)
    plan = make_plan(arguments.engine, cell, load_engine(arguments.engine).config.max_batch_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(arguments.engine, cell, folder / f"{name}.inputs.json")
    parameters = ModelParameters(
        str(arguments.engine),
        cache_bytes=plan.cache_bytes,
        tail_tokens=plan.tail_tokens,
        # with short outputs all that fits starts before anything decodes, else none would be left when the last starts
        prefill_tokens_per_step=1 << 20 if cell.kind == "sequences" else None,
    )
    write_model(ROOT / "triton_repo" / "hubkv", folder / "repository", parameters, force=True)
    log = folder / f"{name}.server.log"
    with TritonServer(arguments.environment, folder / "repository", log=log) as server:
        server.wait_until_ready(timeout=120)
        figures = measure(cell, plan, server, folder, name)
    result = folder / f"{name}.json"
    result.write_text(json.dumps({"name": name, **asdict(cell), **asdict(plan), **figures}, indent=1) + "\n")
    print(f"{name}: {figures['tokens_per_second']:.1f} tokens/s, {figures['running_peak']:g} at once")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", help="such as tokens-r0.75-c8 or sequences-r0.9-c44")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the results")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-triton", help="where nvidia-pytriton is")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=512, help="tokens (default: %(default)s)")
    sys.exit(run(command, parser.parse_args()))
