# SPDX-License-Identifier: Apache-2.0
"""``hubkv observe``: how an engine's scores lie in a text, and how many rows of it decoding would keep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import PRESETS, Scope
from ..engine.build import DEFAULT_OUTPUT
from .common import UsageError, hard_kv, mass_list, ratio_list, read_text

if TYPE_CHECKING:
    from ..engine.directory import Engine
    from ..observe import Observations
    from ..observe.collapse import Collapse

HELP = "measure how scores lie in a text, or what decoding keeps of it"
DESCRIPTION = """\
Scores a text with an engine's scorer and prints what the HubKV paper observes: how
many segments of the text the kept tokens reach and what each token more adds, how
the scores of near tokens go together, and how much heads differ in singling tokens
out; for the scorer's own scores, for refined ones, for refined ones with hubs at
random places (placebo), and for tokens kept at random.

With --decode-compression instead: how many rows of each head the compression while
decoding would keep at the end of the text, by every measure of importance, where p
cuts the measure as it is (selection collapse) and where it cuts the calibrated one."""
EPILOG = """\
examples:
  hubkv observe --document examples/station_handbook.txt
  hubkv observe --document examples/station_handbook.txt --decode-compression default --p 0.9 --plot rows.svg
  hubkv observe --engine engines/qwen3 --document report.txt --ratios 0.9,0.95 --oracle --plot report.svg --json"""

LAGS = (1, 2, 3, 4, 8, 16, 32)


OF_SCORES = ("ratios", "preset", "scope", "segment_tokens", "max_lag", "oracle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv observe``."""
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument("--document", required=True, metavar="FILE", help="a text, - for standard input")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of the text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    scores = parser.add_argument_group("the scores of a prompt")
    scores.add_argument(
        "--ratios", type=ratio_list, metavar="r,...", help="compression ratios (default: 0.5,0.75,0.9,0.95)"
    )
    scores.add_argument("--preset", choices=list(PRESETS), help="of the refinement (default: the engine's)")
    scores.add_argument(
        "--scope", choices=[s.value for s in Scope], help="which KV pairs compete (default: the engine's)"
    )
    scores.add_argument("--segment-tokens", type=int, metavar="N", help="tokens of a segment (default: 32)")
    scores.add_argument("--max-lag", type=int, metavar="N", help="of the autocorrelation (default: 32)")
    scores.add_argument("--oracle", action="store_true", help="also keep by exact greedy coverage (slow: T^2)")
    decoding = parser.add_argument_group("what decoding keeps")
    decoding.add_argument(
        "--decode-compression",
        type=hard_kv,
        metavar="PRESET,NAME=VALUE,...",
        help="whose window, recent tokens, sinks and measures to take, or: default; budgets are left out",
    )
    decoding.add_argument(
        "--p", dest="masses", type=mass_list, metavar="p,...", help="attention mass (default: 0.8,0.9,0.95,0.99)"
    )


def command(arguments: argparse.Namespace) -> int:
    """Measures, prints, and draws."""
    decoding = arguments.decode_compression is not None
    if arguments.masses is not None and not decoding:
        raise UsageError("--p: goes with --decode-compression")
    given = {name: getattr(arguments, name) for name in OF_SCORES}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if given and decoding:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')}: does not go with --decode-compression")
    if arguments.plot is not None:
        from ..observe.plots import check_plots

        check_plots()
    from ..engine.directory import load_engine

    text = read_text(arguments.document, "document")
    engine = load_engine(arguments.engine)
    token_ids = list(engine.load_tokenizer()(text, verbose=False)["input_ids"])[: arguments.max_tokens]
    if decoding:
        return _observe_decoding(engine, token_ids, arguments)
    return _observe_scores(engine, token_ids, given, arguments)


def _observe_scores(engine: Engine, token_ids: list[int], given: dict[str, Any], arguments: argparse.Namespace) -> int:
    from ..observe import collect_scores, observe_scores

    scores = collect_scores(engine, token_ids)
    hubkv = engine.config.hubkv
    assert hubkv is not None  # collect_scores has refused a dense engine
    preset, scope = given.pop("preset", None), given.pop("scope", None)
    if preset is not None:
        hubkv = hubkv.replace(preset=preset, **PRESETS[preset])
    if scope is not None:
        hubkv = hubkv.replace(scope=Scope(scope))
    found = observe_scores(scores, engine.config.model, hubkv, **given)
    print(json.dumps(found.to_dict()) if arguments.json else describe(found))
    if arguments.plot is not None:
        from ..observe.plots import plot

        plot(found, arguments.plot)
    return 0


def _observe_decoding(engine: Engine, token_ids: list[int], arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..observe.collapse import MASSES, observe_collapse
    from ..observe.decoding import collect_decoding

    layers = engine.config.model.num_layers
    with tqdm(total=layers, desc="hubkv observe", unit="layer", delay=2, leave=False) as bar:
        state = collect_decoding(engine, token_ids, arguments.decode_compression, bar.update)
    found = observe_collapse(state, arguments.masses or MASSES)
    print(json.dumps(found.to_dict()) if arguments.json else describe_collapse(found))
    if arguments.plot is not None:
        from ..observe.plots import plot_collapse

        plot_collapse(found, arguments.plot)
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


def describe_collapse(found: Collapse) -> str:
    """Rows kept by each measure as a table of Markdown."""
    header = ["p", "measure", "p cuts it", "min", "median", "mean", "max", "share", "near n*", "mass", "worst head"]
    rows = [
        [
            f"{s.p:g}", s.importance, "calibrated" if s.calibrated else "as it is", f"{s.minimum:,}",
            f"{s.median:,.1f}", f"{s.mean:,.1f}", f"{s.maximum:,}", f"{s.share:.1%}", f"{s.near:.0%}",
            f"{s.mass:.3f}", f"{s.worst_mass:.3f}",
        ]
        for s in found.selections
    ]  # fmt: skip
    summary = (
        f"{found.tokens:,} tokens; {found.candidates:,} candidates in each of {found.heads} heads, {found.protected} "
        f"of them protected; the last {found.query_window} tokens judge"
    )
    return "\n\n".join([summary, _markdown(header, rows)])


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * (w - 1) + ":" for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
