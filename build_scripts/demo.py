# SPDX-License-Identifier: Apache-2.0
"""Answers questions about a document of about 3k tokens from a dense and from a compacted KV cache (``make demo``).

Exits with 1 where a compacted answer lacks the fact that was asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hubkv_trt import LLM, SamplingParams
from hubkv_trt.commands.common import Formatter, ratio, run
from hubkv_trt.engine.build import DEFAULT_OUTPUT
from hubkv_trt.engine.summary import table

DOCUMENT = Path(__file__).resolve().parent.parent / "examples" / "station_handbook.txt"
QUESTIONS = {  # and what a right answer names
    "What is the code for the generator room?": "7391",
    "What is the name of the station dog?": "Juniper",
    "Which channel is used to call the mountain rescue?": "27",
    "What is the height of the station above the sea?": "2140",
}
MIB = 1 << 20


def demo(arguments: argparse.Namespace) -> int:
    """Compresses the document twice, asks, and prints what came out."""
    document = DOCUMENT.read_text(encoding="utf-8").rstrip() + "\n\n"
    llm = LLM(arguments.engine)
    llm.generate(document[:2000], SamplingParams(max_tokens=2))  # the first use of an engine reads its weights
    answers, stats = {}, {}
    for name, r in (("dense", 0.0), ("compacted", arguments.ratio)):
        print(
            f"== {name}: prefill of the document at r = {r:g}, then {len(QUESTIONS)} questions in one batch", flush=True
        )
        with llm.compress(document, ratio=r, chat=True) as context:
            start = time.perf_counter()
            outputs = llm.generate(list(QUESTIONS), SamplingParams(max_tokens=32), context=context)
            seconds = time.perf_counter() - start
        answers[name], stats[name] = [output.text.strip() for output in outputs], (context.stats, outputs, seconds)

    right = dict.fromkeys(answers, 0)
    for i, (question, fact) in enumerate(QUESTIONS.items()):
        print(f"\n{question}")
        for name, texts in answers.items():
            ok = fact in texts[i]
            right[name] += ok
            print(f"  {name:<9}  {texts[i]}" + ("" if ok else f"   <- lacks {fact!r}"))

    print("\n" + summary(stats, right))
    return 0 if right["compacted"] == len(QUESTIONS) else 1


def summary(stats: dict, right: dict[str, int]) -> str:
    """What the two caches held and what each phase took, side by side."""
    columns = []
    for name, (context, outputs, seconds) in stats.items():
        milliseconds = {
            part: f"{1e3 * context.seconds[part]:,.1f} ms" if part in context.seconds else "-"
            for part in ("scorer", "refine", "select", "compact")
        }
        tokens = sum(len(output.token_ids) for output in outputs)
        columns.append(
            [
                ("", name),
                ("right answers", f"{right[name]} of {len(QUESTIONS)}"),
                ("document tokens", f"{context.prompt_tokens:,}"),
                ("compression ratio", f"{context.effective_ratio:.3f}"),
                ("KV rows kept", f"{int(context.rows.sum()):,}"),
                ("rows per head", f"{context.rows.min():,} .. {context.rows.max():,}"),
                ("KV cache", f"{context.bytes_kept / MIB:.1f} MiB"),
                ("prefill", f"{context.seconds['prefill']:.2f} s"),
                *((f"  {part}", text) for part, text in milliseconds.items()),
                ("answers", f"{seconds:.2f} s"),
                ("tokens per second", f"{tokens / seconds:.1f}"),
            ]
        )
    return table([(row[0][0], "".join(f"{value:>18}" for _, value in row)) for row in zip(*columns, strict=True)])


def main() -> int:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument("--ratio", type=ratio, default=0.75, metavar="r", help="fraction of KV pairs removed")
    return run(demo, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
