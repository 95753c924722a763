# SPDX-License-Identifier: Apache-2.0
"""The condensed tier as fitted rows: what they carry of the evicted, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt.commands.common import hard_kv
from hubkv_trt.config import Evicted, HardKVConfig
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.engine.summary import summarize
from hubkv_trt.reference.candidates import rows as candidate_rows
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.segment import Segment
from hubkv_trt.runtime.sequence import Sequence

Make = Callable[..., Path]
SUMMARIZED = HardKVConfig(p=1.0, query_window=8, interval=16, recent=16, layer_budget=40, upper_budget=64,
                          condensed_rows=3, condense=Evicted.SUMMARIZE)  # fmt: skip
LONG = SamplingParams(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_engine: Make) -> LLM:
    return LLM(tiny_engine("llama"), decode_compression=SUMMARIZED, cache_bytes=64 << 20)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def asking(params: SamplingParams, config: HardKVConfig | bool) -> SamplingParams:
    return dataclasses.replace(params, decode_compression=config)


@dataclass
class Rows:
    """Of one head."""

    keys: np.ndarray
    values: np.ndarray
    bias: np.ndarray
    positions: np.ndarray


@dataclass
class Compression:
    """Of one sequence: by head the judges [G*n, D], the candidates, and the new segment's rows."""

    judges: list[np.ndarray]
    before: list[Rows]
    after: list[Rows]


