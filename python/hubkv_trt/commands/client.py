# SPDX-License-Identifier: Apache-2.0
"""``hubkv client``: text from a Triton server that serves an engine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .common import UsageError, ratio, read_text
from .sampling import add_sampling, sampling

HELP = "generate text on a Triton server"
DESCRIPTION = """\
Sends a prompt to a Triton Inference Server that serves an engine (docs/triton.md)
and prints the text as it appears. Needs `pip install 'hubkv-trt[triton]'`.

With --context ID the prompt is a question over the compressed document of that
name; --document sends the document, and does nothing where the server has it."""
EPILOG = """\
examples:
  hubkv client --url localhost:8001 --prompt-file prompt.txt --max-tokens 64 --stats
  hubkv client --chat --context book --document report.txt --prompt "Who wrote it?" --ratio 0.75
  hubkv client --context book --release"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv client``."""
    parser.add_argument("--url", default="localhost:8001", metavar="HOST:PORT", help="the server's gRPC endpoint")
    parser.add_argument("--model", default="hubkv", metavar="NAME", help="the model's name there")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for the whole answer")
    what = parser.add_argument_group("prompt")
    what.add_argument("--prompt", metavar="TEXT", help="the prompt")
    what.add_argument("--prompt-file", metavar="FILE", help="a file that is the prompt, - for standard input")
    what.add_argument("--chat", action="store_true", help="put the prompt into the model's chat format")
    what.add_argument("--context", metavar="ID", help="name of a compressed document on the server")
    what.add_argument("--document", metavar="FILE", help="the document of that name, - for standard input")
    what.add_argument("--release", action="store_true", help="make the server forget the document of that name")
    how = parser.add_argument_group("generation")
    how.add_argument("--ratio", type=ratio, metavar="r", help="fraction of KV pairs removed (default: the engine's)")
    how.add_argument("--decode-p", type=float, metavar="P", help="attention mass kept while decoding (docs/hard-kv.md)")
    how.add_argument("--decode-budget", type=int, metavar="N", help="rows a layer keeps while decoding (the same)")
    add_sampling(how)
    show = parser.add_argument_group("output")
    show.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    show.add_argument("--stats", action="store_true", help="report tokens, rows kept and bytes on stderr, as JSON")
    show.add_argument("--log-probs", action="store_true", help="the same, with the log probability of every token")


def command(arguments: argparse.Namespace) -> int:
    """Asks, and prints the answer."""
    inputs = _inputs(arguments)
    from ..serving.client import HubKVClient

    with HubKVClient(arguments.url, arguments.model, arguments.timeout) as client:
        pieces = (
            iter([client.generate(**inputs)]) if arguments.no_stream or arguments.release else client.stream(**inputs)
        )
        figures: dict[str, Any] = {}
        for piece in pieces:
            print(piece.text, end="", flush=True)
            known = figures.get("output_log_probs", [])
            figures |= piece.figures
            if "output_log_probs" in figures:
                figures["output_log_probs"] = known + piece.figures.get("output_log_probs", [])
    if not arguments.release:
        print()
    if arguments.stats or arguments.log_probs:
        print(json.dumps(figures), file=sys.stderr)
    return 0


def _inputs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The inputs of the request, checked as far as that goes without the server."""
    if arguments.release:
        if arguments.context is None:
            raise UsageError("--release: needs a --context")
        return {"context_id": arguments.context, "release_context": True}
    if arguments.document is not None and arguments.context is None:
        raise UsageError("--document: needs a --context, the name that the server keeps it under")
    if arguments.chat and arguments.context is not None and arguments.document is None:
        raise UsageError("--chat: goes with the --document; a question about it continues its turn of the chat")
    prompts = [text for text in (arguments.prompt, arguments.prompt_file) if text is not None]
    if len(prompts) > 1 or (not prompts and arguments.document is None):
        raise UsageError("give a --prompt, a --prompt-file, or a --context with a --document")
    prompt = arguments.prompt if arguments.prompt_file is None else read_text(arguments.prompt_file, "prompt-file")
    document = None
    if arguments.document is not None:
        # The line breaks keep the document's last token apart from the question's first.
        document = read_text(arguments.document, "document").rstrip() + "\n\n"
    options = sampling(arguments, arguments.log_probs)
    if "stop" in options:
        options["stop_words"] = options.pop("stop")
    return {
        "text_input": prompt,
        "context_id": arguments.context,
        "context_text": document,
        "hubkv_chat": arguments.chat or None,
        "hubkv_ratio": arguments.ratio,
        "hubkv_decode_p": arguments.decode_p,
        "hubkv_decode_budget": arguments.decode_budget,
        **options,
    }
