# SPDX-License-Identifier: Apache-2.0
"""``hubkv eval``: what answers are worth after a compression, method against method on the same contexts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Scope
from ..engine.build import DEFAULT_OUTPUT
from .common import UsageError, ratio_list

if TYPE_CHECKING:
    from ..engine.directory import Engine
    from ..evaluation.sample import Sample

HELP = "measure what answers are worth after a compression"
DESCRIPTION = """\
Generates contexts and questions offline, reads each context once, compresses it by
every method at every ratio, and then asks: right answers, nats that the right
answer needs, distance of the next-token distribution to the full cache's, and
agreement with the full cache's answers. Every measurement is a line of
OUTPUT/results.jsonl; the same command goes on where it was stopped."""
EPILOG = """\
methods: SCORER[+REFINEMENT[:PARAMETER=VALUE]...][+ALLOCATOR][+EVICTED[:PARAMETER=VALUE]...]
  scorers      gate (fastkvzip), kvzip, snapkv, expected_attention, knorm, tova, random, streaming_llm
  refinements  base (none), hubkv, nms, placebo, any preset (fastkvzip_head_nms_...), any early attempt
               (cma, community_smoothing, residual_svd, ...) or idea (prominence, diminishing_returns,
               head_agreement); parameters are those of HubKVConfig, or of the attempt
  allocators   waterfill, selectivity, entropy, hybrid
  evicted      drop (what the others do), merge, summarize; parameters centroids and evicted_mass. Rows that evicted
               pairs leave behind, and the bias of every row, are paid for with kept pairs: no byte more than drop

examples:
  hubkv eval --output results/main --samples 50
  hubkv eval --output results/main --report
  hubkv eval --output results/search --half first --no-generate --ratios 0.9 \\
      --methods gate,gate+hubkv,gate+hubkv:penalty_factor=0.3:nms_kernel=7
  hubkv eval --output results/evicted --methods gate+hubkv,gate+hubkv+merge,gate+hubkv+summarize"""

TASKS = "passkey,key_value,continuation,reconstruction"
METHODS = "gate,gate+hubkv,gate+nms,gate+placebo,kvzip,kvzip+hubkv,kvzip+nms,kvzip+placebo,random,streaming_llm"
SCOPES = [scope.value for scope in Scope]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv eval``."""
    parser.add_argument(
        "--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="eager, with HubKV and a gate"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="of the results; they are added to")
    parser.add_argument("--tasks", type=_names, default=_names(TASKS), metavar="NAME,...", help=f"(default: {TASKS})")
    parser.add_argument(
        "--dataset", type=Path, action="append", default=[], metavar="FILE", help="also samples of a .jsonl file as "
        "LongBench and RULER have them; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--methods", type=_names, default=_names(METHODS), metavar="METHOD,...", help=f"(default: {METHODS})"
    )
    parser.add_argument(
        "--ratios", type=ratio_list, default=[0.75, 0.9, 0.93], metavar="r,...", help="(default: 0.75,0.9,0.93)"
    )
    parser.add_argument(
        "--scopes", type=_names, default=["model"], metavar="NAME,...", help=f"of {', '.join(SCOPES)} (default: model)"
    )
    parser.add_argument("--tokens", type=int, default=1000, metavar="T", help="of a context")
    parser.add_argument("--samples", type=int, default=50, metavar="N", help="contexts of each task")
    parser.add_argument("--seed", type=int, default=1, help="of contexts, random scores and placebos")
    parser.add_argument(
        "--half", choices=["all", "first", "second"], default="all",
        help="every other sample: search parameters on one half, confirm them on the other",
    )  # fmt: skip
    parser.add_argument("--no-generate", action="store_true", help="leave right answers out, which takes less time")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; tables and figures of what OUTPUT has, of --half of it"
    )
    parser.add_argument(
        "--peer",
        type=Path,
        metavar="MODEL",
        help="measure nothing; compare answers with kvpress's own pipeline on the checkpoint (directory or .gguf) that "
        "the engine was built from, at the first of --ratios",
    )


