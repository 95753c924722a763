# SPDX-License-Identifier: Apache-2.0
"""An evaluation measures what engines built for its methods would do, once for each setting, whatever else it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt.cli import main
from hubkv_trt.config import PRESETS, HubKVConfig, Scope, Scorer
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.evaluation.answers import score
from hubkv_trt.evaluation.dense import Compressor, DenseContext
from hubkv_trt.evaluation.evaluate import Evaluator, Setting
from hubkv_trt.evaluation.forced import Continuation, Forced, forced_logits
from hubkv_trt.evaluation.methods import Method
from hubkv_trt.evaluation.report import report, summarize
from hubkv_trt.evaluation.results import FILE, Answer, Cell, ResultsFile, load_results
from hubkv_trt.evaluation.run import Evaluation, header, run
from hubkv_trt.evaluation.sample import Question, Sample
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.runtime.llm import LLM, SamplingParams

TEXT = "The code of the red door is 7214. Nobody knows the code of the blue one. " * 4
QUESTIONS = ("Which door?", "Code?", "What does nobody know, and of which door?")
RATIO = 0.6
CACHE = 64 << 20


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> Engine:
    return load_engine(tiny_engine("llama"))


@pytest.fixture(scope="module")
def compressor(engine: Engine) -> Compressor:
    return Compressor(LLM(engine, cache_bytes=CACHE))


@pytest.fixture(scope="module")
def dense(compressor: Compressor) -> DenseContext:
    return compressor.read(TEXT + "\n\n", True, Scorer, seed=3)


@pytest.fixture(scope="module")
def evaluator(engine: Engine) -> Evaluator:
    return Evaluator(engine)


def sample(task: str = "doors", index: int = 0) -> Sample:
    asked = tuple(Question(text, ("7214", "blue"), "It is", max_tokens=6) for text in QUESTIONS)
    return Sample(task, index, TEXT + str(index), (*asked, Question("Repeat it.", (TEXT[:40],), metric="none")))


def settings(names: str, *ratios: float, scope: Scope = Scope.MODEL) -> list[Setting]:
    return [Setting(Method.parse(name), scope, r) for name in names.split(",") for r in ratios]


# ---- the short way to a compressed context ---------------------------------------------------------------------------


@pytest.mark.parametrize("scope", Scope, ids=lambda s: s.value)
@pytest.mark.parametrize("name", ["gate", "gate+hubkv", "kvzip", "kvzip+hubkv", "snapkv+nms", "tova", "streaming_llm"])
def test_compressed_as_an_engine_for_the_method_compresses(
    name: str, scope: Scope, engine: Engine, compressor: Compressor, dense: DenseContext
) -> None:
    method = Method.parse(name)
    hubkv = HubKVConfig.from_preset(method.refinement, scorer=method.scorer, scope=scope)
    built = dataclasses.replace(engine, config=engine.config.replace(hubkv=hubkv))
    llm = LLM(built, cache_bytes=CACHE)
    params = SamplingParams(max_tokens=8)
    with (
        llm.compress(TEXT + "\n\n", ratio=RATIO, chat=True) as theirs,
        compressor.compress(dense, method, scope, RATIO) as ours,
    ):
        for field in ("k_rows", "v_rows", "positions", "head_offsets"):
            a, b = getattr(ours.segment, field), getattr(theirs.segment, field)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field
        assert (ours.num_tokens, ours.ending) == (theirs.num_tokens, theirs.ending)
        assert ours.stats.effective_ratio == theirs.stats.effective_ratio
        assert np.array_equal(ours.stats.rows, theirs.stats.rows)
        answers = [
            [o.token_ids for o in each.generate(list(QUESTIONS), params, context=context)]
            for each, context in ((compressor.llm, ours), (llm, theirs))
        ]
        assert answers[0] == answers[1]
    assert compressor.llm.cache.held_bytes == 0


def test_methods_keep_different_pairs_of_the_same_number(compressor: Compressor, dense: DenseContext) -> None:
    kept = {}
    for name in (
        "gate",
        "gate+hubkv",
        "gate+placebo",
        "gate+hubkv:nms_kernel=3",
        "gate+waterfill",
        "gate+cma",
        "random",
    ):
        with compressor.compress(dense, Method.parse(name), Scope.MODEL, RATIO) as context:
            kept[name] = context.segment.positions.tolist(), context.segment.head_offsets.tolist()
    assert len({str(value) for value in kept.values()}) == len(kept)
    assert len({offsets[-1] for _, offsets in kept.values()}) == 1


def test_random_draws_depend_on_the_seed_alone(compressor: Compressor, dense: DenseContext) -> None:
    same, other = (compressor.read(TEXT + "\n\n", True, [Scorer.RANDOM], seed) for seed in (3, 4))
    assert torch.equal(same.scores[Scorer.RANDOM], dense.scores[Scorer.RANDOM])
    assert not torch.equal(other.scores[Scorer.RANDOM], dense.scores[Scorer.RANDOM])


# ---- forced answers --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_forced_logits_are_those_of_the_whole_text(engine: Engine, compressor: Compressor, dense: DenseContext) -> None:
    """Over a cache that keeps everything; with and without a question, and through several passes."""
    ops, decoder = EagerOps({**engine.weights}, engine.config.dtype), Decoder(engine.config.model)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(3, 259, count).astype(np.int32)

    lengths = [(9, (5, 1)), (0, (7,)), (40, (3, 30)), (1, (1, 1)), (0, (2,)), *[(12, (4, 9))] * 60]
    with compressor.keep_all(dense) as context:
        items = [Forced(context, tokens(n), tuple(Continuation(tokens(m), min(m, 4)) for m in ms)) for n, ms in lengths]
        seen = set()
        for i, c, logits in forced_logits(compressor.llm, items):
            whole = np.concatenate([dense.token_ids, items[i].prompt, items[i].continuations[c].tokens])
            ids = torch.from_numpy(whole)
            expected = decoder.dense_logits(ops, ids, torch.arange(len(ids), dtype=torch.int32))
            targets = items[i].targets(c)
            assert torch.equal(targets, ids[len(ids) - len(targets) :].long())
            assert len(targets) == min(4, len(items[i].continuations[c].tokens) - (len(items[i].prompt) == 0))
            torch.testing.assert_close(logits, expected[-len(targets) - 1 : -1], atol=2e-4, rtol=1e-4)
            seen.add((i, c))
    assert seen == {(i, c) for i, item in enumerate(items) for c in range(len(item.continuations))}
    assert compressor.llm.cache.held_bytes == 0
    compressor.llm.cache.audit()


def assert_alike(cells: Iterable[Cell], others: Iterable[Cell]) -> None:
    """Equal but for the bits that depend on what shares a pass."""
    for a, b in zip(cells, others, strict=True):
        assert (a.key, a.rows) == (b.key, b.rows)
        assert [x.text for x in a.answers] == [x.text for x in b.answers]
        assert [x.nll for x in a.answers] == pytest.approx([x.nll for x in b.answers], abs=1e-3)
        assert [x.kl for x in a.answers] == pytest.approx([x.kl for x in b.answers], abs=1e-4)


# ---- a sample --------------------------------------------------------------------------------------------------------


def test_full_cache_is_its_own_reference(evaluator: Evaluator) -> None:
    (cell,) = evaluator.evaluate(sample(), [])
    assert (cell.method, cell.ratio, cell.protected) == ("full", 0.0, 0.0)
    assert all(a.kl == 0 and a.agreement == 1 for a in cell.answers)
    assert [a.right is None for a in cell.answers] == [False, False, False, True]
    assert [a.tokens for a in cell.answers] == [5, 5, 5, 40]


def test_nothing_depends_on_what_runs_together(evaluator: Evaluator) -> None:
    names = "gate,gate+placebo,random,kvzip+hubkv"
    together = evaluator.evaluate(sample(), settings(names, 0.5, 0.8))
    apart = [cell for s in settings(names, 0.5, 0.8) for cell in evaluator.evaluate(sample(), [s], full=False)]
    assert_alike(together[1:], apart)
    assert len({cell.nll for cell in together}) == len(together)


def test_answers_are_those_of_the_product(engine: Engine, evaluator: Evaluator) -> None:
    """Answers that agree with the full cache's are not generated again: they would be the same."""
    cells = evaluator.evaluate(sample(), settings("gate+hubkv", 0.1, 0.8))
    llm = LLM(engine, cache_bytes=CACHE)
    for cell in cells:
        with llm.compress(sample().context + "\n\n", ratio=cell.ratio, chat=True) as context:
            outputs = llm.generate(list(QUESTIONS), SamplingParams(max_tokens=6), context=context)
        assert [a.text for a in cell.answers[:3]] == [o.text for o in outputs]
        rights = [score(q, o.text) for q, o in zip(sample().questions, outputs, strict=False)]
        assert [a.right for a in cell.answers[:3]] == rights
    assert any(a.agreement < 1 for a in cells[-1].answers[:3])


