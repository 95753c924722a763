# SPDX-License-Identifier: Apache-2.0
"""Tables, a CSV file and plots of the cells that benchmarks/triton.sh has measured.

Reads FOLDER/*.json; writes summary.csv, triton.svg and report.md there, and prints the latter.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import MIB, machine, machine_line, table

Cell = dict[str, Any]


def read_cells(folder: Path) -> tuple[list[Cell], Cell | None]:
    """The cells under load, ordered, and the overhead."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.name.count(".json") == 1]
    found = [cell for cell in found if isinstance(cell, dict) and "name" in cell]
    cells = sorted((c for c in found if "kind" in c), key=lambda c: (c["kind"], c["concurrency"], c["ratio"]))
    return cells, next((c for c in found if c["name"] == "overhead"), None)


def dense_beside(cell: Cell, cells: list[Cell]) -> Cell | None:
    """The cell without compression that this one is compared with."""
    same = [c for c in cells if c["kind"] == cell["kind"] and c["ratio"] == 0]
    if cell["kind"] == "tokens":
        same = [c for c in same if c["concurrency"] == cell["concurrency"]]
    return same[0] if same else None


def by_bytes(cell: Cell, dense: Cell) -> float:
    """How much faster than dense it would be if prefill took what it takes and decoding were nothing but bytes."""
    prefill = dense["prefill_seconds"] / dense["requests"]
    decode = dense["seconds"] / dense["requests"] - prefill
    rows, step = (
        [min(c["fitting"], c["concurrency"]) for c in (cell, dense)],
        [c["step_bytes"] for c in (cell, dense)],
    )
    return (prefill + decode) / (prefill + decode * (step[0] / rows[0]) / (step[1] / rows[1]))


def tokens_table(cells: list[Cell]) -> str:
    header = ("r", "concurrency", "requests", "room for", "at once: most", "mean", "tokens/s", "over dense", "by bytes",
              "prefill s", "decode and rest s", "first token s", "between tokens ms")  # fmt: skip
    rows = []
    for c in (c for c in cells if c["kind"] == "tokens"):
        dense = dense_beside(c, cells)
        rate = "-" if dense is None else f"{c['tokens_per_second'] / dense['tokens_per_second']:.2f}x"
        most = "-" if dense is None else f"{by_bytes(c, dense):.2f}x"
        rows.append((f"{c['ratio']:g}", c["concurrency"], c["requests"], c["fitting"], f"{c['running_peak']:g}",
                     f"{c['running_mean']:.1f}", f"{c['tokens_per_second']:.1f}", rate, most,
                     f"{c['prefill_seconds']:.1f}", f"{c['seconds'] - c['prefill_seconds']:.1f}",
                     f"{c['first_token_seconds']:.1f}", f"{c['inter_token_seconds'] * 1e3:.0f}"))  # fmt: skip
    return table(header, rows)


def sequences_table(cells: list[Cell]) -> str:
    header = ("r", "sent at once", "room for", "at once: most", "over dense", "1 / (1 - r)", "share", "of arena, MiB")
    rows = []
    for c in (c for c in cells if c["kind"] == "sequences"):
        dense, ideal = dense_beside(c, cells), 1 / (1 - c["ratio"])
        over = None if dense is None else c["running_peak"] / dense["running_peak"]
        rows.append((f"{c['ratio']:g}", c["concurrency"], c["fitting"], f"{c['running_peak']:g}",
                     "-" if over is None else f"{over:.2f}x", f"{ideal:.2f}",
                     "-" if over is None else f"{over / ideal:.3f}",
                     f"{c['arena_peak_bytes'] / MIB:.1f} / {c['cache_bytes'] / MIB:.1f}"))  # fmt: skip
    return table(header, rows)


def overhead_table(cell: Cell) -> str:
    seconds, rows = cell["seconds"], []
    base = seconds["LLM.generate"]
    for name, values in seconds.items():
        over = [v / b - 1 for v, b in zip(values, base, strict=True)]
        spread = "-" if name == "LLM.generate" else f"{min(over):+.1%} .. {max(over):+.1%}"
        middle = "-" if name == "LLM.generate" else f"{statistics.median(over):+.1%}"
        rows.append(
            (name, f"{statistics.median(values):.2f}", f"{min(values):.2f} .. {max(values):.2f}", middle, spread)
        )
    return table(("way", "s, median", "spread", "over LLM.generate, median", "spread"), rows)


def plot(cells: list[Cell], path: Path) -> None:
    """Throughput, time to first token, time between tokens and sequences at once, over concurrency."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hubkv"
    import matplotlib.pyplot as plt

    panels = (("tokens_per_second", "output tokens/s", 1.0), ("first_token_seconds", "time to first token, s", 1.0),
              ("inter_token_seconds", "time between tokens, ms", 1e3),
              ("running_peak", "sequences running at once", 1.0))  # fmt: skip
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    under_load = [c for c in cells if c["kind"] == "tokens"]
    for axis, (key, title, scale) in zip(axes, panels, strict=True):
        for ratio in sorted({c["ratio"] for c in under_load}):
            line = [c for c in under_load if c["ratio"] == ratio]
            label = f"r = {ratio:g}" if ratio else "dense"
            axis.plot([c["concurrency"] for c in line], [c[key] * scale for c in line], marker="o", label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("concurrency")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the results")
    folder = parser.parse_args().folder
    cells, overhead = read_cells(folder)
    if not cells and overhead is None:
        raise SystemExit(f"triton_report.py: {folder} has no results; run benchmarks/triton.sh")
    lines = [machine_line(machine())]
    kinds = {c["kind"] for c in cells}
    if cells:
        keys = list(dict.fromkeys(key for c in cells for key in c))
        with (folder / "summary.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(cells)
    if "tokens" in kinds:
        c = next(c for c in cells if c["kind"] == "tokens")
        arena = f"arena of two dense sequences ({c['cache_bytes'] / MIB:.0f} MiB)"
        lines += [f"### {c['prompt']} prompt and {c['output']} output tokens, {arena}", tokens_table(cells)]
        plot(cells, folder / "triton.svg")
    if "sequences" in kinds:
        c = next(c for c in cells if c["kind"] == "sequences")
        arena = f"arena of four dense prompts ({c['cache_bytes'] / MIB:.0f} MiB)"
        lines += [f"### {c['prompt']} prompt and {c['output']} output tokens, {arena}", sequences_table(cells)]
    if overhead is not None:
        shape = f"{overhead['requests']} requests at once, {overhead['prompt']} prompt and {overhead['output']} output"
        lines += [f"### Overhead: {shape} tokens", overhead_table(overhead)]
    report = "\n\n".join(lines) + "\n"
    (folder / "report.md").write_text(report)
    print(report)


if __name__ == "__main__":
    sys.exit(main())