def compressions(llm: LLM, prompt: list[int], ratio: float, monkeypatch: pytest.MonkeyPatch) -> list[Compression]:
    """Those of one request, as they happen."""
    model, cache, found = llm.config.model, llm.cache, list[Compression]()
    condense = llm._executor.condense  # type: ignore[attr-defined]

    def recorded(sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
        cascade, old, tail = sequence.cascade, sequence.segment, sequence.tail
        assert cascade is not None and old is not None and tail is not None and cascade._queries is not None
        queries = cascade._queries[:, : cascade._seen].float().numpy()  # [L, n, Hq, D]
        groups = np.split(queries, model.num_kv_heads, axis=2)
        judges = [groups[h][layer].reshape(-1, model.head_dim) for layer in range(model.num_layers)
                  for h in range(model.num_kv_heads)]  # fmt: skip
        pages = np.array([tail.pages[: moved // cache.ledger.page_tokens]], np.int32)
        heads = candidate_rows(
            cache.arena.numpy(), np.array([old.entry]), pages, moved, model.num_layers, model.num_kv_heads,
            cache.ledger.page_tokens, cache.page_base, model.head_dim, np.float32,
        )  # fmt: skip
        later = sequence.tail_start + np.arange(moved)
        offsets = old.head_offsets.tolist()
        before = [Rows(*(x.copy() for x in head), np.concatenate([old.positions[a:b].numpy(), later]))
                  for head, a, b in zip(heads, offsets[:-1], offsets[1:], strict=True)]  # fmt: skip
        rows = condense(sequence, moved, target)
        offsets = target.head_offsets.tolist()
        fields = (target.k_rows, target.v_rows, target.row_bias, target.positions)
        after = [Rows(*(x[a:b].numpy().copy() for x in fields if x is not None))
                 for a, b in pairwise(offsets)]  # fmt: skip
        assert [len(head.keys) for head in after] == rows.flatten().tolist()
        found.append(Compression(judges, before, after))
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(llm._executor, "condense", recorded)
        llm.generate(prompt, LONG, ratio=ratio)
    return found


def attend(queries: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, and logarithms of the mass, in float64."""
    logits = queries.astype(np.float64) @ rows.keys.T.astype(np.float64) * queries.shape[1] ** -0.5 + rows.bias
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    mass = weights.sum(axis=1, keepdims=True)
    return weights / mass @ rows.values, (top + np.log(mass))[:, 0]


def first(rows: Rows, count: int) -> Rows:
    return Rows(rows.keys[:count], rows.values[:count], rows.bias[:count], rows.positions[:count])


def test_each_compression_is_nearer_to_all_rows_than_dropping(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the queries that judge, in every head; from the second compression on summaries are among the evicted."""
    found = compressions(llm, ids(100), 0.3, monkeypatch)
    assert len(found) >= 5
    errors, masses, lost, stands_for_several = [], [], [], 0
    for number, compression in enumerate(found):
        for judges, before, after in zip(compression.judges, compression.before, compression.after, strict=True):
            kept, live = len(after.keys) - SUMMARIZED.condensed_rows, after.bias > -np.inf
            chosen = np.isin(before.positions, after.positions[:kept])
            full, total = attend(judges, before)
            dropped, less = attend(judges, first(after, kept))
            rows, mass = attend(judges, after)
            error, dropping = (np.square(x - full).sum() for x in (rows, dropped))
            assert error <= dropping * (1 + 1e-3) + 1e-9
            errors.append(error / dropping)
            masses.append(mass - total)
            lost.append(less - total)
            assert np.isin(after.positions[kept:][live[kept:]], before.positions).all()
            assert (after.positions[kept:][~live[kept:]] == np.iinfo(np.int32).max).all()
            assert (after.keys[~live] == 0).all()
            stands_for_several += number > 0 and bool((before.bias[~chosen] > 0).any())
    assert np.mean(errors) < 0.5
    assert np.abs(masses).mean() < 0.4 * np.abs(lost).mean()
    assert abs(np.mean(masses)) < 0.2 * abs(np.mean(lost))
    assert stands_for_several > 0


def test_at_most_m_evicted_rows_are_all_there_as_they_were(llm: LLM) -> None:
    """Each head loses two rows at the first compression; until the second one nothing has changed."""
    params = dataclasses.replace(LONG, max_tokens=48, return_log_probs=True)
    most = SUMMARIZED.replace(layer_budget=38, upper_budget=38)
    prompt = ids(24)
    (plain,), (summarized,), (dropped,) = (
        llm.generate(prompt, asking(params, config), ratio=0.0)
        for config in (False, most, most.replace(condensed_rows=0))
    )
    assert summarized.stats.condensations == dropped.stats.condensations == 1
    assert summarized.token_ids == plain.token_ids
    off, far = (np.abs(np.array(o.output_log_probs) - plain.output_log_probs)[33:].max() for o in (summarized, dropped))
    assert off < 1e-4 < 1e-2 < far


def test_a_sequence_gives_the_same_alone_and_in_any_batch(llm: LLM) -> None:
    prompts = [ids(120), ids(60, 1), ids(9, 2)]
    together = llm.generate(prompts, LONG, ratio=0.5)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, LONG, ratio=0.5)
        assert output.token_ids == alone.token_ids
        assert output.stats.condensations >= 5
        assert output.stats.condensed_rows.mean(axis=1).max() <= SUMMARIZED.layer_budget + SUMMARIZED.condensed_rows
    gc.collect()
    llm.cache.audit()
    assert llm.cache.held_bytes == llm.cache.ledger.segment_bytes(llm._staging.rows)  # type: ignore[union-attr]


def test_nothing_is_lost_where_nothing_is_evicted(tiny_engine: Make) -> None:
    everything = SUMMARIZED.replace(layer_budget=400, upper_budget=None)
    llm = LLM(tiny_engine("llama"), decode_compression=everything, cache_bytes=64 << 20)
    (plain,) = llm.generate(ids(40), asking(LONG, False), ratio=0.5)
    (kept,) = llm.generate(ids(40), LONG, ratio=0.5)
    assert kept.token_ids == plain.token_ids
    assert kept.stats.condensations >= 5


def test_a_request_may_name_another_kind(llm: LLM, tiny_engine: Make) -> None:
    merged = SUMMARIZED.replace(condense=Evicted.MERGE)
    merging = LLM(tiny_engine("llama"), decode_compression=merged, cache_bytes=64 << 20)
    for config in (SUMMARIZED, merged, SUMMARIZED.replace(condensed_rows=0)):
        outputs = [x.generate(ids(80), asking(LONG, config), ratio=0.5)[0].token_ids for x in (llm, merging)]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tiny_engine: Make, dtype: str) -> None:
    llm = LLM(tiny_engine(dtype=dtype), decode_compression=SUMMARIZED, cache_bytes=64 << 20)
    (output,) = llm.generate(ids(80), dataclasses.replace(LONG, max_tokens=70), ratio=0.5)
    assert output.stats.condensations == 3
    assert len(output.token_ids) == 70


def test_settings(tiny_engine: Make, tmp_path: Path) -> None:
    data = json.loads(json.dumps(SUMMARIZED.to_dict()))
    assert HardKVConfig.from_dict(data) == SUMMARIZED
    del data["condense"]  # as engines were written before
    assert HardKVConfig.from_dict(data).condense is Evicted.MERGE
    assert hard_kv("condensed_rows=4,condense=summarize,layer_budget=60") == HardKVConfig(
        condensed_rows=4, condense=Evicted.SUMMARIZE, layer_budget=60
    )
    with pytest.raises(ValueError, match=r"^condense: .* is not merge or summarize; condensed_rows = 0 drops"):
        SUMMARIZED.replace(condense=Evicted.DROP)
    with pytest.raises(ValueError, match=r"^condensed_rows: 9 is not at most 8, for condense = summarize"):
        SUMMARIZED.replace(condensed_rows=9)
    assert SUMMARIZED.replace(condense=Evicted.MERGE, condensed_rows=9).condensed_rows == 9
    path = tiny_engine("llama")
    config = load_engine(path).config.replace(decode_compression=SUMMARIZED)
    text = summarize(path, config)
    assert "summarized in 3 a head" in text and "drop, 4 rows" not in text
