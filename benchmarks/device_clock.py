# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU: what it takes itself, and what a caller in Python waits for."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class DeviceTiming:
    """Median seconds of one call: replayed from a CUDA graph, and called from Python."""

    device: float
    python: float


def measure(calls: Sequence[Call], runs: int = 30) -> DeviceTiming:
    """Times calls on rotated inputs: a run makes all of them once, in order. On the CPU both figures are the same."""
    if torch.cuda.is_available():
        python = _median(_one_by_one(calls), len(calls), runs)
        return DeviceTiming(_median(_graph(calls), len(calls), runs), python)
    _one_by_one(calls)()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        _one_by_one(calls)()
        times.append((time.perf_counter() - start) / len(calls))
    return DeviceTiming(statistics.median(times), statistics.median(times))


def measure_peer(calls: Sequence[Call]) -> DeviceTiming:
    """As measure(); where a call cannot be captured into a graph, what Python waits for is both figures."""
    try:
        return measure(calls)
    except RuntimeError as error:
        print(f"not captured: {error}", file=sys.stderr)
        python = _median(_one_by_one(calls), len(calls), 30)
        return DeviceTiming(python, python)


def _one_by_one(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _graph(calls: Sequence[Call]) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _one_by_one(calls)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _one_by_one(calls)()
    return graph.replay


def _median(run: Call, calls: int, runs: int) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes/s, read and written, of copies inside the device's memory; size: bytes of the source."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / measure([lambda: target.copy_(source)] * 4).device
