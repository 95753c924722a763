# SPDX-License-Identifier: Apache-2.0
"""Prefill, decoding and memory of an engine by prompt length, ratio and batch, beside transformers and kvpress."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import common
import generate_cells

DESCRIPTION = """\
Runs the demo engine (or --engine) at several prompt lengths, compression ratios and
batch sizes, and beside it, on the same prompt and machine, transformers' generate
(sdpa, float32, DynamicCache) and kvpress's FastKVzipPress with the same gate.

  prefill   one prompt; the share of the scorer (the gate) and of the stages (refine,
            select, compact) in it
  decode    tokens/s of a batch. Its speed-up over our own dense run (r = 0) is set
            against the byte ceiling (weights + dense rows) / (weights + kept rows):
            what the speed-up would be if time were nothing but bytes read
  cache     bytes that the KV cache holds; peak: the most memory that the process had
            above what it had after loading the model

Each (peer, length, ratio) runs in a process of its own."""
EPILOG = """\
For a batch the prompt is prefilled once and its cache copied, for us and for
transformers alike: every sequence reads memory of its own. kvpress's gates score one
sequence at a time, so it runs with batch 1 only.

examples:
  python benchmarks/generate.py --quick             about 2 minutes
  python benchmarks/generate.py                     about 20 minutes on two cores, 10 GiB of memory
  python benchmarks/generate.py --peers none --lengths 4096 --ratios 0 0.9"""

PEERS = ("transformers", "kvpress")
Results = dict[tuple[str, int, float], dict[str, Any]]


def main() -> None:
    from hubkv_trt.engine.build import DEFAULT_OUTPUT

    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument(
        "--engine",
        type=Path,
        default=DEFAULT_OUTPUT,
        metavar="DIR",
        help="float32 engine with HubKV; built from --model if it is not there (default: %(default)s)",
    )
    parser.add_argument("--model", default="demo", metavar="DIR|FILE.gguf", help="what the peers load (default: demo)")
    parser.add_argument("--gate", type=Path, metavar="FILE", help="the model's gate (default: the one in the package)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="prompt lengths (default: 1024 4096 7936)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", metavar="r", help="0 is always run (default: 0 0.5 0.75 0.9)"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences of the batched runs (default: 16)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens of a decode run, 2..64 (default: 24)")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, "none"], default=list(PEERS), help="(default: both)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds for one process")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        run_cell(json.loads(args.cell))
        return
    full = not args.quick
    args.lengths = args.lengths or ([1024, 4096, 7936] if full else [768])
    args.ratios = sorted({0.0, *(args.ratios or ([0.5, 0.75, 0.9] if full else [0.9]))})
    args.batch = args.batch or (16 if full else 4)
    args.new_tokens = args.new_tokens or (24 if full else 8)
    if not 2 <= args.new_tokens <= generate_cells.TAIL:
        parser.error(f"--new-tokens: {args.new_tokens} is not in 2..{generate_cells.TAIL}")
    if not all(0 <= r < 1 for r in args.ratios):
        parser.error(f"--ratios: {args.ratios} are not all in [0, 1)")
    run(args)


def run_cell(cell: dict[str, Any]) -> None:
    common.set_threads(cell["threads"])
    common.finish_cell(getattr(generate_cells, cell["peer"])(cell))


def run(args: argparse.Namespace) -> None:
    from hubkv_trt.models.checkpoint import demo_model_path
    from hubkv_trt.scorers.fastkvzip import find_gate, no_gate_message

    common.set_threads(args.threads)
    model = Path(demo_model_path() if args.model == "demo" else args.model)
    gate = args.gate or find_gate(str(model))
    if gate is None:
        raise SystemExit(no_gate_message(str(model)))
    prepare_engine(args, gate)
    info = common.machine()
    print(common.machine_line(info))
    copy = common.copy_bandwidth(args.threads, seconds=0.5 if args.quick else 3)
    print(
        f"copy bandwidth, read + written: {copy.best / 1e9:.1f} GB/s ({copy.name}); "
        f"{args.new_tokens} tokens a decode run, best of {1 if args.quick else 2}\n"
    )
    started, results = time.perf_counter(), {}
    todo = [("hubkv", t, r) for t in args.lengths for r in args.ratios]
    todo += [("transformers", t, 0.0) for t in args.lengths if "transformers" in args.peers]
    todo += [("kvpress", t, r) for t in args.lengths for r in args.ratios if r > 0 and "kvpress" in args.peers]
    for number, (peer, tokens, ratio) in enumerate(todo, 1):
        common.progress(f"{number}/{len(todo)} {peer}, T = {tokens}, r = {ratio:g}")
        cell = {
            "peer": peer,
            "tokens": tokens,
            "ratio": ratio,
            "batch": args.batch,
            "threads": args.threads,
            "new_tokens": args.new_tokens,
            "repeat": 1 if args.quick else 2,
            "prefills": 2 if tokens <= 4096 and not args.quick else 1,
            "engine": str(args.engine),
            "model": str(model),
            "gate": str(gate),
        }
        results[peer, tokens, ratio] = common.run_cell(__file__, cell, args.timeout, peer != "hubkv")
        if "error" in results[peer, tokens, ratio]:
            common.progress(f"failed: {results[peer, tokens, ratio]['error']}")
    flat = [{"peer": p, "tokens": t, "ratio": r, **value} for (p, t, r), value in results.items()]
    common.write_json(args.json, machine=info, copy=copy, results=flat)
    print(prefill_table(args, results) + "\n")
    for size in dict.fromkeys((1, args.batch)):
        print(f"Decoding, batch {size}\n\n" + decode_table(args, results, str(size)) + "\n")
    print(targets(args, results))
    common.progress(f"took {(time.perf_counter() - started) / 60:.1f} minutes")


def prepare_engine(args: argparse.Namespace, gate: Path) -> None:
    from hubkv_trt.config import DType, HubKVConfig
    from hubkv_trt.engine.build import build_engine
    from hubkv_trt.engine.directory import read_config

    if not args.engine.exists():
        common.progress(f"building {args.engine}")
        build_engine(args.model, args.engine, hubkv=HubKVConfig(), gate=gate, max_batch_size=max(16, args.batch))
    config = read_config(args.engine)
    longest = max(args.lengths)
    needed = {
        "hubkv": (config.hubkv is not None, "an engine with HubKV"),
        "dtype": (config.dtype is DType.FLOAT32, "float32, as the peers run"),
        "max_input_len": (config.max_input_len >= longest, f"at least {longest}, the longest prompt"),
        "max_batch_size": (config.max_batch_size >= args.batch, f"at least {args.batch}"),
        "lengths": (longest + generate_cells.TAIL <= config.model.max_position_embeddings, "in the model's positions"),
    }
    for name, (right, what) in needed.items():
        if not right:
            raise SystemExit(f"generate.py: engine {args.engine}: {name} is not {what}; name another with --engine")


# ---- report ---------------------------------------------------------------------------------------------------------


def mib(value: float) -> str:
    return f"{value / common.MIB:.0f}"


def prefill_table(args: argparse.Namespace, results: Results) -> str:
    """One row per length and ratio. kvpress at r = 0 is transformers."""
    rows = []
    for tokens in args.lengths:
        dense = results.get(("transformers", tokens, 0.0), {})
        for ratio in args.ratios:
            ours, press = results["hubkv", tokens, ratio], results.get(("kvpress", tokens, ratio), {})
            if "error" in ours:
                rows.append([tokens, f"{ratio:g}", ours["error"], *["-"] * 9])
                continue
            scorer, stages, total = prefill_parts(ours)
            rows.append(
                [
                    tokens,
                    f"{ratio:g}",
                    f"{total:.2f}",
                    f"{100 * scorer / total:.2f}",
                    f"{100 * stages / total:.3f}",
                    f"{stages * 1e3:.1f}",
                    mib(ours["prefill_memory"]["peak_above_start"]),
                    *(f"{x['prefill']['prefill']:.2f}" if "prefill" in x else "-" for x in (dense, press)),
                    *(mib(x["prefill_memory"]["peak_above_start"]) if "prefill" in x else "-" for x in (dense, press)),
                ]
            )
    return common.table(
        [
            "T",
            "r",
            "prefill s",
            "scorer %",
            "stages %",
            "stages ms",
            "peak MiB",
            "transformers s",
            "kvpress s",
            "transformers MiB",
            "kvpress MiB",
        ],
        rows,
    )


def ceiling(result: dict[str, Any], size: int) -> float:
    """(weights + dense rows) / (weights + kept rows), in bytes read by one step of the batch."""
    dense, kept = (size * result[name] * result["row_bytes"] for name in ("dense_rows", "rows"))
    return float((result["weights"] + dense) / (result["weights"] + kept))


def decode_table(args: argparse.Namespace, results: Results, size: str) -> str:
    rows = []
    for tokens in args.lengths:
        own, dense = results["hubkv", tokens, 0.0], results.get(("transformers", tokens, 0.0), {})
        theirs = dense.get("decode", {}).get(size)
        for ratio in args.ratios:
            ours, press = results["hubkv", tokens, ratio], results.get(("kvpress", tokens, ratio), {})
            if "error" in ours or "error" in own:
                rows.append([tokens, f"{ratio:g}", *["-"] * 10])
                continue
            here, top = ours["decode"][size], ceiling(ours, int(size))
            gain = own["decode"][size]["step"] / here["step"]
            masked = press.get("decode", {}).get(size)
            rows.append(
                [
                    tokens,
                    f"{ratio:g}",
                    f"{int(size) / here['step']:.1f}",
                    f"{gain:.2f}x",
                    f"{top:.2f}x",
                    f"{100 * gain / top:.0f}",
                    f"{int(size) / theirs['step']:.1f}" if theirs else "-",
                    f"{theirs['step'] / here['step']:.2f}x" if theirs else "-",
                    f"{int(size) / masked['step']:.1f}" if masked else "-",
                    mib(here["cache"]),
                    mib(theirs["cache"]) if theirs else "-",
                    mib(here["peak_above_start"]),
                    mib(theirs["peak_above_start"]) if theirs else "-",
                ]
            )
    return common.table(
        [
            "T",
            "r",
            "tokens/s",
            "over r = 0",
            "ceiling",
            "% of ceiling",
            "transformers",
            "ours / theirs",
            "kvpress",
            "cache MiB",
            "transformers",
            "peak MiB",
            "transformers",
        ],
        rows,
    )


def prefill_parts(cell: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of the scorer, of the stages, and of the whole prefill; one that keeps every row only compacts."""
    seconds = cell["prefill"]
    stages = sum(seconds.get(name, 0.0) for name in ("refine", "select", "compact"))
    return seconds.get("scorer", 0.0), stages, seconds["prefill"]


