# SPDX-License-Identifier: Apache-2.0
"""Long generations with caches that are compressed while they decode: speed, bytes, and what it costs in likelihood."""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import common
from long_nll import compare, forced
from long_settings import settings

DESCRIPTION = """\
Generates --tokens tokens for a batch with every way of compressing (long_settings.py)
at one mean budget, and sets

  speed     tokens/s, the part of the time that compressing takes, and the speed-up over
            dense beside its byte ceiling: the sum over steps of (weights + dense rows)
            over that of (weights + rows held)
  cache     bytes that the cache holds at the end and at most; --plot draws them by step
  NLL       of texts and of what the dense run generated, paired with dense, with 95%
            intervals (bootstrap over blocks of tokens). The texts are fed in pieces that
            end where compressions are due: the schedule of generating them"""
EPILOG = """\
examples:
  python benchmarks/long_generation.py --quick                        under a minute
  python benchmarks/long_generation.py --json long.json --plot long.svg   hours on two cores
  python benchmarks/long_generation.py --settings dense HARD-KV top-k --skip speed"""

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("examples/station_handbook.txt", "docs/architecture.md", "python/hubkv_trt/runtime/llm.py")
PROMPT = 64  # tokens of a text that are the prompt
OWN = {"own": 0.0, "own, sampled": 0.8}  # what the dense run generates behind the first prompt, by temperature


