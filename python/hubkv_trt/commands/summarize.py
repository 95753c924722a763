# SPDX-License-Identifier: Apache-2.0
"""``hubkv summarize``: the published summarisation of evicted tokens against deleting them, at many keep ratios."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.build import DEFAULT_OUTPUT
from .common import UsageError, ratio_list, read_text

if TYPE_CHECKING:
    from ..summarize.heads import Heads

HELP = "compare summaries of evicted tokens with deleting them"
DESCRIPTION = """\
Runs selection, reconstruction and compression (SRC, HAE-OLS) beside top-k, sliding
window, OLS without selection and selection without OLS, and prints the error of the
attention outputs and the bytes stored at each keep ratio, under the FAIR and the REAL
protocol. Without --document on a synthetic transformer: one attention layer over
random tokens. With --document on the attention of an engine's model over a text; the
queries of the tokens that follow the first --tokens are the later ones."""
EPILOG = """\
examples:
  hubkv summarize
  hubkv summarize --spread 3 --plot src.svg
  hubkv summarize --document examples/station_handbook.txt --layers 0,14,29 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv summarize``."""
    parser.add_argument("--document", metavar="FILE", help="a text, - for standard input")
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory")
    parser.add_argument("--tokens", type=int, metavar="T", help="that are cached (default: 200; of a document 512)")
    parser.add_argument("--later", type=int, default=128, metavar="E", help="tokens of the document that follow")
    parser.add_argument("--layers", metavar="l,...", help="of the model (default: all)")
    parser.add_argument(
        "--keep",
        type=ratio_list,
        default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        metavar="x,...",
        help="keep ratios (default: 0.1 to 0.9)",
    )
    parser.add_argument("--bin-tokens", type=int, default=32, metavar="N", help="bin_size, of FAIR and the staircase")
    parser.add_argument("--rank", type=int, default=8, metavar="N", help="k_rank: synthetic rows of a bin")
    parser.add_argument("--draws", type=int, default=8, metavar="N", help="of the synthetic transformer")
    parser.add_argument("--spread", type=float, default=512.0, metavar="X", help="of its logits: standard deviation")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of its draws")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every figure, a line for each")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def command(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, writes and draws."""
    if arguments.plot is not None:
        from ..observe.plots import check_plots

        check_plots()
    from ..summarize import describe, run

    name, cases = _cases(arguments)
    report = run(name, cases, arguments.keep, arguments.bin_tokens, arguments.rank)
    print(json.dumps(report.to_dict()) if arguments.json else describe(report))
    if arguments.csv is not None:
        arguments.csv.write_text(report.to_csv(), encoding="utf-8")
    if arguments.plot is not None:
        from ..summarize.plots import plot

        plot(report, arguments.plot)
    return 0


def _cases(arguments: argparse.Namespace) -> tuple[str, list[Heads]]:
    """Name and heads of what the options ask for."""
    from ..summarize import collect_attention, model_heads, synthetic_heads

    if arguments.document is None:
        if arguments.layers is not None:
            raise UsageError("--layers: of use only together with --document")
        heads = synthetic_heads(
            arguments.tokens or 200, draws=arguments.draws, spread=arguments.spread, seed=arguments.seed
        )
        return heads.name, [heads]
    from ..engine.directory import load_engine

    engine = load_engine(arguments.engine)
    text = read_text(arguments.document, "document")
    num_tokens = arguments.tokens or 512
    token_ids = list(engine.load_tokenizer()(text, verbose=False)["input_ids"])[: num_tokens + arguments.later]
    if len(token_ids) <= num_tokens:
        raise ValueError(
            f"tokens: {num_tokens} leaves none of the document's {len(token_ids)} tokens for later queries"
        )
    cases = model_heads(collect_attention(engine, token_ids), num_tokens)
    if arguments.layers is not None:
        cases = [cases[layer] for layer in _layers(arguments.layers, len(cases))]
    return f"{engine.config.model_name}, {len(cases)} layers", cases


def _layers(text: str, count: int) -> list[int]:
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        layers = []
    if not layers or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"layers: {text!r} is not a list of integers in 0..{count - 1}")
    return layers
