# SPDX-License-Identifier: Apache-2.0
"""10,000 mixed requests to a real Triton server on the demo engine, at four times what it runs at once (``make soak``).

The requests come in rounds. After each round the server must have given everything back; then its memory is read. The
program ends with 1 where a request was lost or has a wrong answer, a counter or the cache is not what it should be, or
memory grows: the slope of resident bytes over the second half of the rounds is more than GROWTH bytes a request. Over
the first 5,000 requests heaps and pools settle.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from hubkv_trt.commands.common import Formatter, run
from hubkv_trt.engine.build import DEFAULT_OUTPUT
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.engine.summary import table
from hubkv_trt.runtime.llm import LLM
from soak_clients import Load
from soak_requests import make_requests
from soak_tally import KINDS, Tally
from triton_site import TritonSite

ROUNDS = 10
KILLS = 2  # client processes in a round
GROWTH = 4096  # bytes a request
SECONDS = 240.0  # for one answer
CACHE_BYTES = 512 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Round:
    """After it: requests so far, seconds since the start, resident bytes of the idle server and of its model."""

    requests: int
    seconds: float
    server: int
    model: int

    @property
    def resident(self) -> int:
        return self.server + self.model


def soak(arguments: argparse.Namespace) -> int:
    """Runs it and says what was found."""
    batch = load_engine(arguments.engine).config.max_batch_size
    clients = 4 * batch
    print(f"== answers of {arguments.engine} alone", flush=True)
    requests = make_requests(LLM(arguments.engine, cache_bytes=CACHE_BYTES))
    print(f"== {len(requests.answers)} different requests; starting the server", flush=True)
    with tempfile.TemporaryDirectory(prefix="hubkv-soak-") as folder:
        site = TritonSite(
            arguments.engine,
            Path(folder),
            max_waiting=3 * batch // 2,
            cache_bytes=CACHE_BYTES,
            copy_engine=False,
            lifetime=arguments.lifetime,
        )
        try:
            site.server.wait_until_ready(timeout=300)
            tally, rounds, problems = _run(site, Load(site, requests, clients, SECONDS), arguments.requests)
        except BaseException:
            print(site.log()[-20_000:], file=sys.stderr)
            raise
        finally:
            status = site.stop()
        if status != 0:
            problems.append(f"the server ended with status {status}")
    slope = _slope(rounds[len(rounds) // 2 :])
    if slope > GROWTH:
        problems.append(f"memory grows by {slope:.0f} bytes a request, more than {GROWTH}")
    problems += tally.lost + tally.wrong
    print(_report(tally, rounds, clients, batch, slope))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "requests": arguments.requests,
        "clients": clients,
        "done": tally.done,
        "refused_and_sent_again": tally.refused,
        "killed_clients": tally.killed,
        "lost": tally.lost,
        "wrong": tally.wrong,
        "rounds": [asdict(r) for r in rounds],
        "slope_bytes_per_request": slope,
        "problems": problems,
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nwrote {arguments.json}")
    for problem in problems[:20]:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _run(site: TritonSite, load: Load, count: int) -> tuple[Tally, list[Round], list[str]]:
    tally, problems, start = Tally(), [], time.monotonic()
    before = site.idle_totals()
    rounds = []
    with tqdm(total=count, unit="request", mininterval=1.0) as bar:
        load.progress = bar.update
        for first in range(0, count, -(-count // ROUNDS)):
            number = min(-(-count // ROUNDS), count - first)
            found = load.run(first, number, KILLS)
            after = site.idle_totals()
            try:
                found.check_counters(before, after)
            except AssertionError as error:
                problems.append(f"counters after request {first + number}: {error}")
                bar.write(f"soak: {problems[-1]}", file=sys.stderr)
            before = after
            for problem in found.lost + found.wrong:
                bar.write(f"soak: {problem}", file=sys.stderr)
            tally.add(found)
            rounds.append(Round(first + number, time.monotonic() - start, *_resident_bytes(site.server.pid)))
            bar.set_postfix(refused=tally.refused.total(), wrong=len(tally.wrong), lost=len(tally.lost))
    return tally, rounds, problems


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Of a server, and of all processes below it: it has one for each model."""
    server = psutil.Process(pid)
    below = 0
    for process in server.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            below += process.memory_info().rss
    return server.memory_info().rss, below


def _slope(rounds: list[Round]) -> float:
    """Bytes a request, by least squares."""
    if len(rounds) < 2:
        return 0.0
    return float(np.polyfit([r.requests for r in rounds], [r.resident for r in rounds], 1)[0])


def _report(tally: Tally, rounds: list[Round], clients: int, batch: int, slope: float) -> str:
    rows = [("kind", "ended as it should   refused and sent again")]
    rows += [(kind, f"{tally.done[kind]:>20}   {tally.refused[kind]:>22}") for kind in KINDS]
    rows += [("all", f"{tally.done.total():>20}   {tally.refused.total():>22}"), ("", "")]
    rows += [("requests", "seconds   idle server, MiB   its model, MiB")]
    sizes = [(f"{r.server / MIB:>16.1f}", f"{r.model / MIB:>14.1f}") for r in rounds]
    rows += [(f"{r.requests:>8}", f"{r.seconds:>7.0f}   {'   '.join(s)}") for r, s in zip(rounds, sizes, strict=True)]
    ends = f"{tally.killed} client processes killed; {len(tally.lost)} lost, {len(tally.wrong)} wrong"
    memory = f"resident memory over the second half: {slope:+.0f} bytes a request (at most {GROWTH})"
    return f"\n{table(rows)}\n\n{clients} clients at a batch of {batch}; {ends}\n{memory}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser("soak.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"), metavar="FILE", help="all figures")
    parser.add_argument("--lifetime", type=float, default=7200.0, metavar="SECONDS", help="the server is stopped then")
    sys.exit(run(soak, parser.parse_args()))