def main() -> None:
    from hubkv_trt.engine.build import DEFAULT_OUTPUT

    names = list(settings(64, 128, 32))
    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, metavar="B", help="sequences (default: 8)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of each (default: 6000)")
    parser.add_argument("--budget", type=int, metavar="b", help="rows of a head in the mean (default: 512)")
    parser.add_argument("--interval", type=int, metavar="N", help="steps between compressions (default: 128)")
    parser.add_argument("--settings", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--against", choices=names, default="top-k", help="of NLL's last column (default: top-k)")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FILE", help=f"(default: {', '.join(TEXTS)})")
    parser.add_argument("--skip", nargs="+", choices=["speed", "nll"], default=[], help="leave out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="cache bytes and tokens/s by step: .svg, .png, .pdf")
    args = parser.parse_args()
    full = not args.quick
    args.batch = args.batch or (8 if full else 2)
    args.tokens = args.tokens or (6000 if full else 160)
    args.budget = args.budget or (512 if full else 48)
    args.interval = args.interval or (128 if full else 32)
    if args.quick and args.settings == names:
        args.settings = ["dense", "top-k", "HARD-KV"]
    if args.quick:
        args.texts = args.texts or [ROOT / TEXTS[0]]
    args.texts = args.texts or [ROOT / text for text in TEXTS]
    args.settings = list(dict.fromkeys(["dense", *args.settings]))
    run(args)


def run(args: argparse.Namespace) -> None:
    from hubkv_trt.engine.directory import load_engine

    common.set_threads(args.threads)
    info, engine = common.machine(), load_engine(args.engine, verify=False)
    print(common.machine_line(info))
    print(f"{args.batch} x {args.tokens} tokens, budget {args.budget} rows a head, every {args.interval} steps\n")
    model = engine.config.model
    row_bytes = model.kv_bytes_per_token(engine.config.dtype) // model.num_rows_per_token + 4
    asked = settings(args.budget, args.interval, min(32, args.interval), row_bytes)
    weights = sum(w.numel() * w.element_size() for w in engine.weights.values())
    speed: dict[str, Any] = {}
    nll: dict[str, Any] = {}
    for name in args.settings:
        common.progress(name)
        llm = open_llm(engine, asked[name], args)
        if "speed" not in args.skip:
            speed[name] = generate(llm, weights, args)
        if "nll" not in args.skip:
            nll[name] = likelihood(llm, asked[name], args, nll.get("dense"))
        del llm
        gc.collect()
    if speed:
        print(speed_table(speed) + "\n")
    if nll:
        print(nll_table(nll, args.against if args.against in nll else "dense", args.interval))
    configs = {name: config.to_dict() for name, config in asked.items() if config is not None}
    plain = {name: {text: {k: v for k, v in r.items() if k != "nll"} for text, r in found.items()}
             for name, found in nll.items()}  # fmt: skip
    common.write_json(args.json, machine=info, configs=configs, speed=speed, nll=plain)
    if args.plot and speed:
        draw(speed, args.plot)


def open_llm(engine: Any, config: Any, args: argparse.Namespace) -> Any:
    """With room for the batch, and for one sequence of any text."""
    from hubkv_trt.runtime.cache import Ledger
    from hubkv_trt.runtime.llm import LLM

    model = engine.config.model
    ledger = Ledger(model, engine.config.dtype)
    tail = args.tokens + 16 if config is None else config.tail_tokens
    rows = model.num_rows_per_token * PROMPT + (0 if config is None else config.rows(model))
    room = (args.batch + 2) * (2 * ledger.segment_bytes(rows) + ledger.tail_bytes(tail)) + (64 << 20)
    return LLM(engine, cache_bytes=room, tail_tokens=(args.batch + 1) * (tail + 16), decode_compression=config)


# ---- speed -----------------------------------------------------------------------------------------------------------


def generate(llm: Any, weights: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a batch over weights of so many bytes, and by step: seconds, cache bytes and KV rows in use."""
    from hubkv_trt.runtime.llm import SamplingParams

    text = llm.tokenizer((ROOT / TEXTS[0]).read_text())["input_ids"]
    prompts = [list(text[7 * b : 7 * b + PROMPT]) for b in range(args.batch)]
    room = llm.config.model.max_position_embeddings - PROMPT
    params = SamplingParams(max_tokens=min(args.tokens, room), ignore_eos=True)
    sequences = llm._requests.generation(prompts, params, 0.0, None, False, False)
    for sequence in sequences:
        llm._scheduler.add(sequence)
    heads = llm.config.model.num_rows_per_token
    steps: list[tuple[float, int, int, int]] = []
    while not all(s.finished for s in sequences):
        start = time.perf_counter()
        _, ran = llm.step()
        if len(ran) == args.batch:
            rows = sum(s.segment_rows + s.tail_length * heads for s in ran if not s.finished)
            dense = sum(s.next_position for s in ran) * heads
            steps.append((time.perf_counter() - start, llm.cache.held_bytes, rows, dense))
    failed = [s.error for s in sequences if s.error is not None]
    if failed:
        raise failed[0]
    steps = steps[:-1]  # in the last one they end
    condense = sum(s.stats.seconds.get("condense", 0.0) for s in sequences)
    seconds = sum(step[0] for step in steps)
    row_bytes = llm.cache.ledger.dense_bytes(1) // heads
    kept, dense_sum = (sum(weights + step[i] * row_bytes for step in steps) for i in (2, 3))
    return {
        "tokens_per_second": args.batch * len(steps) / seconds, "seconds": seconds, "condense_seconds": condense,
        "condensations": sum(s.stats.condensations for s in sequences), "ceiling": dense_sum / kept,
        "held_bytes": steps[-1][1], "peak_bytes": max(step[1] for step in steps), "rows": steps[-1][2],
        "step_seconds": [step[0] for step in steps], "step_bytes": [step[1] for step in steps],
        "step_rows": [step[2] for step in steps],
        "token_ids": sequences[0].output_ids, "prompt": prompts[0],
    }  # fmt: skip


def speed_table(speed: dict[str, Any]) -> str:
    rows, dense = [], speed["dense"]
    for name, r in speed.items():
        gain = dense["seconds"] / len(dense["step_seconds"]) * len(r["step_seconds"]) / r["seconds"]
        rows.append([
            name, f"{r['tokens_per_second']:.1f}", f"{gain:.2f}", f"{r['ceiling']:.2f}", f"{gain / r['ceiling']:.0%}",
            f"{r['condense_seconds'] / r['seconds']:.1%}", r["condensations"], f"{r['peak_bytes'] / common.MIB:.0f}",
            f"{r['rows'] / 1000:.0f}k",
        ])  # fmt: skip
    header = ["setting", "tokens/s", "speed-up", "byte ceiling", "reached", "compressing", "times", "peak MiB", "rows"]
    return common.table(header, rows)


# ---- likelihood ------------------------------------------------------------------------------------------------------


def likelihood(llm: Any, config: Any, args: argparse.Namespace, dense: Any) -> dict[str, Any]:
    """By text, those of ``OWN`` with it: NLL of its tokens, mean, and rows of a head at the end."""
    from hubkv_trt.runtime.llm import SamplingParams

    if dense is None:
        ids = {path.name: llm.tokenizer(path.read_text())["input_ids"] for path in args.texts}
        first = next(iter(ids.values()))[:PROMPT]
        for name, temperature in OWN.items():
            params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=temperature, seed=0)
            (output,) = llm.generate([first], params, ratio=0.0)
            ids[name] = first + output.token_ids
    else:
        ids = {name: found["token_ids"] for name, found in dense.items()}
    found = {}
    for name, tokens in ids.items():
        tokens = tokens[: min(PROMPT + args.tokens, llm.config.model.max_position_embeddings)]
        values, stats = forced(llm, tokens[:PROMPT], tokens[PROMPT:], config, 0.0)
        rows = None if stats.condensed_rows is None else float(stats.condensed_rows.mean())
        found[name] = {"mean": float(values.mean()), "tokens": len(values), "rows": rows, "nll": values,
                       "token_ids": tokens}  # fmt: skip
        if dense is not None:
            found[name]["over_dense"] = compare(values, dense[name]["nll"], args.interval)
    return found


def nll_table(nll: dict[str, Any], against: str, block: int) -> str:
    rows = []
    for text, dense in nll["dense"].items():
        rows.append([f"{text}, {dense['tokens']} tokens", "dense", f"{dense['mean']:.4f}", "", "", ""])
        for name, found in nll.items():
            if name == "dense":
                continue
            r = found[text]
            over = [f"{r['over_dense'][k]:+.4f}" for k in ("mean", "low", "high")]
            better = compare(r["nll"], nll[against][text]["nll"], block)
            rows.append(["", name, f"{r['mean']:.4f}", f"{over[0]} ({over[1]}..{over[2]})",
                         f"{better['mean']:+.4f} ({better['low']:+.4f}..{better['high']:+.4f})",
                         "-" if r["rows"] is None else f"{r['rows']:.0f}"])  # fmt: skip
    return common.table(["text", "setting", "NLL", "over dense", f"over {against}", "rows"], rows)


# ---- plot ------------------------------------------------------------------------------------------------------------


def draw(speed: dict[str, Any], path: Path) -> None:
    """Two panels by step: bytes that the cache holds, and tokens/s (the median of 32 steps)."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    held, pace = figure.subplots(1, 2)
    for name, r in speed.items():
        at = [i for i, b in enumerate(r["step_bytes"]) if i == 0 or b != r["step_bytes"][i - 1]]  # where it changes
        at.append(len(r["step_bytes"]) - 1)
        held.step(at, [r["step_bytes"][i] / common.MIB for i in at], label=name, where="post")
        seconds = np.array(r["step_seconds"])
        seconds = seconds[: len(seconds) // 32 * 32].reshape(-1, 32)
        batch = r["tokens_per_second"] * r["seconds"] / len(r["step_seconds"])
        pace.plot(np.arange(len(seconds)) * 32, batch / np.median(seconds, axis=1), label=name)
    held.set(xlabel="step", ylabel="cache, MiB", ylim=(0, None))
    pace.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    for axes in (held, pace):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
    common.progress(f"wrote {path}")


if __name__ == "__main__":
    main()
