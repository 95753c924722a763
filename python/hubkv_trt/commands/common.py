# SPDX-License-Identifier: Apache-2.0
"""What the commands share: number formats of options, and errors that a user can read."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ..config import HARD_KV_PRESETS, HardKVConfig

_Number = TypeVar("_Number", int, float)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class UsageError(ValueError):
    """Options that do not go together."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and names the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", argparse.SUPPRESS) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def byte_count(text: str) -> int:
    """``16GiB``, ``16G``, ``512M`` or ``1000000``: a number of bytes; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 16GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def int_list(text: str) -> list[int]:
    """``1024,4096``: positive integers."""
    return _list(text, int, lambda value: value >= 1, "integers >= 1, such as 1024,4096")


def ratio_list(text: str) -> list[float]:
    """``0,0.5,0.75``: compression ratios in [0, 1)."""
    return [ratio(part) for part in text.split(",")]


def ratio(text: str) -> float:
    """A compression ratio in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compression ratio in [0, 1)")
    return value


def mass_list(text: str) -> list[float]:
    """``0.8,0.9``: shares of the attention mass in (0, 1]."""
    return _list(text, float, lambda value: 0 < value <= 1, "numbers in (0, 1], such as 0.8,0.9")


def _list(text: str, number: Callable[[str], _Number], within: Callable[[_Number], bool], what: str) -> list[_Number]:
    try:
        values = [number(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(within, values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}")
    return values


def hard_kv(text: str) -> HardKVConfig:
    """``p=0.9,layer_budget=512``: parameters of the compression while decoding. A preset's name may come first."""
    first, *others = parts = [part.strip() for part in text.split(",")]
    preset, parts = (first, others) if first in HARD_KV_PRESETS else ("default", parts)
    data: dict[str, Any] = dict(HARD_KV_PRESETS[preset])
    for part in parts:
        name, equals, value = part.partition("=")
        try:
            data[name.strip()] = json.loads(value)
        except ValueError:
            data[name.strip()] = value.strip()
        if not equals:
            names = ", ".join(HARD_KV_PRESETS)
            message = f"{part!r} is not NAME=VALUE, such as layer_budget=512; the first may be one of {names}"
            raise argparse.ArgumentTypeError(message)
    try:
        return HardKVConfig.from_dict(data)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_text(file: str, name: str) -> str:
    """A UTF-8 file, ``-`` for standard input; ``name`` is the option's, for errors."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{name}: {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {file}: not UTF-8 text ({error})") from None


def run(command: Callable[[Any], int], arguments: argparse.Namespace) -> int:
    """Runs a command; what a user can cause becomes one message on stderr and exit status 1, not a traceback."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # a polite kill unwinds as Ctrl-C does, and leaves nothing half-written

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return command(arguments)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if os.environ.get("HUBKV_TRACEBACK"):
            raise
        print(f"hubkv: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("hubkv: interrupted", file=sys.stderr)
        return 130