def test_without_generation_the_rest_is_measured(engine: Engine, evaluator: Evaluator) -> None:
    quick = Evaluator(engine, generate=False).evaluate(sample(), settings("gate", 0.8))
    whole = evaluator.evaluate(sample(), settings("gate", 0.8))
    assert [[a.nll for a in c.answers] for c in quick] == [[a.nll for a in c.answers] for c in whole]
    assert all(a.right is None and a.text is None for c in quick for a in c.answers)
    assert all(c.accuracy is None for c in quick)
    assert quick[1].kl > 0


def test_refused_engines(engine: Engine, tiny_engine: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="it is dense"):
        Evaluator(load_engine(tiny_engine("llama", hubkv=None)))
    without = Compressor(LLM(tiny_engine("llama", hubkv=HubKVConfig(scorer=Scorer.KNORM)), cache_bytes=CACHE))
    with pytest.raises(ValueError, match="one with a gate"):
        without.read(TEXT, False, [Scorer.FASTKVZIP])


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fastkvzip+fastkvzip", "gate"),
        ("gate+base", "gate"),
        ("gate+fastkvzip_head_nms_gated_k5_p0.5_mild", "gate+hubkv"),
        ("kvzip+waterfill+nms", "kvzip+nms+waterfill"),
        ("snapkv+head_budget_entropy", "snapkv+entropy"),
        ("gate+hubkv:nms_kernel=7:gate_power=1", "gate+hubkv:gate_power=1:nms_kernel=7"),
        ("gate+placebo:penalty_factor=0.25", "gate+placebo:penalty_factor=0.25"),
        ("gate+cma", "gate+cma"),
    ],
)
def test_method_names(text: str, name: str) -> None:
    method = Method.parse(text)
    assert method.name == name
    assert Method.parse(name) == method


