# SPDX-License-Identifier: Apache-2.0
"""Accuracy on math problems with long answers, dense and with caches that are compressed while they decode."""

from __future__ import annotations

import argparse
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import common

DESCRIPTION = """\
Answers the problems of a JSON file (a list) or JSON-lines file of objects with a problem
and an answer, such as those of AIME (problem, answer) and U-MATH (problem_statement,
golden_answer), and compares the last \\boxed{...} of each text with the answer, as numbers
where both are, else letter by letter without spaces and $. Answers that need a judge count as wrong."""
EPILOG = """\
examples:
  python benchmarks/math_problems.py --data aime.json --engine engines/qwen3 --max-tokens 16000
  python benchmarks/math_problems.py --data aime.json --decode-compression p=0.9,layer_budget=1024 --samples 4"""
ASK = "\n\nReason step by step, and put the final answer within \\boxed{}."
PROBLEM, ANSWER = ("problem", "problem_statement", "question"), ("answer", "golden_answer", "solution")


def load(path: Path) -> list[tuple[str, str]]:
    """(problem, answer) of every object.

    Raises:
        ValueError: the file is not such a list.
    """
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
        return [(_field(d, PROBLEM), _field(d, ANSWER)) for d in data]
    except (ValueError, TypeError, LookupError) as error:
        expected = f"objects with one of {', '.join(PROBLEM)} and one of {', '.join(ANSWER)}"
        raise ValueError(f"data: {path}: not a list or lines of {expected} ({error!r})") from None


def _field(data: dict[str, Any], names: tuple[str, ...]) -> str:
    return str(data[next((name for name in names if name in data), names[0])])


def boxed(text: str) -> str:
    """What the last \\boxed{...} holds; without one, the last number; else nothing."""
    start = text.rfind("\\boxed{")
    if start < 0:
        numbers = re.findall(r"-?\d+(?:[./]\d+)?", text)
        return numbers[-1] if numbers else ""
    depth, start = 1, start + len("\\boxed{")
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text[start:]


def same(given: str, answer: str) -> bool:
    """Whether two answers are alike: equal numbers, or equal letters."""
    left, right = plain(given), plain(answer)
    try:
        return Fraction(left) == Fraction(right)
    except (ValueError, ZeroDivisionError):
        return bool(left) and left == right


def plain(text: str) -> str:
    """Without spaces, $, and what only makes LaTeX look nice; \\frac{a}{b} as a/b."""
    text = re.sub(r"\\d?t?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:left|right|,|;|!| )|\$|\s", "", text)
    return text.rstrip(".").replace("{,}", "").lower()


def main() -> None:
    from hubkv_trt.commands.common import hard_kv
    from hubkv_trt.engine.build import DEFAULT_OUTPUT

    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the problems")
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--decode-compression", type=hard_kv, metavar="PRESET,NAME=VALUE,...", help="as hubkv generate")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="of an answer (default: 4096)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (default)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers to a problem (default: 1)")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    from hubkv_trt.runtime.llm import LLM, SamplingParams

    common.set_threads(args.threads)
    problems = load(args.data)
    if not problems:
        raise SystemExit(f"data: {args.data}: it has no problems")
    llm = LLM(args.engine, decode_compression=args.decode_compression)
    prompts = [problem + ASK for problem, _ in problems for _ in range(args.samples)]
    how = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    params = [SamplingParams(**how, seed=seed) for seed in range(len(prompts))]
    outputs = llm.generate(prompts, params, chat=bool(llm.tokenizer.chat_template), ratio=0.0)
    results: list[dict[str, Any]] = []
    for output, answer in zip(outputs, [a for _, a in problems for _ in range(args.samples)], strict=True):
        given = boxed(output.text)
        results.append({"given": given, "answer": answer, "right": same(given, answer), "text": output.text,
                        "finish_reason": output.finish_reason, "stats": output.stats.to_dict()})  # fmt: skip
    count = len(results)
    print(f"{sum(r['right'] for r in results)} of {count} right; "
          f"{sum(len(o.token_ids) for o in outputs) / count:.0f} tokens an answer, "
          f"{sum(r['finish_reason'] == 'length' for r in results)} cut at --max-tokens, "
          f"{sum(o.stats.condensations for o in outputs) / count:.1f} compressions each")  # fmt: skip
    common.write_json(args.json, data=str(args.data), results=results)


if __name__ == "__main__":
    main()
