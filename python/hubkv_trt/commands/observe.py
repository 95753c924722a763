# SPDX-License-Identifier: Apache-2.0
"""``hubkv observe``: how an engine's scores lie in a text, before and after the refinement."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import PRESETS, Scope
from ..engine.build import DEFAULT_OUTPUT
from .common import ratio_list

if TYPE_CHECKING:
    from ..observe import Observations

HELP = "measure how scores lie in a text"
DESCRIPTION = """\
Scores a text with an engine's scorer and prints what the HubKV paper observes: how
many segments of the text the kept tokens reach and what each token more adds, how
the scores of near tokens go together, and how much heads differ in singling tokens
out; for the scorer's own scores, for refined ones, for refined ones with hubs at
random places (placebo), and for tokens kept at random."""
EPILOG = """\
examples:
  hubkv observe --document examples/station_handbook.txt
  hubkv observe --engine engines/qwen3 --document report.txt --ratios 0.9,0.95 --oracle --plot report.svg --json"""

LAGS = (1, 2, 3, 4, 8, 16, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv observe``."""
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument("--document", required=True, metavar="FILE", help="a text, - for standard input")
    parser.add_argument(
        "--ratios",
        type=ratio_list,
        default=[0.5, 0.75, 0.9, 0.95],
        metavar="r,...",
        help="compression ratios (default: 0.5,0.75,0.9,0.95)",
    )
    parser.add_argument("--preset", choices=list(PRESETS), help="of the refinement (default: the engine's)")
    parser.add_argument(
        "--scope", choices=[s.value for s in Scope], help="which KV pairs compete (default: the engine's)"
    )
    parser.add_argument("--segment-tokens", type=int, default=32, metavar="N", help="tokens of a segment")
    parser.add_argument("--max-lag", type=int, default=32, metavar="N", help="of the autocorrelation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of the text")
    parser.add_argument("--oracle", action="store_true", help="also keep by exact greedy coverage (slow: T^2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def command(arguments: argparse.Namespace) -> int:
    """Measures, prints, and draws."""
    if arguments.plot is not None:
        from ..observe.plots import check_plots

        check_plots()
    from ..engine.directory import load_engine
    from ..observe import collect_scores, observe_scores

    text = sys.stdin.read() if arguments.document == "-" else Path(arguments.document).read_text(encoding="utf-8")
    engine = load_engine(arguments.engine)
    token_ids = list(engine.load_tokenizer()(text, verbose=False)["input_ids"])[: arguments.max_tokens]
    scores = collect_scores(engine, token_ids)
    hubkv = engine.config.hubkv
    assert hubkv is not None  # collect_scores has refused a dense engine
    if arguments.preset is not None:
        hubkv = hubkv.replace(preset=arguments.preset, **PRESETS[arguments.preset])
    if arguments.scope is not None:
        hubkv = hubkv.replace(scope=Scope(arguments.scope))
    found = observe_scores(
        scores,
        engine.config.model,
        hubkv,
        arguments.ratios,
        segment_tokens=arguments.segment_tokens,
        max_lag=arguments.max_lag,
        oracle=arguments.oracle,
    )
    print(json.dumps(found.to_dict()) if arguments.json else describe(found))
    if arguments.plot is not None:
        from ..observe.plots import plot

        plot(found, arguments.plot)
    return 0


def describe(found: Observations) -> str:
    """The observations as tables of Markdown."""
    oracle = any(k.coverage is not None for k in found.kept)
    header = ["r", "kept by", "pairs", "segments", "gain"] + ["F / greedy"] * oracle
    rows = []
    for k in found.kept:
        row = [f"{k.ratio:g}", k.method, f"{k.pairs:,}", f"{k.segments:.3f}", f"{k.gain:.3f}"]
        rows.append(row + ["-" if k.coverage is None else f"{k.coverage:.4f}"] * oracle)
    lags = [lag for lag in LAGS if lag <= len(found.shapes[0].autocorrelation)]
    shapes = [
        [
            f"refined, r = {s.ratio:g}" if s.ratio else "base",
            *(f"{s.autocorrelation[lag - 1]:+.3f}" for lag in lags),
            *(f"{value:.2f}" for value in s.selectivity),
        ]
        for s in found.shapes
    ]
    names = ["scores", *(f"lag {lag}" for lag in lags), "c min", "25%", "50%", "75%", "max"]
    summary = (
        f"{found.tokens:,} tokens, {found.protected} protected, segments of {found.segment_tokens}; "
        f"{100 * found.hub_share:.1f}% of the KV pairs are hubs"
    )
    return "\n\n".join([summary, _markdown(header, rows), _markdown(names, shapes)])


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * (w - 1) + ":" for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