def command(arguments: argparse.Namespace) -> int:
    """Measures what is missing, and says where it is; or reports."""
    if arguments.report:
        return _report(arguments)
    from ..engine.directory import load_engine
    from ..evaluation.methods import Method
    from ..evaluation.run import Evaluation, run
    from ..evaluation.tasks import TASKS as SOURCES

    unknown = [name for name in arguments.tasks if name not in SOURCES]
    if unknown:
        raise UsageError(f"--tasks: {', '.join(unknown)}: not of {', '.join(SOURCES)}")
    unknown = [name for name in arguments.scopes if name not in SCOPES]
    if unknown:
        raise UsageError(f"--scopes: {', '.join(unknown)}: not of {', '.join(SCOPES)}")
    evaluation = Evaluation(
        methods=tuple(Method.parse(name) for name in arguments.methods),
        ratios=tuple(arguments.ratios),
        samples=arguments.samples,
        tokens=arguments.tokens,
        scopes=tuple(Scope(name) for name in arguments.scopes),
        seed=arguments.seed,
        half=arguments.half,
        generate=not arguments.no_generate,
    )
    engine = load_engine(arguments.engine)
    tokenizer = engine.load_tokenizer()

    def source(name: str) -> Callable[[int], Sample]:
        return lambda index: SOURCES[name](tokenizer, arguments.tokens, index, arguments.seed)

    sources = {name: source(name) for name in arguments.tasks}
    published = _published(arguments.dataset, arguments.samples)
    limits = {name: len(samples) for name, samples in published.items()}
    sources |= {name: samples.__getitem__ for name, samples in published.items()}
    if arguments.peer is not None:
        return _compare(arguments, engine, sources)
    results = run(engine, evaluation, sources, arguments.output, True, limits)
    print(f"{len(results.cells)} measurements in {arguments.output}: hubkv eval --output {arguments.output} --report")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    """Prints the tables, and writes them and the figures beside the results."""
    from ..evaluation.plots import plot_report
    from ..evaluation.report import report
    from ..evaluation.results import load_results
    from ..observe.plots import check_plots

    results = load_results(arguments.output).half(arguments.half)
    text = report(results)
    print(text)
    name = "report.md" if arguments.half == "all" else f"report-{arguments.half}.md"
    (arguments.output / name).write_text(text, encoding="utf-8")
    try:
        check_plots()
    except ImportError:
        print("hubkv eval: no figures: pip install 'hubkv-trt[eval]' brings matplotlib", file=sys.stderr)
    else:
        plot_report(results, arguments.output)
    return 0


def _published(files: list[Path], count: int) -> dict[str, list[Sample]]:
    """Samples of dataset files by task, numbered in each from 0 on, at most ``count``."""
    from ..evaluation.datasets import read_samples

    found: dict[str, list[Sample]] = {}
    for file in files:
        for sample in read_samples(file):
            of_task = found.setdefault(sample.task, [])
            if len(of_task) < count:
                of_task.append(dataclasses.replace(sample, index=len(of_task)))
    return found


def _compare(arguments: argparse.Namespace, engine: Engine, sources: dict[str, Callable[[int], Sample]]) -> int:
    """Prints whether kvpress answers the same, and writes it beside the results."""
    from ..evaluation.methods import Method
    from ..evaluation.peer import PEERS, describe, load_reference, peer_answers

    samples = [source(index) for index in range(arguments.samples) for source in sources.values()]
    methods = [Method.parse(name) for name in arguments.methods]
    scorers = [m.scorer for m in methods if m == m.base and m.scorer in PEERS]
    if not scorers:
        raise UsageError(f"--peer: none of the methods is a scorer alone that kvpress has: {', '.join(PEERS)}")
    model = load_reference(arguments.peer)
    answers = list(peer_answers(engine, model, [s for s in samples if s.chat], scorers, arguments.ratios[0]))
    text = describe(answers)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "peer.md").write_text(text + "\n", encoding="utf-8")
    return 0


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]
