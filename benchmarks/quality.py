# SPDX-License-Identifier: Apache-2.0
"""Answers from a compressed context, with HubKV's refinement and without it, at several ratios."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

# isort: split
import torch

import tasks
from hubkv_trt import LLM, HubKVConfig, SamplingParams
from hubkv_trt.config import DEFAULT_PRESET
from hubkv_trt.engine.build import DEFAULT_OUTPUT, build_engine
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.batch import Batch
from hubkv_trt.runtime.context import CompressedContext
from hubkv_trt.runtime.scheduler import Phase

DESCRIPTION = """\
Compresses generated documents and then asks questions about them, so that the
compression cannot know what will be asked. Each document holds passkeys, a list of
numbers and one-line facts at random places in filler; every answer stands in it once.

Two figures for every setting, over the same documents and questions:
  right   the greedy answer contains the right one (exact match as a word)
  NLL     nats that the model needs for the right answer's tokens, given the question and
          the beginning of a sentence that answers it, fed through the compressed cache

Settings: the full cache (r = 0), and at each ratio the preset --preset (HubKV) and the
preset fastkvzip: the same gate with the refinement off. A document is one sample: means
are over documents, +- is the standard error, differences are paired by document."""
EPILOG = """\
examples:
  python benchmarks/quality.py --quick
  python benchmarks/quality.py                        about 25 minutes on two cores
  python benchmarks/quality.py --tokens 1000 --documents 24 --ratios 0.75"""

PLAIN = "fastkvzip"
KINDS = ("passkey", "value", "fact")


@dataclass(frozen=True)
class Setting:
    """How a document is compressed."""

    preset: str
    ratio: float

    @property
    def name(self) -> str:
        return (
            "full cache"
            if self.ratio == 0
            else f"r = {self.ratio:g}, " + ("plain" if self.preset == PLAIN else "HubKV")
        )


@dataclass
class Score:
    """One document under one setting: a value for each question."""

    right: list[bool]
    nll: list[float]
    kept: float  # rows kept over all rows


def ask(llm: LLM, document: tasks.Document, ratio: float) -> Score:
    """Compresses the document, then answers its questions and scores the right answers, in batches over one context."""
    with llm.compress(document.text + "\n\n", ratio=ratio, chat=True) as context:
        outputs = llm.generate([q.text for q in document.questions], SamplingParams(max_tokens=16), context=context)
        right = [tasks.is_right(q, output.text) for q, output in zip(document.questions, outputs, strict=True)]
        nll = answer_nll(llm, context, document.questions)
        return Score(right, nll, 1 - context.stats.effective_ratio)


def answer_nll(llm: LLM, context: CompressedContext, questions: tuple[tasks.Question, ...]) -> list[float]:
    """-log p of each question's answer in nats, summed over its tokens, teacher-forced through the extend graph."""
    prompts, answers = [], []
    for q in questions:
        lead = _ids(llm, q.text + context.ending + q.lead)
        whole = _ids(llm, q.text + context.ending + q.lead + " " + q.answer)
        assert whole[: len(lead)] == lead
        prompts.append(lead)
        answers.append(whole[len(lead) :])
    ending, context.ending = context.ending, ""  # the prompts have it already
    try:
        params = SamplingParams(max_tokens=max(map(len, answers)), ignore_eos=True)
        sequences = llm._requests.generation(prompts, params, None, context, False, False)
    finally:
        context.ending = ending
    order = {id(s): i for i, s in enumerate(sequences)}
    nll = [0.0] * len(questions)
    try:
        for sequence in sequences:
            llm._scheduler.add(sequence)
        while llm._scheduler.waiting:  # what the scheduler starts together is forced together
            phase, group = llm._scheduler.schedule()
            assert phase is Phase.QUESTION
            _force(llm, group, [answers[order[id(s)]] for s in group], [order[id(s)] for s in group], nll)
    finally:
        llm._abort(sequences)
    return nll


def _force(llm: LLM, group: list[Any], answers: list[list[int]], index: list[int], nll: list[float]) -> None:
    """Feeds the answers to sequences that just started; adds to nll[index]."""
    logits, batch = llm._run(Phase.QUESTION, group), None
    for step in range(max(map(len, answers))):
        log_p = torch.log_softmax(logits, -1)
        tokens = []
        for row, answer in enumerate(answers):
            token = answer[min(step, len(answer) - 1)]  # after its end a sequence goes on with any token, not counted
            if step < len(answer):
                nll[index[row]] -= float(log_p[row, token])
            group[row].output_ids.append(token)
            tokens.append([token])
        if step + 1 < max(map(len, answers)):
            batch = batch or Batch(group, llm.cache)
            logits = llm._executor.extend(batch, torch.tensor(tokens, dtype=torch.int32))
    for sequence in group:
        llm._scheduler.finish(sequence, "stop")


