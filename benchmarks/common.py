# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine they ran on, its copy bandwidth, a timer, peak memory, cells and tables."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

USER_ENVIRONMENT = os.environ.copy()

# Before torch: the package sets how torch's threads wait and its memory is paged, as it does for its users.
from hubkv_trt import ops  # noqa: E402

# isort: split
import torch  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over `runs` calls."""

    median: float
    best: float
    runs: int


def measure(call: Callable[[], object], seconds: float = 1.0, min_runs: int = 3, max_runs: int = 200) -> Timing:
    """Calls once to warm up, then until `seconds` have passed (at least min_runs, at most max_runs times)."""
    call()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < max_runs and (len(times) < min_runs or time.perf_counter() < deadline):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Timing(statistics.median(times), min(times), len(times))


# ---- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth:
    """Copy bandwidth in bytes/s, read and written bytes counted. `name` is the way of copying that was fastest."""

    name: str
    median: float
    best: float


def copy_bandwidth(threads: int, size: int = 512 * MIB, seconds: float = 2.0) -> Bandwidth:
    """The faster of torch's copy_ and one memcpy per thread, over buffers that no cache holds.

    Args:
        threads: how many copy at once.
        size: bytes of the source; two such buffers are used. At least 64 MiB.
    """
    if size < 64 * MIB:
        raise ValueError(f"size: {size} is not at least {64 * MIB} bytes, a cache could hold it")
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    share = size // threads

    def memcpy(i: int) -> None:  # ctypes releases the GIL, so the copies run side by side
        ctypes.memmove(target.data_ptr() + i * share, source.data_ptr() + i * share, share)

    with ThreadPoolExecutor(threads) as pool:
        ways: dict[str, Callable[[], object]] = {
            "torch copy_": lambda: target.copy_(source),
            f"{threads} x memcpy": lambda: list(pool.map(memcpy, range(threads))),
        }
        found = [
            Bandwidth(name, 2 * size / t.median, 2 * size / t.best)
            for name, t in ((n, measure(call, seconds / len(ways), 5)) for n, call in ways.items())
        ]
    return max(found, key=lambda b: b.best)


def read_bandwidth(size: int = 512 * MIB, seconds: float = 1.0) -> Bandwidth:
    """What reading alone reaches: torch's sum over a buffer that no cache holds."""
    numbers = torch.ones(size // 4)
    timing = measure(numbers.sum, seconds, 5)
    return Bandwidth("torch sum", size / timing.median, size / timing.best)


def machine() -> dict[str, Any]:
    """CPU, cores, instructions, threads and versions: what a figure means nothing without."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    packages = {}
    for name in ("torch", "transformers", "kvpress", "numpy"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "-"
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "isa": ops.cpu_isa(),
        "threads": ops.num_threads(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        **packages,
    }


def machine_line(info: dict[str, Any]) -> str:
    return (
        f"{info['cpu']}, {info['cores']} cores, {info['memory_gib']} GiB, {info['isa']}; "
        f"threads: hubkv {info['threads']}, torch {info['torch_threads']}; "
        + ", ".join(f"{n} {info[n]}" for n in ("torch", "transformers", "kvpress"))
    )


# ---- memory of this process -----------------------------------------------------------------------------------------


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"field: {field!r} is not in /proc/self/status")


def resident() -> int:
    """Resident bytes now."""
    return _status("VmRSS")


def peak_resident() -> int:
    """The most resident bytes since the last reset_peak (or the start)."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Peak memory counts from here on (Linux: writes 5 to clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


# ---- cells: one measurement, one process ----------------------------------------------------------------------------

CELL_MARK = "HUBKV-CELL "


def run_cell(script: str, cell: dict[str, Any], timeout: float, peer: bool) -> dict[str, Any]:
    """Runs `script --cell JSON` in a process of its own and returns what it gave to finish_cell.

    A peer's threads wait and its memory is paged as where this package is not there: by default, or as the user set.

    A cell that fails or takes longer than `timeout` seconds returns {"error": last line of its output}.
    """
    command = [sys.executable, script, "--cell", json.dumps(cell)]
    defaults = {"GOMP_SPINCOUNT": "300000", "THP_MEM_ALLOC_ENABLE": "0"} if peer else {}
    environment = {**defaults, **USER_ENVIRONMENT}
    try:
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(CELL_MARK):
            return json.loads(line[len(CELL_MARK) :])
    lines = (done.stderr or done.stdout).strip().splitlines()
    return {"error": f"exit code {done.returncode}: {lines[-1] if lines else 'no output'}"}


def finish_cell(result: dict[str, Any]) -> None:
    print(CELL_MARK + json.dumps(result), flush=True)


# ---- output ---------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too; the first column is left-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max([len(h), 3, *(len(r[i]) for r in cells)]) for i, h in enumerate(header)]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            + " |"
        )

    rule = "|" + "|".join(("-" * (w + 2)) if i == 0 else ("-" * (w + 1) + ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, cells)])


def human_seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.0f} us"


def progress(text: str) -> None:
    """One line on stderr; the report itself goes to stdout."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def write_json(path: Path | None, **data: Any) -> None:
    """Writes every figure of a run, unrounded, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1, default=asdict) + "\n")
        progress(f"wrote {path}")


def arguments(description: str, epilog: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads of torch and of the host kernels (default: the CPUs of this process, %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure, unrounded, to FILE")
    return parser


def set_threads(threads: int) -> None:
    """Of torch and of the host kernels.

    Raises:
        ValueError: there is less than one.
    """
    if threads < 1:
        raise ValueError(f"threads: {threads} is not an integer >= 1")
    torch.set_num_threads(threads)
    ops.set_num_threads(threads)
