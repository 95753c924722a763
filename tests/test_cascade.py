# SPDX-License-Identifier: Apache-2.0
"""HARD-KV in the runtime: caches that are compressed while their sequences decode."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt import ops, reference
from hubkv_trt.config import Budgets, HardKVConfig, HubKVConfig, Importance
from hubkv_trt.runtime.cascade import Cascade
from hubkv_trt.runtime.executors.condense import refined
from hubkv_trt.runtime.llm import LLM, RequestError, SamplingParams
from hubkv_trt.runtime.segment import Segment
from hubkv_trt.runtime.sequence import Sequence

EVERYTHING = HardKVConfig(p=1.0, query_window=8, interval=16, recent=16, layer_budget=None, upper_budget=None)
SOME = EVERYTHING.replace(p=0.8, layer_budget=64, upper_budget=96)
SHARED = SOME.replace(budgets=Budgets.HELD_OUT, fill=True)
JUDGED = EVERYTHING.replace(budgets=Budgets.HELD_OUT)
LONG = SamplingParams(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def llms(tiny_engine: Callable[..., Path]) -> dict[HardKVConfig, LLM]:
    return {
        config: LLM(tiny_engine("llama"), decode_compression=config, cache_bytes=64 << 20)
        for config in (EVERYTHING, SOME, SHARED, JUDGED)
    }


@pytest.fixture(autouse=True)
def _memory_comes_back(llms: dict[HardKVConfig, LLM]) -> Iterator[None]:
    """After every test the caches hold what a compression writes to, and nothing else."""
    yield
    gc.collect()
    for llm in llms.values():
        llm.cache.audit()
        assert llm.cache.held_bytes == llm.cache.ledger.segment_bytes(llm._staging.rows)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def without(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, decode_compression=False)


@pytest.mark.parametrize("config", [EVERYTHING, JUDGED], ids=["mass", "held_out"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_nothing_is_lost_where_everything_is_kept(llms: dict[Any, LLM], config: HardKVConfig, ratio: float) -> None:
    (plain,) = llms[config].generate(ids(40), without(LONG), ratio=ratio)
    (kept,) = llms[config].generate(ids(40), LONG, ratio=ratio)
    assert kept.token_ids == plain.token_ids
    assert kept.stats.condensations >= 5
    moved = 120 - 1 - 16  # of the tokens fed, those that may have left the tail
    assert kept.stats.condensed_rows.sum() >= plain.stats.rows.sum() + (moved - 31) * plain.stats.rows.size


def test_a_question_over_a_context_leaves_the_context_as_it_was(llms: dict[Any, LLM]) -> None:
    llm = llms[EVERYTHING]
    with llm.compress(ids(100), ratio=0.5) as context:
        before = [x.clone() for x in (context.segment.k_rows, context.segment.v_rows, context.segment.positions)]
        (plain,) = llm.generate(ids(50, 1), without(LONG), context=context)
        (kept,) = llm.generate(ids(50, 1), LONG, context=context)
        assert kept.token_ids == plain.token_ids
        after = (context.segment.k_rows, context.segment.v_rows, context.segment.positions)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_budgets_bound_the_rows_and_the_tail(llms: dict[Any, LLM]) -> None:
    (output,) = llms[SOME].generate(ids(200), LONG, ratio=0.0)
    stats = output.stats
    assert stats.condensed_rows.min() >= 1
    assert stats.condensed_rows.max() <= SOME.upper_budget
    assert stats.condensed_rows.mean(axis=1).max() <= SOME.layer_budget
    assert stats.bytes_tail <= llms[SOME].cache.ledger.tail_bytes(SOME.tail_tokens)
    assert stats.seconds["condense"] > 0


def test_all_heads_share_the_rows_of_all_layers(llms: dict[Any, LLM]) -> None:
    (output,) = llms[SHARED].generate(ids(200), LONG, ratio=0.0)
    rows = output.stats.condensed_rows
    assert rows.sum() == SHARED.layer_budget * rows.size
    assert SHARED.min_rows <= rows.min() < rows.max() <= SHARED.upper_budget
    assert len(set(rows.sum(axis=1).tolist())) > 1  # layers differ, too
    fewer = dataclasses.replace(LONG, decode_compression=SHARED.replace(fill=False, p=0.5))
    (output,) = llms[SHARED].generate(ids(200), fewer, ratio=0.0)
    assert output.stats.condensed_rows.sum() < rows.sum()


@pytest.mark.parametrize("changes", [{}, {"refine": True}, {"importance": Importance.RKV}])
def test_queries_that_judge_did_not_order(
    tiny_engine: Callable[..., Path], changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a window of 32 the two oldest order the rows, and the others judge, over the tail up to their own tokens."""
    config = SHARED.replace(query_window=32, interval=32, recent=32, **changes)
    windows, scored, judged = [], [], []
    take, score, judge = Cascade.take_queries, ops.score_window, ops.held_out_loss

    def took(cascade: Cascade) -> torch.Tensor:
        windows.append(take(cascade).clone())
        return windows[-1]

    def scores(q: torch.Tensor, *others: Any) -> Any:
        scored.append((q, score(q, *others)))
        return scored[-1][1]

    def judges(*arguments: Any) -> Any:
        judged.append(arguments)
        return judge(*arguments)

    monkeypatch.setattr(Cascade, "take_queries", took)
    monkeypatch.setattr(ops, "score_window", scores)
    monkeypatch.setattr(ops, "held_out_loss", judges)
    llm = LLM(tiny_engine("llama"), decode_compression=config, cache_bytes=64 << 20)
    llm.generate(ids(200), LONG, ratio=0.0)
    assert len(windows) == len(judged) >= 2
    ordering = [found for found in scored if found[0].shape[1] == 2]
    for window, (early, order), (q, ranking, places, *_, moved, length, _, _, _, _, _) in zip(
        windows, ordering, judged, strict=True
    ):
        assert torch.equal(early, window[:, :2])
        assert torch.equal(q, window[:, 2:])
        assert torch.equal(ranking, order[1])
        assert torch.equal(places, order[2])
        assert (moved, length) == (32, config.tail_tokens)


