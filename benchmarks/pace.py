# SPDX-License-Identifier: Apache-2.0
"""What a running stream feels of a long prompt that arrives beside it, in one process.

python benchmarks/pace.py --engine demo/engine --prefill-tokens-per-step 512 128
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import machine
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.service import Service
from hubkv_trt.runtime.ticket import ServiceRequest

QUIET_TOKENS = 40  # of the stream, before the prompt comes


def percentile(values: list[float], p: float) -> float:
    """The smallest value that p percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)]


def measure(llm: LLM, prompt: list[int], tokens_per_step: int, seed: int) -> dict[str, Any]:
    """Gaps between the tokens of a stream before a prompt arrives and until it has its first token; seconds."""
    generator = random.Random(seed)
    short = [generator.randrange(100, 40000) for _ in range(64)]
    arrived: list[float] = []
    first: list[float] = []
    with Service(llm, prefill_tokens_per_step=tokens_per_step) as service:
        stream = service.submit(
            ServiceRequest(prompt=short, params=SamplingParams(max_tokens=4000, ignore_eos=True)),
            lambda increment: arrived.extend([time.perf_counter()] * len(increment.token_ids)),
        )
        while len(arrived) < QUIET_TOKENS:
            time.sleep(0.001)
        submitted = time.perf_counter()
        long = service.submit(
            ServiceRequest(prompt=prompt, params=SamplingParams(max_tokens=1, ignore_eos=True), ratio=0.5),
            lambda increment: first.append(time.perf_counter()),
        )
        long.result(600)
        seen = len(arrived)
        while len(arrived) < seen + 2:
            time.sleep(0.001)
        stream.cancel()
        stream.result(60)
    pairs = [(later, later - earlier) for earlier, later in itertools.pairwise(arrived) if later > earlier]
    before = [gap for at, gap in pairs if at <= submitted]
    beside = [gap for at, gap in pairs if submitted < at <= first[0] or at - gap < first[0] < at]
    return {
        "prefill_tokens_per_step": tokens_per_step,
        "first_token_of_the_prompt": first[0] - submitted,
        "tokens_beside": len(beside),
        "gap_before_p50": statistics.median(before),
        "gap_p50": statistics.median(beside),
        "gap_p99": percentile(beside, 99),
        "gap_max": max(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser("pace.py", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("demo/engine"), metavar="DIR")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--prefill-tokens-per-step", type=int, nargs="+", default=[512, 128], metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results as JSON")
    arguments = parser.parse_args()
    llm = LLM(arguments.engine, cache_bytes=1 << 30)
    generator = random.Random(0)
    prompt = [generator.randrange(100, 40000) for _ in range(arguments.tokens)]
    llm.generate(prompt[:600], SamplingParams(max_tokens=8, ignore_eos=True))  # libraries have loaded what they load
    start = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), ratio=0.5)
    alone = time.perf_counter() - start
    results = [measure(llm, prompt, n, seed) for seed, n in enumerate(arguments.prefill_tokens_per_step)]
    print(f"{arguments.tokens} tokens alone: {alone:.2f} s to the first token. Beside a stream, seconds:")
    print("| tokens per step | first token | gaps before, p50 | gaps beside it: number | p50 | p99 | largest |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['prefill_tokens_per_step']} | {r['first_token_of_the_prompt']:.2f} | {r['gap_before_p50']:.3f} "
            f"| {r['tokens_beside']} | {r['gap_p50']:.3f} | {r['gap_p99']:.3f} | {r['gap_max']:.3f} |",
            flush=True,
        )
    if arguments.output is not None:
        data = {"machine": machine(), "tokens": arguments.tokens, "alone": alone, "results": results}
        arguments.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
