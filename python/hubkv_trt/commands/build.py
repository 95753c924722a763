# SPDX-License-Identifier: Apache-2.0
"""``hubkv build``: from a checkpoint to an engine directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..config import DEFAULT_PRESET, PRESETS, Evicted, HubKVConfig, Scope, Scorer, TensorRTConfig, WeightsPlace
from ..engine.build import DEFAULT_BATCH_SIZE, DEFAULT_OUTPUT, DEMO, build_engine, dry_run
from ..engine.plan_options import PlanOptions
from ..engine.summary import DEFAULT_CACHE_BUDGET, summarize
from .common import UsageError, byte_count, hard_kv, ratio

HELP = "build an engine directory from a checkpoint"
DESCRIPTION = """\
Builds an engine directory: weights, tokenizer, gate and settings of a Llama, Qwen2
or Qwen3 model, ready for `hubkv generate` and hubkv_trt.LLM.

With --hubkv the engine compresses the KV cache of every prompt at prefill. A small
gate scores each KV pair (one layer, KV head and token). HubKV refines the scores: it
finds local hubs, discounts their neighbours and balances the heads, and does so the
more, the more has to go. The best pairs are copied together, the others are dropped,
and everything after the prompt attends over what is left.

The compression ratio r is the fraction of KV pairs removed: r = 0.75 keeps a quarter
of them, so that about four times as many prompts fit in the same memory. A request
may choose another r; r = 0 is the dense model. The first tokens (--sink-tokens) and
the last ones (--window-ratio, --window-tokens) of a prompt are always kept."""
EPILOG = """\
examples:
  hubkv build --hubkv
      the demo: SmolLM2-135M-Instruct, into demo/engine
  hubkv build --model ~/Qwen3-8B --output engines/qwen3 --hubkv --gate gate.pt --ratio 0.75
      a model of yours with its gate
  hubkv build --model model.gguf --output engines/dense
      a dense engine, to compare with
  hubkv build --hubkv --backend tensorrt --dry-run
      what the TensorRT plans of the demo take and give, without building them
  hubkv build --hubkv --scorer snapkv --force
      scores from the attention of the last tokens: needs no gate
  hubkv build --hubkv --decode-compression layer_budget=512 --force
      the cache keeps its size however long the answer gets
  hubkv build --hubkv --preset fastkvzip_nms --force
      one of the simpler methods of the paper, in place of the engine that is there"""

# field of TensorRTConfig, argparse's keywords
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "weights",
        {
            "choices": [place.value for place in WeightsPlace],
            "help": "shared: one copy on the device, an input of both plans; embedded: constants in each",
        },
    ),
    ("max_extend_len", {"type": int, "metavar": "Tq", "help": "new tokens of one sequence in one step at most"}),
    (
        "min_ratio",
        {
            "type": ratio,
            "metavar": "r",
            "help": "the least compression ratio of a prompt of full length; a tensor of TensorRT has fewer than 2^31 "
            "elements, and this bounds the kept rows",
        },
    ),
)

# option, field of HubKVConfig, type, help
PARAMETERS: tuple[tuple[str, str, type, str], ...] = (
    ("--nms-kernel", "nms_kernel", int, "k, odd: a hub is a score that is the largest among k neighbours; 1: off"),
    (
        "--penalty-factor",
        "penalty_factor",
        float,
        "gamma in [0, 1]: scores that are no hub are multiplied by it; 1: off",
    ),
    (
        "--head-weight-temperature",
        "head_weight_temperature",
        float,
        "tau: how strongly heads with uneven scores are favoured; 0: off",
    ),
    ("--min-head-weight", "min_head_weight", float, "the least weight of a head"),
    ("--max-head-weight", "max_head_weight", float, "the largest weight of a head"),
    ("--gate-power", "gate_power", float, "p: the refinement has strength r^p; 0: full strength at every ratio"),
    (
        "--prominence",
        "prominence",
        float,
        "scores are multiplied by their share of the largest of k, to this power; 0: off, all that TensorRT has",
    ),
    ("--sink-tokens", "sink_tokens", int, "first tokens of a prompt that are always kept"),
    (
        "--window-ratio",
        "window_ratio",
        float,
        "share of a prompt, at its end, that is always kept (below 32000 tokens)",
    ),
    (
        "--evicted-mass",
        "evicted_mass",
        float,
        "share of their softmax mass that the rows for evicted pairs carry; 1: all",
    ),
    ("--window-tokens", "window_tokens", int, "last tokens that are always kept, for prompts of 32000 tokens and more"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hubkv build`` and ``build_scripts/build_engine.py``."""
    parser.add_argument(
        "--model",
        default=DEMO,
        metavar="DIR|FILE.gguf|demo",
        help="directory of Hugging Face or TensorRT-LLM (1.2), GGUF file, or the demo model",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="where the tokenizer is, for checkpoints that come without one, as TensorRT-LLM's do (default: the model)",
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="engine directory to make")
    parser.add_argument("--force", action="store_true", help="replace the engine that is there")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="of weights, activations and cache; auto: float32 for eager, bfloat16 for tensorrt",
    )
    parser.add_argument(
        "--max-input-len",
        type=int,
        metavar="T",
        help="tokens of one prompt at most (default: as many as the model has positions)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="B",
        help="sequences that decode together at most",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "eager", "tensorrt"),
        help="auto: tensorrt where a GPU and the library are there, else eager (PyTorch and C++ on the CPU)",
    )
    parser.add_argument(
        "--cache-budget",
        type=byte_count,
        default=DEFAULT_CACHE_BUDGET,
        metavar="BYTES",
        help="memory for the KV cache that the summary reckons with (default: 16GiB)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no summary")
    parser.add_argument(
        "--decode-compression",
        type=hard_kv,
        metavar="PRESET,NAME=VALUE,...",
        help="compress the KV cache while decoding too (HARD-KV; docs/hard-kv.md lists the names): default, held_out, "
        "or such as held_out,layer_budget=512 (with --backend eager)",
    )
    group = parser.add_argument_group("TensorRT", "refused with --backend eager; docs/tensorrt.md explains the plans")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print inputs, outputs, layers and memory of the plans; build nothing (with --backend tensorrt; no GPU)",
    )
    for name, options in PLANS:
        default = getattr(TensorRTConfig, name)
        options = {**options, "help": f"{options['help']} (default: {getattr(default, 'value', default)})"}
        group.add_argument("--" + name.replace("_", "-"), **options)
    group.add_argument(
        "--workspace-bytes", type=byte_count, metavar="BYTES", help="what a layer may use while it runs, at most"
    )
    group.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="timings of earlier builds, read and written: saves time",
    )
    group = parser.add_argument_group("HubKV", "without --hubkv the engine is dense, and the options below are refused")
    group.add_argument("--hubkv", action="store_true", help="compress the KV cache of every prompt at prefill")
    group.add_argument(
        "--ratio",
        type=ratio,
        metavar="r",
        help=f"fraction of KV pairs removed where a request names none (default: {HubKVConfig.ratio})",
    )
    group.add_argument(
        "--scope",
        choices=[scope.value for scope in Scope],
        help="which KV pairs compete: of the whole model, of a layer, or of a head (default: model)",
    )
    group.add_argument(
        "--scorer",
        choices=[scorer.value for scorer in Scorer],
        metavar="NAME",
        help=f"what scores KV pairs (default: {Scorer.FASTKVZIP.value}, the gate, all that --backend tensorrt has); "
        f"one of {', '.join(scorer.value for scorer in Scorer)}: docs/scorers.md says what each costs",
    )
    group.add_argument(
        "--evicted",
        choices=[evicted.value for evicted in Evicted],
        help="KV pairs that are not kept: dropped, or merged or summarized into --centroids rows of each head, which "
        f"the kept ones make room for (default: {HubKVConfig.evicted.value}, all that --backend tensorrt has; "
        "docs/src.md)",
    )
    group.add_argument(
        "--centroids", type=int, metavar="m", help=f"rows of a head, 1 to 8 (default: {HubKVConfig.centroids})"
    )
    group.add_argument(
        "--gate",
        type=Path,
        metavar="FILE",
        help="FastKVzip gate of the model, .pt or .safetensors (default: the one that comes with the package)",
    )
    group.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"a method of the paper (default: {DEFAULT_PRESET}); one of {', '.join(PRESETS)}",
    )
    fine = parser.add_argument_group("parameters", "each one overrides the preset's value")
    for option, name, kind, text in PARAMETERS:
        fine.add_argument(
            option, dest=name, type=kind, metavar="X", help=f"{text} (default: {getattr(HubKVConfig, name):g})"
        )