def targets(args: argparse.Namespace, results: Results) -> str:
    """Reached or not, over the cells that ran."""
    ours = {(t, r): v for (p, t, r), v in results.items() if p == "hubkv" and "error" not in v}
    rows = []
    if ours:
        parts = [prefill_parts(v) for (_, r), v in ours.items() if r > 0] or [prefill_parts(v) for v in ours.values()]
        scorer = [100 * part / total for part, _, total in parts]
        stages = [100 * part / total for _, part, total in parts]
        rows.append(["scorer, share of prefill", "<= 5 %", f"{min(scorer):.2f} .. {max(scorer):.2f} %"])
        rows.append(["stages, share of prefill", "<= 0.5 %", f"{min(stages):.3f} .. {max(stages):.3f} %"])
    size = str(args.batch)
    of_ceiling = [
        100 * ours[t, 0.0]["decode"][size]["step"] / v["decode"][size]["step"] / ceiling(v, args.batch)
        for (t, r), v in ours.items()
        if r > 0 and (t, 0.0) in ours
    ]
    if of_ceiling:
        rows.append(
            [
                f"speed-up over r = 0, batch {size}, of its ceiling",
                ">= 80 %",
                f"{min(of_ceiling):.0f} .. {max(of_ceiling):.0f} %",
            ]
        )
    longest = max(args.lengths)
    for text, goal, cells in (
        (f"decode over transformers' dense, T = {longest}", ">= 2x", [k for k in ours if k[0] == longest]),
        ("decode over transformers' dense, all cells", ">= 1x", list(ours)),
    ):
        found = [
            results["transformers", t, 0.0]["decode"][b]["step"] / ours[t, r]["decode"][b]["step"]
            for t, r in cells
            for b in dict.fromkeys(("1", size))
            if b in results.get(("transformers", t, 0.0), {}).get("decode", {})
        ]
        if found:
            rows.append([text, goal, f"{min(found):.2f}x .. {max(found):.2f}x"])
    slower = [
        results["transformers", t, 0.0]["prefill"]["prefill"] / v["prefill"]["prefill"]
        for (t, _), v in ours.items()
        if "prefill" in results.get(("transformers", t, 0.0), {})
    ]
    if slower:
        rows.append(["prefill over transformers', all cells", ">= 1x", f"{min(slower):.2f}x .. {max(slower):.2f}x"])
    return common.table(["what", "target", "found"], rows)


if __name__ == "__main__":
    main()
