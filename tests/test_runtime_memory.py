# SPDX-License-Identifier: Apache-2.0
"""What requests cost the cache and the process, and that all of it comes back."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt.config import HubKVConfig, budget
from hubkv_trt.runtime.llm import LLM, CacheFullError, SamplingParams
from hubkv_trt.runtime.memory import resident_bytes
from paced_engine import ids
from tiny_models import save_tiny_model

# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_stats_say_what_was_kept(tiny: LLM) -> None:
    model, hubkv = tiny.config.model, tiny.config.hubkv
    num_tokens, ratio = 200, 0.8
    (output,) = tiny.generate(ids(num_tokens), SamplingParams(max_tokens=20, ignore_eos=True), ratio=ratio)
    stats = output.stats
    rows = budget(model, hubkv, num_tokens, ratio).num_rows
    assert stats.rows.shape == (model.num_layers, model.num_kv_heads)
    assert stats.rows.dtype == np.int64
    assert (
        stats.rows.sum()
        == rows
        == model.num_rows_per_token * num_tokens - math.floor(ratio * model.num_rows_per_token * num_tokens)
    )
    assert (stats.ratio, stats.prompt_tokens, stats.context_tokens) == (ratio, num_tokens, 0)
    assert stats.effective_ratio == pytest.approx(ratio, abs=1e-3)
    assert stats.bytes_dense == num_tokens * model.kv_bytes_per_token(tiny.config.dtype)
    assert stats.bytes_kept == tiny.cache.ledger.segment_bytes(rows)
    assert stats.bytes_tail == tiny.cache.ledger.tail_bytes(19)  # the last token is never fed
    assert stats.decode_steps == 19
    assert {"scorer", "refine", "select", "compact", "prefill", "decode"} <= set(stats.seconds)
    stages = sum(stats.seconds[s] for s in ("scorer", "refine", "select", "compact"))
    assert 0 < stages < stats.seconds["prefill"] <= stats.first_token_seconds
    assert stats.seconds_per_token == stats.seconds["decode"] / 19
    assert 0 < stats.resident_bytes <= stats.peak_bytes
    assert stats.to_dict()["rows"] == stats.rows.tolist()


def test_the_cache_holds_what_the_ledger_says_at_every_step(tiny: LLM) -> None:
    model, hubkv, ledger = tiny.config.model, tiny.config.hubkv, tiny.cache.ledger
    segment = ledger.segment_bytes(budget(model, hubkv, 130, 0.5).num_rows)
    count = 0
    for piece in tiny.stream(ids(130), SamplingParams(max_tokens=40, ignore_eos=True), ratio=0.5):
        count += len(piece.token_ids)
        tail = count - 1  # the newest token is not in the cache yet
        tiny.cache.audit()
        expected = 0 if piece.output else segment + ledger.tail_bytes(tail)
        assert tiny.cache.held_bytes == expected
    assert count == 40


def test_protection_that_needs_more_than_the_budget_is_reported(tiny: LLM) -> None:
    (output,) = tiny.generate(ids(100), SamplingParams(max_tokens=1), ratio=0.99)
    protected = tiny.config.hubkv.num_protected(100)
    assert (output.stats.rows == protected).all()
    assert output.stats.effective_ratio == pytest.approx(1 - protected / 100)


def test_after_prefill_the_dense_rows_are_gone_from_memory(tmp_path: Path) -> None:
    """A model with 64 KiB of K/V a token: 2000 tokens make 128 MiB, of which a tenth may stay."""
    from hubkv_trt.engine.build import build_engine
    from hubkv_trt.models.checkpoint import load_config
    from hubkv_trt.scorers.fastkvzip import Gate, gate_shapes, save_gate

    model = save_tiny_model(
        "llama",
        tmp_path / "model",
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=4096,
    )
    generator = torch.Generator().manual_seed(0)
    shapes = gate_shapes(load_config(model))
    save_gate(gate=Gate({n: torch.randn(s, generator=generator) for n, s in shapes.items()}), path=tmp_path / "gate")
    build_engine(
        model, tmp_path / "engine", hubkv=HubKVConfig(), gate=tmp_path / "gate", dtype="float32", max_input_len=2048
    )
    llm = LLM(tmp_path / "engine")
    with llm.compress(ids(100), ratio=0.9):  # libraries have loaded what they load
        pass
    before = resident_bytes()
    with llm.compress(ids(2000), ratio=0.9) as context:
        grown = resident_bytes() - before
        assert context.stats.bytes_dense == 2000 << 16
        assert context.stats.peak_bytes - before > context.stats.bytes_dense  # it was there
        assert context.num_bytes == llm.cache.held_bytes < 0.11 * context.stats.bytes_dense
        assert grown < context.num_bytes + (24 << 20)
        llm.generate([ids(5)] * 4, SamplingParams(max_tokens=20), context=context)
        assert resident_bytes() - before < context.num_bytes + (48 << 20)
    assert resident_bytes() - before < 32 << 20
    llm.cache.audit()


# ---- the cache is shared ---------------------------------------------------------------------------------------------


def test_a_small_cache_makes_requests_wait_and_changes_nothing(tiny: LLM, tiny_engine: Callable[..., Path]) -> None:
    prompts = [ids(n, n) for n in (200, 210, 190, 30, 205)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = tiny.generate(prompts, params, ratio=0.5)
    ledger, model = tiny.cache.ledger, tiny.config.model
    one = ledger.sequence_bytes(budget(model, tiny.config.hubkv, 210, 0.5).num_rows, 32)
    small = LLM(tiny_engine("llama"), cache_bytes=one + 1024, tail_tokens=32)
    outputs = small.generate(prompts, params, ratio=0.5)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert small.cache.peak_bytes <= one
    small.cache.audit()
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt: .* bytes of compact segment .* raise cache_bytes"):
        small.generate([ids(200), ids(500)], params, ratio=0.5)
    with pytest.raises(ValueError, match="max_tokens: 'a tail of 33 tokens'"):
        small.generate(ids(10), SamplingParams(max_tokens=34))
    with small.compress(ids(200), ratio=0.5):
        with pytest.raises(CacheFullError, match="held by open contexts"):
            small.generate(ids(200), params, ratio=0.5)
        with pytest.raises(CacheFullError, match="held by open contexts"):
            small.compress(ids(200), ratio=0.5)
    assert small.generate(prompts[0], params, ratio=0.5)[0].token_ids == wanted[0].token_ids


def test_contexts_hold_memory_until_they_are_closed(tiny: LLM) -> None:
    first = tiny.compress(ids(100), ratio=0.5)
    second = tiny.compress(ids(60), ratio=0.2)
    assert tiny.cache.held_bytes == first.num_bytes + second.num_bytes
    first.close()
    first.close()
    assert first.closed
    assert first.num_bytes == 0
    assert tiny.cache.held_bytes == second.num_bytes
    with pytest.raises(ValueError, match=r"context: .* is not open"):
        tiny.generate(ids(3), context=first)
    del second
    gc.collect()
    assert tiny.cache.held_bytes == 0


def test_a_context_may_be_closed_while_questions_run(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    context = tiny.compress(ids(100), ratio=0.5)
    wanted = tiny.generate(ids(5), params, context=context)[0].text
    text = ""
    for piece in tiny.stream(ids(5), params, context=context):
        context.close()
        text += piece.text
    assert text == wanted
