# SPDX-License-Identifier: Apache-2.0
"""``hubkv client``: text from a Triton server that serves an engine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .common import UsageError, ratio, read_text

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
    how.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens to generate at most")
    how.add_argument("--temperature", type=float, metavar="X", help="0: always the most likely token (default)")
    how.add_argument("--top-k", type=int, metavar="N", help="draw from the N most likely tokens")
    how.add_argument("--top-p", type=float, metavar="X", help="draw from the most likely tokens of that mass")
    how.add_argument("--seed", type=int, metavar="N", help="makes draws repeatable")
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated")
    show = parser.add_argument_group("output")
    show.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    show.add_argument("--stats", action="store_true", help="report tokens, rows kept and bytes on stderr, as JSON")


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
            figures |= piece.figures
    if not arguments.release:
        print()
    if arguments.stats:
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
    return {
        "text_input": prompt,
        "context_id": arguments.context,
        "context_text": document,
        "hubkv_chat": arguments.chat or None,
        "hubkv_ratio": arguments.ratio,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "stop_words": arguments.stop or None,
    }
