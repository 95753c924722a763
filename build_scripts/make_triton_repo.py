# SPDX-License-Identifier: Apache-2.0
"""Writes a model repository for Triton Inference Server from an engine directory.

python build_scripts/make_triton_repo.py --engine demo/engine --output demo/triton
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hubkv_trt.commands.common import Formatter, byte_count, hard_kv, run
from hubkv_trt.engine.build import DEFAULT_OUTPUT
from hubkv_trt.serving.repository import ModelParameters, write_model

TEMPLATE = Path(__file__).resolve().parent.parent / "triton_repo" / "hubkv"


def command(arguments: argparse.Namespace) -> int:
    """Writes the model and says where."""
    parameters = ModelParameters(
        engine=str(arguments.engine),
        cache_bytes=arguments.cache_bytes,
        tail_tokens=arguments.tail_tokens,
        max_waiting=arguments.max_waiting,
        prefill_tokens_per_step=arguments.prefill_tokens_per_step,
        overcommit=arguments.overcommit,
        decode_compression=arguments.decode_compression,
    )
    folder = write_model(
        TEMPLATE,
        arguments.output,
        parameters,
        name=arguments.name,
        decoupled=not arguments.unary,
        copy_engine=arguments.copy,
        force=arguments.force,
    )
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser("make_triton_repo.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the repository; may hold other models"
    )
    parser.add_argument("--name", default="hubkv", help="of the model")
    parser.add_argument("--unary", action="store_true", help="one response to a request: plain infer calls, no streams")
    parser.add_argument("--copy", action="store_true", help="copy the engine into the repository")
    parser.add_argument("--cache-bytes", type=byte_count, metavar="BYTES", help="the KV cache (default: see LLM)")
    parser.add_argument("--tail-tokens", type=int, metavar="N", help="generated tokens of all requests together")
    parser.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait (default: see Service)")
    parser.add_argument("--prefill-tokens-per-step", type=int, metavar="N", help="prompt tokens between decode steps")
    parser.add_argument("--overcommit", type=float, metavar="F", help="fraction of tails that is not reserved")
    parser.add_argument(
        "--decode-compression",
        type=hard_kv,
        metavar="PRESET,NAME=VALUE,...",
        help="compress caches while decoding (default: as the engine was built)",
    )
    parser.add_argument("--force", action="store_true", help="replace the model if it is there")
    sys.exit(run(command, parser.parse_args()))
