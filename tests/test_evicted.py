# SPDX-License-Identifier: Apache-2.0
"""``evicted``: budgets, bytes and rows of engines that summarise what they do not keep, and who refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt import LLM, HubKVConfig, SamplingParams, Scope
from hubkv_trt.cli import main
from hubkv_trt.config import DType, EngineConfig, Evicted, budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.engine.summary import cache_figures
from hubkv_trt.models.rope import rope_frequencies
from hubkv_trt.runtime.cache import Cache
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.summarize import collect_attention
from hubkv_trt.summarize.fit import summarize_evicted
from hubkv_trt.summarize.heads import EMPTY
from hubkv_trt.summarize.references import by_kv_head, reference_queries
from tensorrt_config import make_config

Make = Callable[..., Path]
TOKENS = list(range(3, 203))


@pytest.mark.parametrize("scope", list(Scope))
def test_a_summary_takes_the_place_of_kept_pairs(scope: Scope) -> None:
    model = make_config().model
    for ratio in (0.0, 0.3, 0.75, 0.95, 0.999):
        dropping = HubKVConfig(scope=scope)
        plain = budget(model, dropping, 200, ratio)
        found = budget(model, dropping.replace(evicted=Evicted.SUMMARIZE, centroids=3), 200, ratio)
        heads = model.num_rows_per_token // found.num_groups
        assert plain.summaries_per_group == 0 and plain.selected_per_group == plain.rows_per_group
        if ratio == 0:
            assert found == plain
            continue
        assert found.summaries_per_group == 3 * heads
        least = heads * (3 + dropping.num_protected(200))
        assert found.rows_per_group == max(plain.rows_per_group, least)
    short = budget(model, dropping.replace(evicted=Evicted.MERGE), 6, 0.9)
    assert short.num_rows == short.num_pairs or short.summaries_per_group == 0


def test_settings_are_checked_and_survive_json() -> None:
    hubkv = HubKVConfig(evicted=Evicted.MERGE, centroids=2)
    assert HubKVConfig.from_dict(json.loads(json.dumps(hubkv.to_dict()))) == hubkv
    for centroids in (0, 9, 2.0, True):
        with pytest.raises(ValueError, match="centroids: "):
            HubKVConfig(centroids=centroids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="evicted_mass: 0 is not in"):
        HubKVConfig(evicted_mass=0)
    with pytest.raises(ValueError, match="evicted: 'keep' is not"):
        HubKVConfig(evicted="keep")  # type: ignore[arg-type]


def test_tensorrt_refuses_it_by_name() -> None:
    config = make_config()
    assert config.hubkv is not None
    with pytest.raises(ValueError, match="evicted: 'summarize' is not drop, all that --backend tensorrt has"):
        config.replace(hubkv=config.hubkv.replace(evicted=Evicted.SUMMARIZE))
    with pytest.raises(ValueError, match=r"prominence: 2\.0 is not 0, all that --backend tensorrt has"):
        config.replace(hubkv=HubKVConfig.from_preset("prominence_k5_s2"))


def test_a_bias_costs_four_bytes_a_row() -> None:
    ledger, plain = (Ledger(make_config().model, DType.FLOAT32, row_bias=bias) for bias in (True, False))
    assert ledger.segment_bytes(640) == plain.segment_bytes(640) + 640 * 4
    cache = Cache(ledger, 1 << 20, 4)
    segment = cache.allocate(100)
    assert segment.row_bias is not None and segment.row_bias.shape == (100,)
    assert segment.entry[3] == segment.row_bias.data_ptr() - cache.arena.data_ptr()
    cache.audit()
    cache.release(segment)
    assert cache.held_bytes == 0


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("method", [Evicted.MERGE, Evicted.SUMMARIZE])
def test_rows_of_a_segment(tiny_engine: Make, scope: Scope, method: Evicted) -> None:
    """Kept pairs are those that dropping keeps of K - m*L*Hkv, byte for byte; behind them the summary of the others."""
    engine = load_engine(tiny_engine(hubkv=HubKVConfig(scope=scope)))
    model, count = engine.config.model, 3
    llm = LLM(engine, cache_bytes=1 << 23, evicted=method, centroids=count)
    assert llm.config.hubkv is not None
    layers = collect_attention(engine, TOKENS)
    inv_freq = torch.from_numpy(rope_frequencies(model.rope, model.head_dim, model.max_position_embeddings)[0])
    with llm.compress(TOKENS, ratio=0.8) as context:
        found = budget(model, llm.config.hubkv, len(TOKENS), 0.8)
        segment = context.segment
        assert segment.rows == found.num_rows and context.stats.rows.sum() == found.num_rows
        assert segment.row_bias is not None and "summarize" in context.stats.seconds
        offsets = segment.head_offsets
        for head in range(model.num_rows_per_token):
            layer, h = divmod(head, model.num_kv_heads)
            first, last = int(offsets[head]), int(offsets[head + 1])
            kept = segment.positions[first : last - count].long()
            assert bool((kept.diff() > 0).all()) and bool((segment.row_bias[first : last - count] == 0).all())
            k, v = layers[layer].keys[:, h], layers[layer].values[:, h]
            torch.testing.assert_close(segment.k_rows[first : last - count], k[kept], atol=1e-5, rtol=1e-5)
            mask = torch.zeros(1, len(TOKENS), dtype=torch.bool)
            mask[0, kept] = True
            queries = by_kv_head(reference_queries(layers[layer].queries, inv_freq), model.num_kv_heads)[h : h + 1]
            rows = summarize_evicted(queries, k[None], v[None], mask, count, model.head_dim**-0.5, method, 0.5)
            for name, stored in (("keys", segment.k_rows), ("values", segment.v_rows), ("bias", segment.row_bias)):
                torch.testing.assert_close(stored[last - count : last], getattr(rows, name)[0], atol=1e-3, rtol=1e-3)
            assert not bool(mask[0, segment.positions[last - count : last].long()].any())
        total = int((offsets[-1] - count * model.num_rows_per_token) // found.num_groups)
        assert total == found.selected_per_group


def test_answers_are_nearer_to_the_full_cache(tiny_engine: Make) -> None:
    """Logits after the same question: summaries bring them nearer to those of the full cache than dropping does."""
    engine = load_engine(tiny_engine())

    def logits(ratio: float, evicted: Evicted) -> torch.Tensor:
        llm = LLM(engine, cache_bytes=1 << 23, evicted=evicted, centroids=4)
        seen: list[torch.Tensor] = []
        extend = llm._executor.extend
        llm._executor.extend = lambda *a: seen.append(extend(*a)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        with llm.compress(TOKENS, ratio=ratio) as context:
            llm.generate([[5, 9, 7]], SamplingParams(max_tokens=1), context=context)
            llm.cache.audit()
        return seen[0]

    full = logits(0.0, Evicted.DROP)
    assert torch.equal(full, logits(0.0, Evicted.SUMMARIZE)), "nothing is evicted: nothing changes"
    errors = {e: float((logits(0.8, e) - full).norm()) for e in Evicted}
    assert errors[Evicted.SUMMARIZE] < errors[Evicted.DROP], errors


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tiny_engine: Make, dtype: str) -> None:
    llm = LLM(tiny_engine(dtype=dtype), cache_bytes=1 << 22, evicted=Evicted.SUMMARIZE)
    with llm.compress(TOKENS, ratio=0.9) as context:
        assert bool(context.segment.k_rows.isfinite().all()) and bool(context.segment.v_rows.isfinite().all())
        assert len(llm.generate([[5, 9]], SamplingParams(max_tokens=3), context=context)[0].token_ids) >= 1


def test_prompts_beside_each_other_stay_what_they_are(tiny_engine: Make) -> None:
    llm = LLM(tiny_engine(), cache_bytes=1 << 23, evicted=Evicted.SUMMARIZE)
    prompts, params = [TOKENS, TOKENS[:50], TOKENS[::-1]], SamplingParams(max_tokens=6, ignore_eos=True)
    together = [o.token_ids for o in llm.generate(prompts, params, ratio=[0.8, 0.0, 0.5])]
    alone = [llm.generate(p, params, ratio=r)[0].token_ids for p, r in zip(prompts, (0.8, 0.0, 0.5), strict=True)]
    assert together == alone
    llm.cache.audit()
    assert llm.cache.held_bytes == 0


def test_built_in_and_by_command(
    tiny_engine: Make, tiny_model: Make, tiny_gate: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = tmp_path / "engine"
    options = ["--hubkv", "--gate", tiny_gate("llama"), "--evicted", "summarize", "--centroids", 2, "--ratio", 0.5]
    assert main(["build", "--model", str(tiny_model("llama")), "--output", str(built), *map(str, options)]) == 0
    out = capsys.readouterr().out
    assert "summarize, 2 rows a head" in out and "changed" not in out
    config: EngineConfig = load_engine(built).config
    assert config.hubkv is not None and (config.hubkv.evicted, config.hubkv.centroids) == (Evicted.SUMMARIZE, 2)
    plain = config.replace(hubkv=config.hubkv.replace(evicted=Evicted.DROP))
    more = cache_figures(config)["kept_bytes_per_token"] / cache_figures(plain)["kept_bytes_per_token"]
    assert 1 < more < 1 + 4 / (8 * config.model.head_dim)
    prompt = "word " * 60
    arguments = ["generate", "--engine", str(built), "--prompt", prompt, "--max-tokens", "3", "--json"]
    for change in ([], ["--evicted", "drop"], ["--evicted", "merge", "--centroids", "5"]):
        assert main([*arguments, *change]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"]
    assert main([*arguments, "--centroids", "9"]) == 1
    assert "centroids: 9 is not an integer in 1..8" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"evicted: .* of use only in an engine built with --hubkv"):
        LLM(tiny_engine(hubkv=None), evicted=Evicted.MERGE)
    assert main(["build", "--model", "x", "--evicted", "merge"]) == 2


def test_no_row_stands_for_nothing_where_much_is_evicted(tiny_engine: Make) -> None:
    llm = LLM(tiny_engine(), cache_bytes=1 << 22, evicted=Evicted.SUMMARIZE, centroids=2)
    with llm.compress(TOKENS, ratio=0.9) as context:
        bias = context.segment.row_bias
        assert bias is not None
        live = (bias != 0) & (bias > EMPTY)
        assert int(live.sum()) > 0.5 * 2 * llm.config.model.num_rows_per_token
        assert np.isfinite(bias.numpy()).all()
