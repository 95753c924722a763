# SPDX-License-Identifier: Apache-2.0
"""The console command ``hubkv``. Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .commands.common import Formatter, run

COMMANDS = ("build", "generate", "bench", "eval", "observe", "info", "client")

DESCRIPTION = """\
hubkv: serve long prompts from a KV cache that keeps only the rows that matter.

  hubkv build     make an engine directory from a checkpoint
  hubkv generate  generate text; ask questions about a document
  hubkv bench     time prefill and decoding at several compression ratios
  hubkv eval      measure what answers are worth after a compression
  hubkv observe   measure how scores lie in a text, before and after the refinement
  hubkv info      describe an engine directory
  hubkv client    generate text on a Triton server

`hubkv COMMAND --help` has options and examples."""


def main(argv: Sequence[str] | None = None, program: str = "") -> int:
    """Runs ``hubkv``.

    Args:
        argv: the arguments, the command first; None takes those of the process.
        program: the name to show where a script stands for one command.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        parser = argparse.ArgumentParser(
            "hubkv", usage="hubkv COMMAND [options]", description=DESCRIPTION, formatter_class=Formatter
        )
        parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
        parser.add_argument("--version", action="version", version=f"hubkv-trt {__version__}")
        parser.parse_args(argv[:1])
        raise AssertionError("argparse has refused every other word")
    module = importlib.import_module(f".commands.{argv[0]}", __package__)
    parser = argparse.ArgumentParser(
        program or f"hubkv {argv[0]}", description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=Formatter
    )
    module.add_arguments(parser)
    return run(module.command, parser.parse_args(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
