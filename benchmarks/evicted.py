# SPDX-License-Identifier: Apache-2.0
"""What becomes of evicted KV pairs: dropped, merged or summarized, at equal bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

# isort: split
import torch

from hubkv_trt import LLM
from hubkv_trt.ablations import refine_stage
from hubkv_trt.config import EngineConfig, Evicted, budget
from hubkv_trt.engine.build import DEFAULT_OUTPUT
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.evaluation.equal_bytes import ratio_at_equal_bytes
from hubkv_trt.evaluation.evaluate import context_text
from hubkv_trt.evaluation.sample import Sample
from hubkv_trt.evaluation.tasks import TASKS
from hubkv_trt.models.rope import rope_frequencies
from hubkv_trt.observe import collect_scores
from hubkv_trt.ops import select
from hubkv_trt.summarize.collect import LayerAttention, collect_attention
from hubkv_trt.summarize.fit import summarize_evicted
from hubkv_trt.summarize.heads import EMPTY, attend
from hubkv_trt.summarize.references import by_kv_head, reference_queries

DESCRIPTION = """\
Compresses contexts of `hubkv eval` at each ratio and compares dropping the evicted KV
pairs with merging and summarizing them. For the errors no setting stores a byte more
than dropping does at the same ratio: the rows for evicted pairs and the bias of every
row are paid for with kept rows.

  attention error   squared error of the attention outputs of the queries that come
                    later (questions and answers) over the context's KV pairs, over
                    the square of what the full cache gives; mean over heads
  seconds           of a compression, and of the summaries among them"""
EPILOG = """\
examples:
  python benchmarks/evicted.py --quick
  python benchmarks/evicted.py --contexts 6 --json evicted.json"""


KINDS = ("passkey", "key_value", "paragraph_qa")


@dataclass(frozen=True)
class Setting:
    ratio: float  # of dropping, whose bytes no setting exceeds
    method: Evicted
    centroids: int
    mass: float = 1.0

    @property
    def name(self) -> str:
        if self.ratio == 0:
            return "full cache"
        return self.method.value + (
            f", m = {self.centroids}, mass {self.mass:g}" if self.method is not Evicted.DROP else ""
        )


def with_method(llm: LLM, setting: Setting) -> None:
    """Switches an LLM over: its parts read the method from the configuration at every prompt."""
    hubkv = llm.config.hubkv
    assert hubkv is not None
    hubkv = hubkv.replace(evicted=setting.method, centroids=setting.centroids, evicted_mass=setting.mass)
    llm.config = llm._requests._config = llm.config.replace(hubkv=hubkv)
    llm._executor._hubkv = hubkv  # type: ignore[attr-defined]


# ---- attention alone -------------------------------------------------------------------------------------------------


def attention_errors(engine: Engine, sample: Sample, settings: Sequence[Setting]) -> dict[Setting, float]:
    """Mean over the KV heads of all layers of the relative squared error by later queries."""
    encoder = LLM(engine, cache_bytes=1 << 28)._requests.encoder
    token_ids, ending = encoder.document(context_text(sample), True)
    asked = [q.text + ending + q.lead + " " + q.answers[0] for q in sample.questions]
    later = [int(token) for text in asked for token in encoder.question(text, "")]
    layers = collect_attention(engine, [*map(int, token_ids), *later])
    scores = collect_scores(engine, list(map(int, token_ids)))
    return {setting: _error(engine.config, layers, scores, setting) for setting in settings}


def _error(config: EngineConfig, layers: Sequence[LayerAttention], scores: torch.Tensor, setting: Setting) -> float:
    model, hubkv, num_tokens = config.model, config.hubkv, scores.shape[-1]
    assert hubkv is not None
    hubkv = hubkv.replace(evicted=setting.method, centroids=setting.centroids, evicted_mass=setting.mass)
    ratio = ratio_at_equal_bytes(config, hubkv, num_tokens, setting.ratio)
    found = budget(model, hubkv, num_tokens, ratio)
    positions, offsets = select(refine_stage(scores, hubkv, ratio), found.num_groups, found.selected_per_group)
    kept = torch.zeros(model.num_rows_per_token, num_tokens, dtype=torch.bool)
    kept[torch.repeat_interleave(torch.arange(len(kept)), offsets.diff()), positions.long()] = True
    inv_freq = torch.from_numpy(rope_frequencies(model.rope, model.head_dim, model.max_position_embeddings)[0])
    errors, scale = [], model.head_dim**-0.5
    for layer, mask in zip(layers, kept.split(model.num_kv_heads), strict=True):
        k, v = (x[:num_tokens].transpose(0, 1) for x in (layer.keys, layer.values))
        later = by_kv_head(layer.queries[num_tokens:], model.num_kv_heads)
        true = attend(later, k, v, scale)[0]
        bias = torch.where(mask, 0.0, EMPTY)
        if setting.method is not Evicted.DROP:
            queries = by_kv_head(reference_queries(layer.queries[:num_tokens], inv_freq), model.num_kv_heads)
            rows = summarize_evicted(queries, k, v, mask, setting.centroids, scale, setting.method, setting.mass)
            k, v = torch.cat((k, rows.keys), 1), torch.cat((v, rows.values), 1)
            bias = torch.cat((bias, rows.bias), 1)
        out = attend(later, k, v, scale, bias)[0]
        errors.append((out - true).square().sum((1, 2)) / true.square().sum((1, 2)))
    return float(torch.cat(errors).mean())


# ---- report ----------------------------------------------------------------------------------------------------------


def error_table(settings: Sequence[Setting], found: Sequence[dict[Setting, float]]) -> str:
    """Attention errors, and how many times that of dropping is larger."""
    rows = []
    for s in settings:
        errors = [each[s] for each in found]
        times = [each[Setting(s.ratio, Evicted.DROP, 4)] / each[s] for each in found]
        rows.append([f"r = {s.ratio:g}", s.name, f"{statistics.mean(errors):.4f}", f"{statistics.mean(times):.2f}"])
    return common.table(["bytes as", "evicted", "attention error", "drop / this"], rows)


def seconds_table(llm: LLM, sample: Sample, settings: Sequence[Setting], runs: int) -> str:
    """Best of some runs of each setting, without replay."""
    rows = []
    for s in settings:
        with_method(llm, s)
        best: dict[str, float] = {}
        for _ in range(runs):
            with llm.compress(sample.context, ratio=s.ratio, chat=True) as context:
                tokens, stats = context.num_tokens, context.stats
                if not best or stats.seconds["prefill"] < best["prefill"]:
                    best = dict(stats.seconds)
        evicted = tokens * stats.effective_ratio
        part = best.get("summarize", 0.0)
        share = 100 * part / (best["prefill"] - part)
        rows.append([f"r = {s.ratio:g}", s.name, tokens, f"{best['prefill']:.3f}", f"{part:.3f}",
                     f"{1000 * part / evicted:.3f}", f"{share:.1f}"])  # fmt: skip
    header = ["ratio", "evicted", "tokens", "prefill s", "summaries s", "s per 1k evicted tokens", "added %"]
    return common.table(header, rows)


def main() -> None:
    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.85, 0.9, 0.93], metavar="r")
    parser.add_argument("--centroids", type=int, nargs="+", default=[1, 2, 4, 8], metavar="m")
    parser.add_argument("--masses", type=float, nargs="+", default=[1.0, 0.5], metavar="x", help="evicted_mass")
    parser.add_argument("--tokens", type=int, default=1000, metavar="T", help="context length (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=3, metavar="N", help="for errors (default: %(default)s)")
    parser.add_argument("--time-runs", type=int, default=3, metavar="N", help="0: no times (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the contexts (default: %(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.ratios, args.centroids, args.tokens, args.contexts = [0.9], [4], 600, 1
    common.set_threads(args.threads)
    engine = load_engine(args.engine)
    if engine.config.hubkv is None:
        raise SystemExit(f"evicted.py: engine {args.engine}: it is dense; name one built with --hubkv")
    llm = LLM(engine, cache_bytes=1 << 29, evicted=Evicted.SUMMARIZE)  # its segments have room for a bias
    samples = [TASKS[KINDS[i % len(KINDS)]](llm.tokenizer, args.tokens, i, args.seed) for i in range(args.contexts)]

    def of_ratio(ratio: float) -> list[Setting]:
        found = [Setting(ratio, Evicted.DROP, 4), *(Setting(ratio, Evicted.MERGE, 4, mass) for mass in args.masses)]
        return found + [Setting(ratio, Evicted.SUMMARIZE, m, mass) for mass in args.masses for m in args.centroids]

    settings = [Setting(0.0, Evicted.DROP, 4)]  # the full cache
    settings += [setting for ratio in args.ratios for setting in of_ratio(ratio)]
    info = common.machine()
    print(common.machine_line(info) + f"; {engine.config.model_name}\n", flush=True)
    results: dict[str, Any] = {}
    if args.time_runs:
        timed = [s for s in settings if s.ratio == args.ratios[-1]]
        print(seconds_table(llm, samples[0], timed, args.time_runs) + "\n", flush=True)
    wanted = [*of_ratio(0.7), *settings[1:]]
    found = []
    for sample in samples:
        common.progress(f"attention errors: context {len(found) + 1}/{len(samples)}")
        found.append(attention_errors(engine, sample, wanted))
    print(error_table(wanted, found) + "\n", flush=True)
    results["errors"] = [[{"setting": s, "error": each[s]} for s in wanted] for each in found]
    common.write_json(args.json, machine=info, seed=args.seed, tokens=args.tokens, **results)


if __name__ == "__main__":
    main()
