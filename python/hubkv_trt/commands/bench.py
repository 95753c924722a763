# SPDX-License-Identifier: Apache-2.0
"""``hubkv bench``: prefill and decode times of an engine, by prompt length, ratio and batch size."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.build import DEFAULT_OUTPUT
from .common import byte_count, int_list, ratio_list

if TYPE_CHECKING:
    from ..runtime.llm import LLM

HELP = "time prefill and decoding at several compression ratios"
DESCRIPTION = """\
Times an engine on prompts of random tokens: prefill, the share of the scorer and of
the compression stages in it, decoding, and the KV cache that was held. Every figure
is the best of --repeat runs. The last column is the decode speed relative to the
first ratio, so let that one be 0."""
EPILOG = """\
examples:
  hubkv bench --lengths 1024,4096 --ratios 0,0.5,0.75,0.9
  hubkv bench --engine engines/qwen3 --batch-sizes 1,16 --tokens 128 --json"""

COLUMNS = ("tokens", "r", "batch", "prefill s", "scorer %", "stages %", "decode tok/s", "cache MiB", "speed-up")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv bench``."""
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument(
        "--lengths",
        type=int_list,
        default=[1024, 4096],
        metavar="T,...",
        help="prompt lengths in tokens (default: 1024,4096)",
    )
    parser.add_argument(
        "--ratios",
        type=ratio_list,
        default=[0.0, 0.5, 0.75, 0.9],
        metavar="r,...",
        help="compression ratios (default: 0,0.5,0.75,0.9)",
    )
    parser.add_argument(
        "--batch-sizes", type=int_list, default=[1], metavar="B,...", help="sequences that decode together (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to generate per prompt, >= 2")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="runs of each figure")
    parser.add_argument(
        "--cache-bytes", type=byte_count, metavar="BYTES", help="memory for the KV cache (default: enough)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")


def command(arguments: argparse.Namespace) -> int:
    """Runs and prints."""
    from ..config import require
    from ..runtime.llm import LLM

    require(arguments.tokens >= 2, "--tokens", arguments.tokens, "an integer >= 2")
    require(arguments.repeat >= 1, "--repeat", arguments.repeat, "an integer >= 1")
    llm = LLM(arguments.engine, cache_bytes=arguments.cache_bytes)
    limits = llm.config
    longest = min(limits.max_input_len, limits.model.max_position_embeddings - arguments.tokens)
    require(
        max(arguments.lengths) <= longest,
        "--lengths",
        max(arguments.lengths),
        f"at most {longest}, what the engine's limits leave beside {arguments.tokens} new tokens",
    )
    require(
        max(arguments.batch_sizes) <= limits.max_batch_size,
        "--batch-sizes",
        max(arguments.batch_sizes),
        f"within the engine's max_batch_size, {limits.max_batch_size}",
    )
    if not arguments.json:
        print(f"{limits.model_name}, {limits.dtype.value}, backend {limits.backend.value}, {os.cpu_count()} CPUs")
        print("  ".join(f"{name:>12}" for name in COLUMNS))
    for length in arguments.lengths:
        for batch_size in arguments.batch_sizes:
            dense = 0.0
            for ratio in arguments.ratios if limits.hubkv else [0.0]:
                row = measure(llm, length, ratio, batch_size, arguments.tokens, arguments.repeat)
                dense = dense or row["decode tok/s"]
                row["speed-up"] = row["decode tok/s"] / dense if dense else 0.0
                print(
                    json.dumps(row) if arguments.json else "  ".join(_cell(row[name]) for name in COLUMNS), flush=True
                )
    return 0


def measure(llm: LLM, length: int, ratio: float, batch_size: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Best of ``repeat`` runs.

    Returns:
        ``prefill s`` per prompt, ``scorer %`` and ``stages %`` (refine, select, compact) of it, ``decode tok/s`` of the
        batch, ``cache MiB`` held by its compact segments and tails.
    """
    from ..runtime.sampler import SamplingParams

    rng = random.Random(0)
    vocab = llm.config.model.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch_size)]
    best: dict[str, Any] = {}
    for _ in range(repeat):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), ratio=ratio)
        stats = [output.stats for output in outputs]
        cheapest = min(stats, key=lambda s: s.seconds["prefill"])
        prefill, parts = cheapest.seconds["prefill"], cheapest.seconds
        # Sequences that were prefilled first wait for the others: the last one decodes with the batch from its start.
        step = min(s.seconds_per_token for s in stats)
        row = {
            "tokens": length,
            "r": ratio,
            "batch": batch_size,
            "prefill s": prefill,
            "scorer %": 100 * parts.get("scorer", 0.0) / prefill,
            "stages %": 100 * sum(parts.get(name, 0.0) for name in ("refine", "select", "compact")) / prefill,
            "decode tok/s": batch_size / step if step else 0.0,
            "cache MiB": sum(s.bytes_kept + s.bytes_tail for s in stats) / (1 << 20),
        }
        if not best or row["prefill s"] < best["prefill s"]:
            best.update({name: row[name] for name in row if name != "decode tok/s"})
        best["decode tok/s"] = max(best.get("decode tok/s", 0.0), row["decode tok/s"])
    return best


def _cell(value: float) -> str:
    return f"{value:>12}" if isinstance(value, int) else f"{value:>12.3f}"
