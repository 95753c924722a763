# SPDX-License-Identifier: Apache-2.0
"""An evaluation measures what engines built for its methods would do, once for each setting, whatever else it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from doors import QUESTIONS, TEXT, assert_alike, sample
from hubkv_trt.config import PRESETS, DType, Evicted, HubKVConfig, Scope, Scorer, budget
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.evaluation.answers import score
from hubkv_trt.evaluation.dense import Compressor, DenseContext
from hubkv_trt.evaluation.equal_bytes import ratio_at_equal_bytes
from hubkv_trt.evaluation.evaluate import Evaluator, Setting
from hubkv_trt.evaluation.forced import Continuation, Forced, forced_logits
from hubkv_trt.evaluation.methods import Method
from hubkv_trt.evaluation.sample import Question
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.segment import Segment

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


def settings(names: str, *ratios: float, scope: Scope = Scope.MODEL) -> list[Setting]:
    return [Setting(Method.parse(name), scope, r) for name in names.split(",") for r in ratios]


# ---- the short way to a compressed context ---------------------------------------------------------------------------


@pytest.mark.parametrize("scope", Scope, ids=lambda s: s.value)
@pytest.mark.parametrize(
    "name",
    ["gate", "gate+hubkv", "gate+prominence_k5_s2", "kvzip", "kvzip+hubkv", "snapkv+nms", "tova", "streaming_llm"],
)
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
        for field in ROWS:
            assert same_bytes(ours.segment, theirs.segment, field), field
        assert (ours.num_tokens, ours.ending) == (theirs.num_tokens, theirs.ending)
        assert ours.stats.effective_ratio == theirs.stats.effective_ratio
        assert np.array_equal(ours.stats.rows, theirs.stats.rows)
        answers = [
            [o.token_ids for o in each.generate(list(QUESTIONS), params, context=context)]
            for each, context in ((compressor.llm, ours), (llm, theirs))
        ]
        assert answers[0] == answers[1]
    assert compressor.llm.cache.held_bytes == 0


@pytest.fixture(scope="module")
def biased(engine: Engine) -> Compressor:
    """Of a cache whose rows have a bias."""
    return Compressor(LLM(engine, cache_bytes=CACHE, evicted=Evicted.SUMMARIZE))


@pytest.fixture(scope="module")
def referred(biased: Compressor) -> DenseContext:
    """With what rows for evicted pairs are fitted to."""
    return biased.read(TEXT + "\n\n", True, [Scorer.FASTKVZIP, Scorer.SNAPKV], seed=3, references=True)


def same_bytes(ours: Segment, theirs: Segment, *fields: str) -> bool:
    pairs = [(getattr(ours, field), getattr(theirs, field)) for field in fields]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


ROWS = ("k_rows", "v_rows", "positions", "head_offsets")


@pytest.mark.parametrize("scope", [Scope.MODEL, Scope.LAYER], ids=lambda s: s.value)
@pytest.mark.parametrize("name", ["gate+hubkv+summarize:centroids=3:evicted_mass=0.75", "gate+hubkv+merge:centroids=2"])
def test_evicted_pairs_leave_what_an_engine_for_the_method_leaves(
    name: str, scope: Scope, engine: Engine, biased: Compressor, referred: DenseContext
) -> None:
    """In no byte more than dropping takes at the ratio asked for, and in all but a few of them."""
    method, params = Method.parse(name), SamplingParams(max_tokens=8)
    hubkv = HubKVConfig(
        scope=scope, evicted=method.evicted, centroids=method.centroids, evicted_mass=method.evicted_mass
    )
    built = dataclasses.replace(engine, config=engine.config.replace(hubkv=hubkv))
    llm = LLM(built, cache_bytes=CACHE)
    ratio = ratio_at_equal_bytes(engine.config, hubkv, referred.num_tokens, RATIO)
    with (
        llm.compress(TEXT + "\n\n", ratio=ratio, chat=True) as theirs,
        biased.compress(referred, method, scope, RATIO) as ours,
        biased.compress(referred, method.base, scope, RATIO) as dropped,
    ):
        assert same_bytes(ours.segment, theirs.segment, *ROWS, "row_bias")
        assert ours.segment.row_bias is not None
        assert int((ours.segment.row_bias != 0).sum()) > engine.config.model.num_rows_per_token
        assert (ours.stats.ratio, ours.stats.effective_ratio) == (RATIO, theirs.stats.effective_ratio)
        assert ours.stats.effective_ratio > dropped.stats.effective_ratio
        assert np.array_equal(ours.stats.rows, theirs.stats.rows)
        assert ours.stats.bytes_kept == theirs.stats.bytes_kept == ours.segment.num_bytes
        assert 0.95 * dropped.stats.bytes_kept < ours.stats.bytes_kept <= dropped.stats.bytes_kept
        answers = [
            [o.token_ids for o in each.generate(list(QUESTIONS), params, context=context)]
            for each, context in ((biased.llm, ours), (llm, theirs))
        ]
        assert answers[0] == answers[1]
    assert biased.llm.cache.held_bytes == 0


def test_methods_that_drop_stay_what_they_are_beside_rows_with_a_bias(
    biased: Compressor, referred: DenseContext, compressor: Compressor, dense: DenseContext
) -> None:
    method = Method.parse("gate+hubkv")
    assert biased.llm.cache.held_bytes == 0
    biased.llm.cache.arena.fill_(0x3F)  # where memory is not cleared, a bias is not 0
    with (
        biased.compress(referred, method, Scope.MODEL, RATIO) as beside,
        compressor.compress(dense, method, Scope.MODEL, RATIO) as alone,
    ):
        assert same_bytes(beside.segment, alone.segment, *ROWS)
        assert beside.segment.row_bias is not None
        assert not bool(beside.segment.row_bias.any())
        assert beside.stats.bytes_kept == alone.stats.bytes_kept == alone.segment.num_bytes


@pytest.mark.parametrize("scope", Scope, ids=lambda s: s.value)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def test_no_byte_more_than_dropping(scope: Scope, dtype: DType, engine: Engine) -> None:
    config = engine.config.replace(dtype=dtype)
    plain, biased = (Ledger(config.model, dtype, row_bias=bias) for bias in (False, True))
    dropping = HubKVConfig(scope=scope)
    for num_tokens in (60, 301, 512):
        for ratio in (0.02, 0.3, 0.6, 0.75):
            for centroids in (1, 8):
                hubkv = dropping.replace(evicted=Evicted.MERGE, centroids=centroids)
                equal = ratio_at_equal_bytes(config, hubkv, num_tokens, ratio)
                limit = plain.segment_bytes(budget(config.model, dropping, num_tokens, ratio).num_rows)
                found = budget(config.model, hubkv, num_tokens, equal)
                assert biased.segment_bytes(found.num_rows) <= limit
                assert biased.segment_bytes(found.num_rows + found.num_groups) > limit, "a row more for each group"
    assert ratio_at_equal_bytes(config, dropping, 60, 0.3) == 0.3
    with pytest.raises(ValueError, match=r"ratio: 0.99 is not one at which 60 tokens leave room for 8 rows a head"):
        ratio_at_equal_bytes(config, dropping.replace(evicted=Evicted.MERGE, centroids=8), 60, 0.99)


def test_rows_for_evicted_pairs_need_a_bias_and_references(
    compressor: Compressor, biased: Compressor, dense: DenseContext
) -> None:
    method = Method.parse("gate+merge")
    with pytest.raises(ValueError, match=r"evicted: 'merge' is not drop, all that rows without a bias can do"):
        compressor.compress(dense, method, Scope.MODEL, RATIO)
    with pytest.raises(ValueError, match=r"references: \[\] is not those of a context"):
        biased.compress(dense, method, Scope.MODEL, RATIO)


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


def test_what_evicted_pairs_leave_is_measured_beside_dropping(engine: Engine) -> None:
    cells = Evaluator(engine, generate=False, row_bias=True).evaluate(
        sample(), settings("gate+hubkv,gate+hubkv+merge,gate+hubkv+summarize", 0.7)
    )
    assert [c.method for c in cells] == ["full", "gate+hubkv", "gate+hubkv+merge", "gate+hubkv+summarize"]
    assert {c.ratio for c in cells[1:]} == {0.7}
    assert len({c.nll for c in cells}) == 4
    assert cells[0].kl == 0
    for cell in cells[1:]:
        assert cell.effective_ratio == pytest.approx(1 - np.sum(cell.rows) / np.size(cell.rows) / cell.tokens, abs=1e-6)
    assert cells[2].effective_ratio == cells[3].effective_ratio > cells[1].effective_ratio


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
        ("gate+hubkv+drop", "gate+hubkv"),
        ("gate+merge+hubkv", "gate+hubkv+merge"),
        ("gate+prominence:strength=1:kernel=7", "gate+prominence:kernel=7:strength=1"),
        ("gate+hubkv+summarize:centroids=4:evicted_mass=0.5", "gate+hubkv+summarize"),
        ("snapkv+nms+entropy+merge:evicted_mass=1:centroids=8", "snapkv+nms+entropy+merge:centroids=8:evicted_mass=1"),
    ],
)
def test_method_names(text: str, name: str) -> None:
    method = Method.parse(text)
    assert method.name == name
    assert Method.parse(name) == method


@pytest.mark.parametrize(
    "text",
    [
        "", "gait", "gate+hub", "gate+hubkv:nms_kernel=4", "gate+hubkv:sinks=3", "gate+cma:seed=1",
        "gate+merge:centroids=9", "gate+merge:evicted_mass=0", "gate+drop:centroids=4", "gate+hubkv:centroids=4",
        "gate+summarize:centroids=2.5", "gate+cma:reach=0", "gate+cma:tau=few",
    ],
)  # fmt: skip
def test_methods_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match=r"gait|hub|nms_kernel|cma|reach|''|centroids|evicted_mass"):
        Method.parse(text)


def test_parameters_of_a_method_reach_the_configuration() -> None:
    hubkv = Method.parse("kvzip+nms:penalty_factor=0.25").hubkv(HubKVConfig(sink_tokens=7, ratio=0.3), Scope.LAYER)
    changes = {**PRESETS["fastkvzip_nms"], "penalty_factor": 0.25, "sink_tokens": 7, "ratio": 0.3}
    assert hubkv == HubKVConfig(preset="fastkvzip_nms", scorer=Scorer.KVZIP, scope=Scope.LAYER, **changes)


def test_what_becomes_of_evicted_pairs_is_the_methods_own() -> None:
    """Not the engine's; and each is held against what shares all but one thing with it."""
    engine = HubKVConfig(evicted=Evicted.MERGE, centroids=7, evicted_mass=0.9)
    assert Method.parse("gate+hubkv").hubkv(engine, Scope.MODEL) == HubKVConfig()
    method = Method.parse("gate+hubkv+entropy+summarize:centroids=2")
    expected = HubKVConfig(evicted=Evicted.SUMMARIZE, centroids=2)
    assert method.hubkv(engine, Scope.MODEL) == expected
    assert (method.base.name, method.placebo.name) == (
        "gate+hubkv+entropy",
        "gate+placebo+entropy+summarize:centroids=2",
    )
    assert method.base.base == Method.parse("gate")


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