def _ids(llm: LLM, text: str) -> list[int]:
    return list(llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# ---- report ----------------------------------------------------------------------------------------------------------


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error over documents."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def plus_minus(values: list[float], digits: int, scale: float = 1.0, sign: bool = False) -> str:
    mean, error = mean_and_error([scale * v for v in values])
    return f"{mean:{'+' if sign else ''}.{digits}f} +- {error:.{digits}f}"


def right_of(score: Score, questions: tuple[tasks.Question, ...], kind: str | None = None) -> float:
    found = [r for r, q in zip(score.right, questions, strict=True) if kind in (None, q.kind)]
    return sum(found) / len(found)


def report(settings: list[Setting], documents: list[tasks.Document], scores: dict[Setting, list[Score]]) -> str:
    """The table of all settings, and that of the paired differences HubKV - plain."""
    rows = []
    for setting in settings:
        pairs = list(zip(scores[setting], documents, strict=True))
        by_kind = [100 * statistics.mean(right_of(s, d.questions, kind) for s, d in pairs) for kind in KINDS]
        rows.append(
            [
                setting.name,
                f"{100 * statistics.mean(s.kept for s, _ in pairs):.1f}",
                *(f"{value:.0f}" for value in by_kind),
                plus_minus([right_of(s, d.questions) for s, d in pairs], 1, 100),
                plus_minus([statistics.mean(s.nll) for s, _ in pairs], 2),
            ]
        )
    text = common.table(
        ["setting", "rows kept %", *(f"{k} %" for k in KINDS), "all right %", "NLL of the answer"], rows
    )
    rows = []
    for ratio in dict.fromkeys(s.ratio for s in settings if s.ratio > 0):
        hubkv, plain = (
            next(scores[s] for s in settings if (s.preset == PLAIN, s.ratio) == (p, ratio)) for p in (False, True)
        )
        both = list(zip(hubkv, plain, documents, strict=True))
        gains = [right_of(a, d.questions) - right_of(b, d.questions) for a, b, d in both]
        nats = [statistics.mean(a.nll) - statistics.mean(b.nll) for a, b, _ in both]
        rows.append([f"r = {ratio:g}", plus_minus(gains, 1, 100, True), plus_minus(nats, 3, 1, True), verdict(nats)])
    return text + "\n\n" + common.table(["HubKV - plain", "right, points", "NLL, nats", "NLL says"], rows)


def verdict(nats: list[float]) -> str:
    """What a paired difference of NLL shows at two standard errors."""
    mean, error = mean_and_error(nats)
    if math.isnan(error) or abs(mean) <= 2 * error:
        return "no difference seen"
    return "HubKV better" if mean < 0 else "HubKV worse"


def main() -> None:
    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--engine", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--preset", default=DEFAULT_PRESET, help="what is called HubKV (default: %(default)s)")
    parser.add_argument("--scope", choices=["model", "layer", "head"], default="model", help="(default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", metavar="r", help="(default: 0.5 0.75 0.9)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="document lengths (default: 1000 3000)")
    parser.add_argument("--documents", type=int, metavar="N", help="of each length (default: 12)")
    parser.add_argument(
        "--per-kind", type=int, default=2, metavar="N", help="questions of each kind, 1..8 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1000, help="of the first document (default: %(default)s)")
    args = parser.parse_args()
    args.ratios = args.ratios or ([0.75] if args.quick else [0.5, 0.75, 0.9])
    args.tokens = args.tokens or ([600] if args.quick else [1000, 3000])
    args.documents = args.documents or (2 if args.quick else 16)
    if not all(0 < r < 1 for r in args.ratios):
        parser.error(f"--ratios: {args.ratios} are not all in (0, 1); the full cache is always run")
    if not 1 <= args.per_kind <= 8:
        parser.error(f"--per-kind: {args.per_kind} is not in 1..8")
    common.set_threads(args.threads)
    if not args.engine.exists():
        common.progress(f"building {args.engine}")
        build_engine("demo", args.engine, hubkv=HubKVConfig())
    engine = load_engine(args.engine)
    if engine.config.hubkv is None:
        raise SystemExit(f"quality.py: engine {args.engine}: it is dense; name one built with --hubkv")
    settings = [Setting(PLAIN, 0.0)]
    settings += [Setting(preset, ratio) for ratio in args.ratios for preset in (PLAIN, args.preset)]
    llms: dict[str, LLM] = {}
    for preset in (PLAIN, args.preset):
        hubkv = HubKVConfig.from_preset(preset, scope=engine.config.hubkv.scope.__class__(args.scope))
        llms[preset] = LLM(dataclasses.replace(engine, config=engine.config.replace(hubkv=hubkv)), cache_bytes=1 << 30)
    info = common.machine()
    print(common.machine_line(info) + f"; {engine.config.model_name}, HubKV = {args.preset}, scope {args.scope}\n")
    found = []
    for tokens in args.tokens:
        count = lambda text: len(_ids(llms[PLAIN], text))  # noqa: E731
        documents = [tasks.document(args.seed + i, tokens, count, args.per_kind) for i in range(args.documents)]
        scores: dict[Setting, list[Score]] = {s: [] for s in settings}
        for number, document in enumerate(documents, 1):
            common.progress(f"about {tokens} tokens: document {number}/{len(documents)}")
            for setting in settings:
                scores[setting].append(ask(llms[setting.preset], document, setting.ratio))
        questions = len(documents[0].questions)
        print(f"### about {tokens} tokens: {len(documents)} documents x {questions} questions\n")
        print(report(settings, documents, scores) + "\n", flush=True)
        found.append({"tokens": tokens, "scores": [{"setting": s, "documents": scores[s]} for s in settings]})
    common.write_json(args.json, machine=info, preset=args.preset, scope=args.scope, seed=args.seed, results=found)


if __name__ == "__main__":
    main()