@pytest.mark.parametrize(
    "text", ["", "gait", "gate+hub", "gate+hubkv:nms_kernel=4", "gate+hubkv:sinks=3", "gate+cma:tau=1"]
)
def test_methods_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match=r"gait|hub|nms_kernel|cma|''"):
        Method.parse(text)


def test_parameters_of_a_method_reach_the_configuration() -> None:
    hubkv = Method.parse("kvzip+nms:penalty_factor=0.25").hubkv(HubKVConfig(sink_tokens=7, ratio=0.3), Scope.LAYER)
    changes = {**PRESETS["fastkvzip_nms"], "penalty_factor": 0.25, "sink_tokens": 7, "ratio": 0.3}
    assert hubkv == HubKVConfig(preset="fastkvzip_nms", scorer=Scorer.KVZIP, scope=Scope.LAYER, **changes)


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "answers", "text", "right"),
    [
        ("contains", ("7214", "1"), "It is 7214.", 1.0),
        ("contains", ("721",), "It is 7214.", 0.0),
        ("contains", ("Bergen",), "in bergen", 1.0),
        ("all", ("1", "2"), "2, 1", 1.0),
        ("all", ("1", "2"), "2, 2", 0.0),
        ("f1", ("a red door", "blue"), "The red window", 0.5),
        ("f1", ("red",), "", 0.0),
    ],
)
def test_scores(metric: str, answers: tuple[str, ...], text: str, right: float) -> None:
    assert score(Question("?", answers, metric=metric), text) == right


# ---- the file --------------------------------------------------------------------------------------------------------


def evaluation(**changes: Any) -> Evaluation:
    values = {
        "methods": (Method.parse("gate"), Method.parse("gate+hubkv")),
        "ratios": (0.5, 0.8),
        "samples": 2,
        "tokens": 9,
    }
    return Evaluation(**{**values, **changes})


SOURCES = {task: lambda index, task=task: sample(task, index) for task in ("doors", "gates")}


