# SPDX-License-Identifier: Apache-2.0
"""``hubkv info``: what an engine directory holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..engine.directory import load_engine, read_config
from ..engine.summary import DEFAULT_CACHE_BUDGET, summarize
from .common import byte_count

HELP = "describe an engine directory"
DESCRIPTION = "Prints the model, the HubKV settings, what the KV cache costs, and the files of an engine directory."
EPILOG = """\
examples:
  hubkv info demo/engine --verify
  hubkv info demo/engine --cache-budget 80GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv info``."""
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument("--verify", action="store_true", help="compare every file with its checksum")
    parser.add_argument("--json", action="store_true", help="print the settings as JSON")
    parser.add_argument(
        "--cache-budget",
        type=byte_count,
        default=DEFAULT_CACHE_BUDGET,
        metavar="BYTES",
        help="memory for the KV cache to reckon with (default: 16GiB)",
    )


def command(arguments: argparse.Namespace) -> int:
    """Prints the description."""
    config = load_engine(arguments.engine, progress=True).config if arguments.verify else read_config(arguments.engine)
    if arguments.json:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    print(summarize(arguments.engine, config, cache_bytes=arguments.cache_budget))
    print("versions  " + ", ".join(f"{name} {number}" for name, number in sorted(config.versions.items())))
    if arguments.verify:
        print(f"verified  {len(config.files)} files are as they were written")
    return 0
