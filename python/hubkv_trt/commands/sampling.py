# SPDX-License-Identifier: Apache-2.0
"""The options that say how tokens are chosen, of ``hubkv generate`` and ``hubkv client``."""

from __future__ import annotations

import argparse
from typing import Any

_NUMBERS: tuple[tuple[str, type, str, str], ...] = (
    ("--max-tokens", int, "N", "tokens to generate at most (default: 256)"),
    ("--min-tokens", int, "N", "tokens to generate at least, but for the model's limit (default: 0)"),
    ("--temperature", float, "X", "0: always the most likely token (default: 0)"),
    ("--top-k", int, "N", "draw from the N most likely tokens (default: 0, all)"),
    ("--top-p", float, "X", "draw from the most likely tokens of that mass (default: 1)"),
    ("--min-p", float, "X", "draw from tokens at least X times as likely as the likeliest (default: 0)"),
    ("--seed", int, "N", "makes draws repeatable"),
    ("--repetition-penalty", float, "X", "above 1: makes tokens of prompt and output less likely (default: 1)"),
    ("--presence-penalty", float, "X", "subtracted from logits of tokens in the output (default: 0)"),
    ("--frequency-penalty", float, "X", "the same, times how often they are there (default: 0)"),
)


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """The options; what is not given is left to ``SamplingParams``, here or on the server."""
    for option, kind, metavar, text in _NUMBERS:
        group.add_argument(option, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end there; may be repeated")
    group.add_argument("--bad-word", action="append", metavar="TEXT", help="do not generate it; may be repeated")


def sampling(arguments: argparse.Namespace, log_probs: bool = False) -> dict[str, Any]:
    """What was given, by the names of ``SamplingParams``."""
    names = {option: option[2:].replace("-", "_") for option, *_ in _NUMBERS}
    values = {name: getattr(arguments, name) for name in names.values()}
    values |= {"stop": arguments.stop, "bad_words": arguments.bad_word, "return_log_probs": log_probs or None}
    return {name: value for name, value in values.items() if value is not None}
