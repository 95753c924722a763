# SPDX-License-Identifier: Apache-2.0
"""What is kept of a prompt that another runtime prefills, and its rows in pages: both without that runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubkv_trt.config import DType, HubKVConfig, budget
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.graph.ops import PrefillInputs
from hubkv_trt.integrations.paged_rows import compact_pages
from hubkv_trt.integrations.prompt_compressor import Chunk, PromptCompressor, local_heads
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.scorers.fastkvzip import engine_weights
from trtllm_executor import HUBKV, PAGE, load_tiny, token_ids

# ---- pages -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_compacted_pages_hold_the_rows_asked_for(data: st.DataObject) -> None:
    heads, dim, page_tokens = data.draw(st.integers(1, 4)), 4, data.draw(st.sampled_from([1, 2, 8]))
    num_pages = data.draw(st.integers(1, 6))
    tokens = num_pages * page_tokens
    count = data.draw(st.integers(0, tokens))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    pool = torch.randn(num_pages + 3, 2, heads, page_tokens, dim, generator=generator).to(dtype)
    pages = torch.randperm(len(pool), generator=generator)[:num_pages]
    positions = torch.stack([torch.randperm(tokens, generator=generator)[:count].sort().values for _ in range(heads)])
    before = pool.clone()
    compact_pages(pool, pages, positions.int())
    dense = before[pages].permute(1, 2, 0, 3, 4).reshape(2, heads, tokens, dim)
    packed = pool[pages].permute(1, 2, 0, 3, 4).reshape(2, heads, tokens, dim)
    for head in range(heads):
        assert packed[:, head, :count].equal(dense[:, head, positions[head]])
    assert packed[:, :, count:].equal(dense[:, :, count:])
    others = [page for page in range(len(pool)) if page not in pages.tolist()]
    assert pool[others].equal(before[others])


def test_pages_that_do_not_fit() -> None:
    pool, pages = torch.zeros(4, 2, 3, PAGE, 4), torch.arange(2)
    with pytest.raises(ValueError, match=r"pool: \[4, 2, 3, 4, 8\] is not a dense"):
        compact_pages(pool.transpose(3, 4), pages, torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"positions: \[2, 5\] does not fit 2 heads"):
        compact_pages(pool, pages, torch.zeros(2, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"positions: \[3, 17\] does not fit 3 heads of 2 pages"):
        compact_pages(pool, pages, torch.zeros(3, 17, dtype=torch.int32))


# ---- scores and selection --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path], tiny_gate: Callable[..., Path]) -> Any:
    return load_tiny(tiny_model("llama"), tiny_gate("llama"))


def kept_by_prefill(tiny: Any, prompt: list[int]) -> Tensor:
    """int64 [L, Hkv, K]: what our own prefill keeps of a prompt in head scope."""
    rows = budget(tiny.config, HUBKV, len(prompt), HUBKV.ratio).rows_per_group
    ops = EagerOps({**tiny.weights, **engine_weights(tiny.gate, DType.FLOAT32)}, DType.FLOAT32)
    with torch.inference_mode():
        out = Decoder(tiny.config, HUBKV).prefill(
            ops,
            PrefillInputs(
                input_ids=torch.tensor(prompt, dtype=torch.int32),
                positions=torch.arange(len(prompt), dtype=torch.int32),
                alpha=torch.tensor([HUBKV.alpha(HUBKV.ratio)]),
                window=torch.tensor([HUBKV.window(len(prompt))], dtype=torch.int32),
                rows_per_group=rows,
            ),
        )
    return out.positions.view(tiny.config.num_layers, tiny.config.num_kv_heads, rows).long()


def attention_inputs(tiny: Any, prompt: list[int]) -> list[Tensor]:
    """[T, E] of each layer."""
    decoder, inputs = Decoder(tiny.config), []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return ops.causal_attention(q, k, v, decoder.scale)

    ops = EagerOps(dict(tiny.weights), DType.FLOAT32)
    ids = torch.tensor(prompt, dtype=torch.int32)
    with torch.inference_mode():
        decoder.forward(ops, ids, torch.arange(len(prompt), dtype=torch.int32), attention)
    return inputs


def test_selection_is_that_of_our_own_prefill(tiny: Any) -> None:
    prompts = [token_ids(tiny.config, 70, 1), token_ids(tiny.config, 41, 2)]
    compressor = PromptCompressor(tiny.config, HUBKV, tiny.gate)
    layers = list(zip(*(attention_inputs(tiny, prompt) for prompt in prompts), strict=True))
    for request in (7, 8):
        compressor.begin(request)
    for layer, hidden in enumerate(layers):  # both in one batch, a request that did not begin between them
        chunks = [Chunk(7, 0, 70), Chunk(99, 0, 5), Chunk(8, 0, 41)]
        compressor.score(layer, torch.cat([hidden[0], torch.randn(5, 64), hidden[1], torch.randn(3, 64)]), chunks)
    for request, prompt in zip((7, 8), prompts, strict=True):
        kept = compressor.select(request, len(prompt))
        assert kept is not None and kept.long().equal(kept_by_prefill(tiny, prompt))
        assert request not in compressor


def test_ranks_select_their_part_of_the_whole(tiny: Any) -> None:
    prompt = token_ids(tiny.config, 60, 3)
    inputs, whole = attention_inputs(tiny, prompt), kept_by_prefill(tiny, prompt)

    def selected(**part: Any) -> Tensor | None:
        compressor = PromptCompressor(tiny.config, HUBKV, tiny.gate, **part)
        compressor.begin(0)
        for layer in compressor.layers:
            compressor.score(layer, inputs[layer], [Chunk(0, 0, 60)])
        return compressor.select(0, 60)

    for part, expected in (({"layers": [1, 2]}, whole[1:]), ({"heads": range(1, 2)}, whole[:, 1:])):
        kept = selected(**part)
        assert kept is not None and kept.long().equal(expected)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 1), (8, 4), (2, 4), (1, 8)])
def test_heads_of_the_ranks(kv_heads: int, ranks: int) -> None:
    parts = [local_heads(kv_heads, ranks, rank) for rank in range(ranks)]
    assert {head for part in parts for head in part} == set(range(kv_heads))
    assert {len(part) for part in parts} == {max(kv_heads // ranks, 1)}
    with pytest.raises(ValueError, match="fit no 3 KV heads"):
        local_heads(3, 2, 0)


def test_prompts_that_cannot_be_selected_from(tiny: Any) -> None:
    compressor = PromptCompressor(tiny.config, HUBKV, tiny.gate)
    hidden = torch.randn(30, 64)
    for request in (1, 2, 3):
        compressor.begin(request)
    for layer in compressor.layers:
        compressor.score(layer, hidden, [Chunk(1, 0, 20), Chunk(2, 10, 10)])  # of 2 the first ten are missing
        compressor.score(layer, hidden * math.nan, [Chunk(3, 0, 30)])
    with pytest.raises(ValueError, match="layer 0: 20 of 25 tokens were scored"):
        compressor.select(1, 25)
    with pytest.raises(ValueError, match="layer 0: 0 of 20 tokens were scored"):
        compressor.select(2, 20)
    with pytest.raises(ValueError, match="180 of 180 values are NaN"):
        compressor.select(3, 30)
    compressor.begin(1)
    assert compressor.select(1, 4) is None  # all of it is protected
    with pytest.raises(ValueError, match="scope: 'model' is not head"):
        PromptCompressor(tiny.config, HubKVConfig(), tiny.gate)
