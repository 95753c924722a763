# SPDX-License-Identifier: Apache-2.0
"""``hubkv generate``: text from an engine, and answers about a document from its compressed KV cache."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Evicted
from ..engine.build import DEFAULT_OUTPUT
from .common import UsageError, byte_count, hard_kv, ratio, read_text
from .sampling import add_sampling, sampling

if TYPE_CHECKING:
    from ..runtime.llm import LLM, RequestOutput

HELP = "generate text; ask questions about a document"
DESCRIPTION = """\
Generates text with an engine that `hubkv build` made.

With --document the document is prefilled and compressed once; every --question is
then answered from what was kept of it. With --prompt or --prompt-file each prompt
is compressed by itself. Several prompts or questions run as one batch."""
EPILOG = """\
examples:
  hubkv generate --prompt "Why is the sky blue?" --stream
  hubkv generate --document report.txt --question "Who wrote it?" --question "When?" --ratio 0.75 --stats
  cat prompt.txt | hubkv generate --engine engines/qwen3 --prompt-file - --temperature 0.7 --top-p 0.9 --seed 1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv generate``."""
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    what = parser.add_argument_group("prompts")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    what.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one prompt, - for standard input; may be repeated",
    )
    what.add_argument("--document", metavar="FILE", help="a text that questions are about, - for standard input")
    what.add_argument(
        "--question", action="append", default=[], metavar="TEXT", help="a question about the document; may be repeated"
    )
    what.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put prompts into the model's chat format (default: if the model has one)",
    )
    how = parser.add_argument_group("generation")
    how.add_argument(
        "--ratio",
        type=ratio,
        metavar="r",
        help="fraction of KV pairs of the prompt removed, 0 for none (default: the engine's)",
    )
    how.add_argument(
        "--evicted",
        choices=[evicted.value for evicted in Evicted],
        help="KV pairs that are not kept: dropped, merged or summarized (default: the engine's)",
    )
    how.add_argument(
        "--centroids", type=int, metavar="m", help="rows of each head for what is not kept (default: the engine's)"
    )
    add_sampling(how)
    how.add_argument(
        "--decode-compression",
        type=hard_kv,
        metavar="PRESET,NAME=VALUE,...",
        help="compress the cache while decoding (HARD-KV; docs/hard-kv.md): default, held_out, or such as "
        "held_out,layer_budget=512 (default: as the engine was built)",
    )
    how.add_argument(
        "--cache-bytes",
        type=byte_count,
        metavar="BYTES",
        help="memory for the KV cache, such as 2GiB (default: for as many prompts as the engine's limits name)",
    )
    show = parser.add_argument_group("output")
    show.add_argument("--stream", action="store_true", help="print text as it appears (one prompt or question)")
    show.add_argument("--stats", action="store_true", help="report rows kept, bytes and seconds on stderr")
    show.add_argument("--json", action="store_true", help="print one JSON object per result")
    show.add_argument("--log-probs", action="store_true", help="with --json: the log probability of every token")


def command(arguments: argparse.Namespace) -> int:
    """Generates, and prints what came out."""
    prompts = _prompts(arguments)
    from ..runtime.llm import LLM, SamplingParams

    params = SamplingParams(**sampling(arguments, arguments.log_probs))
    document = None if arguments.document is None else read_text(arguments.document, "document")
    llm = LLM(
        arguments.engine,
        cache_bytes=arguments.cache_bytes,
        evicted=None if arguments.evicted is None else Evicted(arguments.evicted),
        centroids=arguments.centroids,
        decode_compression=arguments.decode_compression,
    )
    chat = bool(llm.tokenizer.chat_template) if arguments.chat is None else arguments.chat
    context, how = None, {"ratio": arguments.ratio, "chat": chat}
    if document is not None:
        # The line breaks keep the document's last token apart from the question's first.
        context = llm.compress(document.rstrip() + "\n\n", ratio=arguments.ratio, chat=chat)
        how = {"context": context}
        if arguments.stats:
            print(describe("document", context.stats), file=sys.stderr)
    if arguments.stream:
        outputs = _stream(llm, prompts[0], params, how)
    else:
        outputs = llm.generate(prompts, params, **how)
    _print(arguments, prompts, outputs)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """What the options ask for, checked before anything slow starts."""
    if arguments.document is not None:
        if arguments.prompt or arguments.prompt_file:
            raise UsageError("--document: goes with --question, not with --prompt or --prompt-file")
        if not arguments.question:
            raise UsageError("--document: needs at least one --question")
        prompts = list(arguments.question)
    else:
        if arguments.question:
            raise UsageError("--question: needs a --document")
        prompts = [*arguments.prompt, *(read_text(file, "prompt-file") for file in arguments.prompt_file)]
        if not prompts:
            raise UsageError("give a --prompt, a --prompt-file, or a --document with a --question")
    if arguments.stream and (len(prompts) > 1 or arguments.json):
        raise UsageError("--stream: is for one prompt or question, and without --json")
    if arguments.log_probs and not arguments.json:
        raise UsageError("--log-probs: goes with --json")
    return prompts


def _stream(llm: LLM, prompt: str, params: Any, how: dict[str, Any]) -> list[RequestOutput]:
    outputs = []
    for piece in llm.stream(prompt, params, **how):
        print(piece.text, end="", flush=True)
        if piece.output is not None:
            outputs.append(piece.output)
    print()
    if outputs and outputs[0].error is not None:
        raise outputs[0].error
    return outputs


def _print(arguments: argparse.Namespace, prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        if arguments.json:
            names = ["text", "token_ids", "finish_reason"]
            names += ["output_log_probs", "cum_log_probs"] if arguments.log_probs else []
            print(json.dumps({name: getattr(output, name) for name in names} | {"stats": output.stats.to_dict()}))
        elif not arguments.stream:
            if len(prompts) > 1:
                print(f"== {_first_line(prompt)}")
            print(output.text)
        if arguments.stats:
            print(describe("question" if arguments.question else "prompt", output.stats), file=sys.stderr)


def _first_line(text: str, width: int = 72) -> str:
    line = text.strip().splitlines()[0] if text.strip() else repr(text)
    return line if len(line) <= width else line[: width - 3] + "..."


def describe(name: str, stats: Any) -> str:
    """A line or two on what a request kept and cost."""
    mib, seconds = 1 << 20, stats.seconds
    lines = []
    if stats.rows is not None and not stats.context_tokens:
        stages = ", ".join(
            f"{part} {1e3 * seconds[part]:.1f}" for part in ("scorer", "refine", "select", "compact") if part in seconds
        )
        prefill = f"prefill {seconds.get('prefill', 0.0):.2f} s" + (f" ({stages} ms)" if stages else "")
        lines.append(
            f"[{name}] {stats.prompt_tokens} tokens, r = {stats.ratio:g} (effective {stats.effective_ratio:.3f}): kept "
            f"{int(stats.rows.sum()):,} rows, {stats.rows.min()}..{stats.rows.max()} per head, "
            f"{stats.bytes_dense / mib:.1f} -> {stats.bytes_kept / mib:.1f} MiB; {prefill}"
        )
    if stats.output_tokens:
        lines.append(
            f"[{name}] {stats.output_tokens} tokens out, the first after {stats.first_token_seconds:.2f} s, then "
            f"{1e3 * stats.seconds_per_token:.1f} ms each; tail {stats.bytes_tail / mib:.2f} MiB, process peak "
            f"{stats.peak_bytes / mib:.0f} MiB"
        )
    if stats.condensed_rows is not None:
        rows = stats.condensed_rows
        lines.append(
            f"[{name}] compressed {stats.condensations} times while decoding, to {int(rows.sum()):,} rows "
            f"({rows.min()}..{rows.max()} per head); {seconds['condense']:.2f} s"
        )
    return "\n".join(lines)
