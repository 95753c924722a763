# SPDX-License-Identifier: Apache-2.0
"""What makes budgets by held-out queries work: the same rule with one thing changed at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import common
from long_generation import PROMPT, ROOT, TEXTS, open_llm
from long_nll import compare, forced
from long_settings import settings

DESCRIPTION = """\
The NLL of texts at one mean budget, over top-k with equal heads: paired, with 95%
intervals (bootstrap over blocks of tokens).

  mass       budgets by attention mass, each layer by itself (HARD-KV fixed)
  ordering   by loss, of the queries that also order the rows
  held-out   by loss, of the others: the preset held_out
  shuffled   the numbers of rows of held-out, given to other heads at random
  bounded    held-out, and no head has more than twice the mean"""
EPILOG = """\
examples:
  python benchmarks/held_out.py --quick
  python benchmarks/held_out.py --budget 256"""
INTERVAL = 128


def main() -> None:
    from hubkv_trt.engine.build import DEFAULT_OUTPUT

    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="of each text (default: 4000)")
    parser.add_argument("--budget", type=int, default=512, metavar="b", help="mean rows of a head (default: 512)")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FILE", help=f"(default: {', '.join(TEXTS)})")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.budget, args.texts = 400, 64, args.texts or [ROOT / TEXTS[0]]
    args.texts = args.texts or [ROOT / text for text in TEXTS]
    args.batch = 1  # for open_llm
    run(args)


def run(args: argparse.Namespace) -> None:
    from hubkv_trt.engine.directory import load_engine

    common.set_threads(args.threads)
    info, engine = common.machine(), load_engine(args.engine, verify=False)
    print(common.machine_line(info))
    named = settings(args.budget, INTERVAL, 32)
    held_out = named["held-out"]
    assert held_out is not None
    ways: dict[str, tuple[Any, Callable[[], Any]]] = {
        "dense": (None, unchanged),
        "top-k": (named["top-k"], unchanged),
        "mass": (named["HARD-KV fixed"], unchanged),
        "ordering": (held_out, ordering_judges),
        "held-out": (held_out, unchanged),
        "shuffled": (held_out, shuffled),
        "bounded": (held_out.replace(upper_budget=2 * args.budget), unchanged),
    }
    ids: dict[str, list[int]] = {}
    nll: dict[str, dict[str, np.ndarray]] = {}
    for way, (config, change) in ways.items():
        common.progress(way)
        llm = open_llm(engine, config, args)
        if not ids:
            texts = {path.name: llm.tokenizer(path.read_text())["input_ids"] for path in args.texts}
            ids = {name: text[: PROMPT + args.tokens] for name, text in texts.items()}
        with change():
            nll[way] = {name: forced(llm, text[:PROMPT], text[PROMPT:], config, 0.0)[0] for name, text in ids.items()}
        del llm
    rows = []
    for way, found in nll.items():
        cells = [way]
        for name, values in found.items():
            over = compare(values, nll["top-k"][name], INTERVAL)
            cells += [f"{values.mean():.4f}", f"{over['mean']:+.4f} ({over['low']:+.4f}..{over['high']:+.4f})"]
        rows.append(cells)
    print("\n" + common.table(["budgets", *[cell for name in ids for cell in (name, "over top-k")]], rows))
    means = {way: {name: float(values.mean()) for name, values in found.items()} for way, found in nll.items()}
    common.write_json(args.json, machine=info, budget=args.budget, nll=means)


@contextmanager
def unchanged() -> Iterator[None]:
    yield


@contextmanager
def ordering_judges() -> Iterator[None]:
    """All queries of the window order the rows for the judges, which are among them."""
    from hubkv_trt import ops

    whole: list[Any] = []

    def score_window(q: torch.Tensor, *others: Any) -> Any:
        if q.shape[1] > 2:  # the window; the two oldest come next
            whole[:] = [score(q, *others)]
        return whole[0]

    score = ops.score_window
    with mock.patch.object(ops, "score_window", score_window):
        yield


@contextmanager
def shuffled() -> Iterator[None]:
    """Heads get the rows that others would get, as far as they have them; what is left goes to those that have more."""
    from hubkv_trt.runtime.executors import condense

    def shared(loss: np.ndarray, rows: np.ndarray, total: int, least: np.ndarray, most: np.ndarray) -> np.ndarray:
        given = share(loss, rows, total, least, most)
        given = np.clip(given[np.random.default_rng(0).permutation(len(given))], least, most)
        total = min(total, int(most.sum()))
        while (left := total - int(given.sum())) > 0:
            room = most - given
            more = room * left // room.sum()
            more[np.argmax(room)] += more.sum() == 0
            given += more
        while (over := int(given.sum()) - total) > 0:  # least was more than another's
            given[np.argmax(given - least)] -= min(over, int((given - least).max()))
        return given

    share = condense.share_rows
    with mock.patch.object(condense, "share_rows", shared):
        yield


if __name__ == "__main__":
    main()