@pytest.mark.parametrize("config", [SOME, SHARED], ids=["mass", "held_out"])
def test_a_sequence_gives_the_same_alone_and_in_any_batch(llms: dict[Any, LLM], config: HardKVConfig) -> None:
    prompts = [ids(30 * i, i) for i in range(1, 5)]
    params = [dataclasses.replace(LONG, max_tokens=50 + 20 * i) for i in range(4)]
    together = llms[config].generate(prompts, params, ratio=0.5)
    alone = [llms[config].generate(p, s, ratio=0.5)[0] for p, s in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert all(o.stats.condensations > 0 for o in alone)


def test_leaving_at_any_moment_gives_all_back(llms: dict[Any, LLM]) -> None:
    for count in (1, 20, 33, 50, 80):
        stream = llms[SOME].stream([ids(60), ids(90, 1)], LONG, ratio=0.5)
        for _ in range(count):
            next(stream)
        stream.close()
        llms[SOME].cache.audit()


def test_a_request_may_ask_for_less_but_not_for_more(llms: dict[Any, LLM], tiny_engine: Callable[..., Path]) -> None:
    own = dataclasses.replace(LONG, decode_compression=SOME.replace(layer_budget=32))
    (output,) = llms[SOME].generate(ids(200), own, ratio=0.0)
    assert output.stats.condensed_rows.mean(axis=1).max() <= 32
    with pytest.raises(ValueError, match="layer_budget: 65 is not at most 64"):
        llms[SOME].generate(ids(9), dataclasses.replace(LONG, decode_compression=SOME.replace(layer_budget=65)))
    with pytest.raises(ValueError, match=r"decode_compression: .* is not possible: the LLM was made without it"):
        LLM(tiny_engine("llama"), cache_bytes=16 << 20).generate(ids(9), own)
    with pytest.raises(ValueError, match=r"decode_compression: 0\.9 is not a HardKVConfig"):
        SamplingParams(decode_compression=0.9)  # type: ignore[arg-type]


def test_a_short_request_reserves_nothing_more(llms: dict[Any, LLM]) -> None:
    (output,) = llms[SOME].generate(ids(50), SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.stats.condensations == 0
    assert output.stats.condensed_rows is None


def fail_at(llm: LLM, prompt: list[int], time: int, monkeypatch: pytest.MonkeyPatch) -> RuntimeError:
    """The error of that prompt's compression number ``time``, raised when all rows have been written."""
    error, condense = RuntimeError("a kernel failed"), llm._executor.condense  # type: ignore[attr-defined]

    def failing(sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
        rows = condense(sequence, moved, target)
        if sequence.token_ids.tolist() == prompt and sequence.stats.condensations == time - 1:
            raise error
        return rows

    monkeypatch.setattr(llm._executor, "condense", failing)
    return error


@pytest.mark.parametrize("time", [1, 3])
def test_a_compression_that_fails_ends_its_sequence_alone(
    llms: dict[Any, LLM], time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those that follow in the batch are compressed, in the same step and later ones."""
    llm, prompts = llms[SOME], [ids(60), ids(90, 1), ids(30, 2)]
    alone = [llm.generate(prompt, LONG, ratio=0.5)[0] for prompt in prompts]
    error = fail_at(llm, prompts[1], time, monkeypatch)
    with pytest.raises(RequestError, match=r"1 of 3 requests failed; prompts\[1\]: a kernel failed") as caught:
        llm.generate(prompts, LONG, ratio=0.5)
    failed = caught.value.outputs.pop(1)
    del alone[1]
    assert [o.token_ids for o in caught.value.outputs] == [o.token_ids for o in alone]
    assert [o.stats.condensations for o in caught.value.outputs] == [o.stats.condensations for o in alone]
    assert (failed.finish_reason, failed.error, failed.stats.condensations) == ("error", error, time - 1)
    assert len(failed.token_ids) == 32 + 16 * (time - 1) + 1  # its last step gave a token, and filled the tail
    with pytest.raises(RuntimeError, match="a kernel failed"):
        llm.generate(prompts[1], LONG, ratio=0.5)
    assert llm.generate(prompts[0], LONG, ratio=0.5)[0].token_ids == alone[0].token_ids


# ---- HubKV's refinement ----------------------------------------------------------------------------------------------


def refined_by_the_oracle(scores: np.ndarray, protected: np.ndarray, alpha: float) -> np.ndarray:
    """Of heads of one length, [L, Hkv, n] logarithms."""
    hubkv = HubKVConfig()
    given = np.where(protected, np.nan, np.exp(scores)).astype(np.float32)
    z, _ = reference.refine(given, np.array([alpha], np.float32), np.zeros(1, np.int32), hubkv.nms_kernel,
                            hubkv.penalty_factor, hubkv.head_weight_temperature, hubkv.min_head_weight,
                            hubkv.max_head_weight, 0)  # fmt: skip
    return np.where(protected, scores, np.log(z))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_refined_is_the_oracle(alpha: float) -> None:
    scores = np.random.default_rng(1).normal(-6, 2, (3, 2, 50)).astype(np.float32)
    protected = np.zeros_like(scores, bool)
    protected[:, :, :4] = True
    offsets = torch.arange(7) * 50
    given = (torch.from_numpy(x).flatten() for x in (scores, protected))
    flat, mask = given
    out = refined(flat, offsets, mask, 3, alpha)
    expected = refined_by_the_oracle(scores, protected, alpha)
    np.testing.assert_allclose(out.numpy(), expected.flatten(), rtol=1e-6, atol=1e-6)
    if alpha == 0:
        np.testing.assert_allclose(out.numpy(), scores.flatten(), rtol=1e-6, atol=1e-6)


def test_refined_heads_of_any_lengths_are_refined_as_if_alone_but_for_their_weights() -> None:
    """One head a layer: its weight is 1, and the others do not matter."""
    sizes = [40, 1, 0, 17]
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    scores = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)) - 5
    mask = torch.zeros_like(scores, dtype=torch.bool)
    out = refined(scores, offsets, mask, 4, 0.8)
    for start, end in pairwise(offsets.tolist()):
        if end > start:
            part = scores[start:end].numpy()[None, None]
            np.testing.assert_allclose(
                out[start:end], refined_by_the_oracle(part, np.zeros_like(part, bool), 0.8)[0, 0], rtol=1e-6, atol=1e-6
            )


def test_refinement_chooses_other_rows_and_none_where_nothing_is_dropped(llms: dict[Any, LLM]) -> None:
    for config, same in ((EVERYTHING, True), (SOME, False)):
        (plain,) = llms[config].generate(ids(200), LONG, ratio=0.0)
        own = dataclasses.replace(LONG, decode_compression=config.replace(refine=True))
        (output,) = llms[config].generate(ids(200), own, ratio=0.0)
        assert (output.token_ids == plain.token_ids) is same
        assert output.stats.condensed_rows.mean(axis=1).max() <= (config.layer_budget or 10**6)


# ---- the condensed tier ----------------------------------------------------------------------------------------------

MERGED = SOME.replace(layer_budget=24, upper_budget=32, condensed_rows=2)


@pytest.fixture(scope="module")
def merging(tiny_engine: Callable[..., Path]) -> LLM:
    return LLM(tiny_engine("llama"), decode_compression=MERGED, cache_bytes=64 << 20)


def test_merged_rows_come_beside_the_budget(merging: LLM) -> None:
    ledger = merging.cache.ledger
    assert ledger.slices(100)["row_bias"] == 512
    prompts, params = [ids(200), ids(60, 1), ids(9, 2)], LONG
    together = merging.generate(prompts, params, ratio=0.5)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = merging.generate(prompt, params, ratio=0.5)
        assert output.token_ids == alone.token_ids
        assert output.stats.condensed_rows.mean(axis=1).max() <= MERGED.layer_budget + MERGED.condensed_rows
        assert output.stats.condensed_rows.min() >= MERGED.min_rows + MERGED.condensed_rows
    gc.collect()
    merging.cache.audit()
    assert merging.cache.held_bytes == ledger.segment_bytes(merging._staging.rows)


def test_merged_rows_have_the_bias_of_those_they_stand_for(merging: LLM) -> None:
    """Behind the kept rows of each head, whose bias is 0. That of m rows of E equal members is log(E / m) at most."""
    (sequence,) = merging._requests.generation([ids(100)], LONG, 0.0, None, False, False)
    merging._scheduler.add(sequence)
    try:
        while sequence.stats.condensations == 0:
            merging.step()
        assert sequence.segment is not None
        offsets, bias = sequence.segment.head_offsets.tolist(), sequence.segment.row_bias
        assert bias is not None
        evicted = 100 + sequence.cascade.moved_tokens - np.diff(offsets) + MERGED.condensed_rows
        for start, end, count in zip(offsets[:-1], offsets[1:], evicted, strict=True):
            kept, merged = bias[start : end - MERGED.condensed_rows], bias[end - MERGED.condensed_rows : end]
            assert (kept == 0).all()
            assert (merged > 0).all()
            assert (merged <= np.log(-(-count // MERGED.condensed_rows)) + 1e-5).all()
    finally:
        merging._scheduler.finish(sequence, "aborted")


def test_nothing_is_lost_where_nothing_is_merged(merging: LLM, tiny_engine: Callable[..., Path]) -> None:
    """Rows that stand for nothing change nothing, however many compressions leave them."""
    everything = EVERYTHING.replace(layer_budget=400, condensed_rows=3)
    llm = LLM(tiny_engine("llama"), decode_compression=everything, cache_bytes=64 << 20)
    (plain,) = llm.generate(ids(40), without(LONG), ratio=0.5)
    (kept,) = llm.generate(ids(40), LONG, ratio=0.5)
    assert kept.token_ids == plain.token_ids
    assert kept.stats.condensations >= 5
    more = dataclasses.replace(LONG, decode_compression=MERGED.replace(condensed_rows=3))
    with pytest.raises(ValueError, match=r"^condensed_rows: 3 is not at most 2"):
        merging.generate(ids(9), more)
    with pytest.raises(ValueError, match=r"^condensed_rows: 1 is not possible without a layer_budget"):
        EVERYTHING.replace(condensed_rows=1)