@pytest.fixture(scope="module")
def output(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that ran to its end."""
    directory = tmp_path_factory.mktemp("evaluation")
    run(engine, evaluation(), SOURCES, directory)
    return directory


def test_tasks_take_turns(output: Path) -> None:
    cells = list(load_results(output).cells.values())
    order = list(dict.fromkeys((c.task, c.index) for c in cells))
    assert order == [("doors", 0), ("gates", 0), ("doors", 1), ("gates", 1)]
    assert len(cells) == 4 * 5


@pytest.mark.parametrize("left_out", [1, 300, 1500])
def test_what_was_stopped_goes_on(left_out: int, output: Path, engine: Engine, tmp_path: Path) -> None:
    """Killed at any byte: whole lines stay, a torn one is measured anew, and the end is the same."""
    whole = (output / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-left_out])
    before = load_results(tmp_path)
    results = run(engine, evaluation(), SOURCES, tmp_path)
    assert list(before.cells.items()) == list(results.cells.items())[: len(before.cells)]
    assert results.cells == load_results(tmp_path).cells
    assert_alike(results.cells.values(), load_results(output).cells.values())
    assert len(results.headers) == len(before.headers)
    assert len(load_results(tmp_path).headers) == 2


def test_more_is_added_and_nothing_measured_twice(output: Path, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes((output / FILE).read_bytes())
    more = evaluation(ratios=(0.5, 0.7), half="second")
    results = run(engine, more, {"doors": SOURCES["doors"]}, tmp_path)
    new = list(results.cells.values())[20:]
    assert [(c.task, c.index, c.method, c.ratio) for c in new] == [
        ("doors", 1, "gate", 0.7),
        ("doors", 1, "gate+hubkv", 0.7),
    ]
    assert {c.index for c in results.half("first").cells.values()} == {0}


def test_other_settings_go_elsewhere(output: Path, engine: Engine) -> None:
    size = (output / FILE).stat().st_size
    with pytest.raises(ValueError, match=r"was made with seed 0, not 5: name another directory"):
        run(engine, evaluation(seed=5), SOURCES, output)
    assert (output / FILE).stat().st_size == size


def test_a_damaged_line_is_named(output: Path, tmp_path: Path) -> None:
    lines = (output / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join([lines[0], lines[1][:50] + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 2: not a line of an evaluation"):
        load_results(tmp_path)


def test_a_sample_that_fails_leaves_the_others(engine: Engine, tmp_path: Path) -> None:
    def broken(index: int) -> Sample:
        return dataclasses.replace(sample("gates", index), context=TEXT * 10)

    with pytest.raises(ValueError, match="at most max_input_len = 512"):
        run(engine, evaluation(), {"doors": SOURCES["doors"], "gates": broken}, tmp_path)
    assert len(load_results(tmp_path).cells) == 5


# ---- the report ------------------------------------------------------------------------------------------------------


def cell(method: str, index: int, nll: float, ratio: float = 0.9) -> Cell:
    answers = [Answer(4 * nll, 4, 0.1, 0.5, 1.0, "yes"), Answer(2 * nll, 2, 0.3, 1.0, None, None)]
    return Cell("doors", index, method, "model", ratio, ratio, 100, 0.2, [[5, 5]], answers)


def test_differences_are_paired_by_context(tmp_path: Path, engine: Engine) -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(0, 100, 30)  # contexts differ far more than methods
    file = ResultsFile(tmp_path, header(engine, evaluation()))
    for i, nll in enumerate(hard):
        file.add(
            [cell("full", i, nll, 0.0), cell("gate", i, nll + 2), cell("gate+hubkv", i, nll + 1 + 0.1 * rng.random())]
        )
        if i != 7:
            file.add([cell("gate+placebo", i, nll + 2 + rng.normal())])
    file.close()
    results = load_results(tmp_path)
    rows = summarize(results)
    refined = rows["model", "doors", 0.9, "gate+hubkv"]
    assert refined.base is not None
    assert refined.placebo is not None
    assert (refined.base.other, refined.placebo.other) == ("gate", "gate+placebo")
    assert (refined.base.nll.contexts, refined.placebo.nll.contexts) == (30, 29)
    assert -1 < refined.base.nll.low < refined.base.nll.mean < refined.base.nll.high < -0.9
    assert refined.base.adjusted == pytest.approx(3 * refined.base.p)  # the smallest of three
    assert rows["model", "doors", 0.9, "gate"].base is None
    assert rows["model", "doors", 0.9, "gate+placebo"].placebo is None
    text = report(results)
    assert "## doors, scope model" in text
    assert "over the 3 comparisons" in text
    assert text.count(" gate+hubkv |") == 1


def test_command(tiny_engine: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--output", str(tmp_path)]
    measure = [
        *arguments, "--engine", str(tiny_engine("llama")), "--tasks", "continuation",
        "--methods", "gate,gate+hubkv,random", "--ratios", "0.6", "--tokens", "300", "--samples", "2",
        "--scopes", "model,layer",
    ]  # fmt: skip
    assert main(measure) == 0
    first = (tmp_path / FILE).read_bytes()
    assert main(measure) == 0  # nothing is missing
    assert (tmp_path / FILE).read_bytes().startswith(first)
    assert "14 measurements" in capsys.readouterr().out
    assert main([*arguments, "--report"]) == 0
    assert "## continuation, scope layer" in capsys.readouterr().out
    assert (tmp_path / "report.md").read_text().startswith("# Evaluation")
    assert main([*arguments, "--tasks", "riddles"]) == 2
    assert "riddles: not of passkey" in capsys.readouterr().err