def hubkv_config(arguments: argparse.Namespace) -> HubKVConfig | None:
    """The HubKV settings that the options name; None without ``--hubkv``.

    Raises:
        ValueError: an option of HubKV without ``--hubkv``, or a value out of range.
    """
    changes: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("ratio", "scope", "scorer", "evicted", "centroids", *(parameter[1] for parameter in PARAMETERS))
        if getattr(arguments, name) is not None
    }
    if not arguments.hubkv:
        for name in ("preset", "gate", *changes):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')}: of use only together with --hubkv")
        return None
    if "scope" in changes:
        changes["scope"] = Scope(changes["scope"])
    if "scorer" in changes:
        changes["scorer"] = Scorer(changes["scorer"])
    if "evicted" in changes:
        changes["evicted"] = Evicted(changes["evicted"])
    return HubKVConfig.from_preset(arguments.preset or DEFAULT_PRESET, **changes)


def tensorrt_options(arguments: argparse.Namespace) -> tuple[TensorRTConfig, PlanOptions]:
    """Limits of the plans, and how they are built.

    Raises:
        ValueError: an option of TensorRT with ``--backend eager``, or a value out of range.
    """
    changes = {name: value for name, _ in PLANS if (value := getattr(arguments, name)) is not None}
    building = {name: value for name in ("workspace_bytes", "timing_cache") if (value := getattr(arguments, name))}
    if arguments.backend == "eager" and (changes or building):
        name = next(iter({**changes, **building}))
        raise UsageError(f"--{name.replace('_', '-')}: of use only with --backend tensorrt")
    if arguments.dry_run and arguments.backend != "tensorrt":
        raise UsageError("--dry-run: of use only together with --backend tensorrt")
    if "weights" in changes:
        changes["weights"] = WeightsPlace(changes["weights"])
    return TensorRTConfig(**changes), PlanOptions(**building)


def command(arguments: argparse.Namespace) -> int:
    """Builds, and prints the summary; with ``--dry-run`` only prints."""
    show = not arguments.quiet
    tensorrt, plans = tensorrt_options(arguments)
    common: dict[str, Any] = {
        "hubkv": hubkv_config(arguments),
        "gate": arguments.gate,
        "tokenizer": arguments.tokenizer,
        "dtype": arguments.dtype,
        "max_input_len": arguments.max_input_len,
        "max_batch_size": arguments.max_batch_size,
        "tensorrt": tensorrt,
    }
    if arguments.dry_run:
        print(dry_run(arguments.model, **common, cache_bytes=arguments.cache_budget))
        return 0
    report = build_engine(
        arguments.model,
        arguments.output,
        **common,
        backend=arguments.backend,
        decode_compression=arguments.decode_compression,
        plans=plans,
        force=arguments.force,
        progress=show and sys.stderr.isatty(),
    )
    if show:
        print(
            summarize(
                report.path,
                report.config,
                cache_bytes=arguments.cache_budget,
                backend_reason=report.backend_reason,
                gate=report.gate,
            )
        )
        print(f"built in {report.seconds:.1f} s; next: hubkv generate --engine {report.path} --prompt '...'")
    return 0
