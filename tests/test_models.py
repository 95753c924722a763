# SPDX-License-Identifier: Apache-2.0
"""The decoder against transformers, and its three ways through one layer loop against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hubkv_trt import ops as stages
from hubkv_trt.config import DType, HubKVConfig, ModelConfig, RopeConfig, Scope, budget
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.graph.linear import linear, pack_weights
from hubkv_trt.graph.ops import CacheInputs, ExtendInputs, PrefillInputs, PrefillOutputs
from hubkv_trt.models.checkpoint import load_config, load_tokenizer, load_weights
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.models.rope import rope_frequencies
from hubkv_trt.scorers.fastkvzip import engine_weights, random_gate
from prompt_cache import prompt_cache
from tiny_models import save_tiny_model

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {}),
    "llama_default": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "head_dim": 40}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "llama_biases_untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3_yarn_mscale_bias": (
        "qwen3",
        {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}, "attention_bias": True},
    ),
    "qwen3_yarn_attention_factor": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}, "head_dim": 80}),
}


@dataclass
class Loaded:
    config: ModelConfig
    weights: dict[str, Tensor]
    reference: Any

    def ops(self, dtype: DType = DType.FLOAT32) -> EagerOps:
        weights = {n: w.to(getattr(torch, dtype.value)) for n, w in self.weights.items()}
        return EagerOps(weights, dtype)

    def dense(self, ids: Tensor, dtype: DType = DType.FLOAT32) -> Tensor:
        with torch.inference_mode():
            return Decoder(self.config).dense_logits(self.ops(dtype), ids, int32(range(len(ids))))

    def expected(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.reference(ids[None].long()).logits[0]


def load(directory: Path) -> Loaded:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Loaded(load_config(directory), load_weights(directory, DType.FLOAT32), reference)


def int32(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def random_ids(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    model = load(save_tiny_model(architecture, tmp_path, seed=1, **changes))
    ids = random_ids(model.config, 130)  # more than one piece of every split by tokens, longer than YaRN's original
    expected = model.expected(ids)
    assert expected.std() > 0.1  # logits that say something
    torch.testing.assert_close(model.dense(ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.BFLOAT16, 0.06), (DType.FLOAT16, 0.01)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_16_bit_logits_are_near(
    architecture: str, dtype: DType, tolerance: float, tiny_model: Callable[..., Path]
) -> None:
    model = load(tiny_model(architecture))
    ids = random_ids(model.config, 100)
    expected, got = model.expected(ids), model.dense(ids, dtype)
    assert got.dtype == torch.float32
    assert (got - expected).norm() < tolerance * expected.norm()


def test_positions_are_true_positions(tiny_model: Callable[..., Path]) -> None:
    """RoPE is relative: shifting all positions changes nothing; stretching them does."""
    model = load(tiny_model("llama"))
    ids, decoder, ops = random_ids(model.config, 40), Decoder(model.config), model.ops()
    with torch.inference_mode():
        plain, shifted, stretched = (
            decoder.dense_logits(ops, ids, int32(p)) for p in (range(40), range(500, 540), range(0, 80, 2))
        )
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-3)
    assert (stretched - plain).abs().max() > 0.1


@pytest.mark.parametrize("packed", [True, False])
def test_many_tokens_run_in_pieces(
    packed: bool, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr("hubkv_trt.graph.linear._can_pack", lambda weight: False)
    model = load(tiny_model("qwen2"))
    ids = random_ids(model.config, 200)
    whole = model.dense(ids)
    monkeypatch.setattr("hubkv_trt.graph.eager.PIECE_TOKENS", 64)  # the last piece is shorter
    torch.testing.assert_close(model.dense(ids), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_products_equal_plain_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = {n: torch.randn(s, generator=generator).to(dtype) for n, s in {
        "embedding.weight": (50, 40), "layers.0.o.weight": (72, 40), "layers.0.o.bias": (72,)}.items()}  # fmt: skip
    given = dict(plain)
    packed = pack_weights(given)
    assert not given
    assert pack_weights(dict(packed)) == packed
    copies = {"lm_head.weight"} if packed["layers.0.o.weight"].is_mkldnn else set()  # where the CPU packs this dtype
    assert packed.keys() == plain.keys() | copies
    assert packed["embedding.weight"] is plain["embedding.weight"]
    weight, bias = plain["layers.0.o.weight"], plain["layers.0.o.bias"]
    with torch.inference_mode():
        for num_tokens in (1, 3, 70):
            x = torch.randn(num_tokens, 80, generator=generator).to(dtype)[:, :40]
            expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
            got = linear(x, packed["layers.0.o.weight"], bias).double()
            assert (got - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_demo_model_equals_transformers(demo_model_path: Path, demo_reference: Any) -> None:
    model = Loaded(load_config(demo_model_path), load_weights(demo_model_path, DType.FLOAT32), demo_reference)
    text = "The lighthouse keeper wrote down the weather every morning, and every evening he read it aloud. " * 10
    ids = int32(load_tokenizer(demo_model_path)(text)["input_ids"])
    assert len(ids) >= 180
    torch.testing.assert_close(model.dense(ids), model.expected(ids), rtol=0, atol=1e-3)


# ---- prefill, then extend -------------------------------------------------------------------------------------------

PAGE_TOKENS = 4


def extend(
    decoder: Decoder, ops: EagerOps, cache: CacheInputs[Tensor], tokens: list[Tensor], starts: list[int]
) -> Tensor:
    """Logits [B, V] after the new tokens of each sequence, which are appended to the cache."""
    batch, longest = len(tokens), max(map(len, tokens))
    ids, positions = torch.zeros(2, batch, longest, dtype=torch.int32)
    for b, (new, start) in enumerate(zip(tokens, starts, strict=True)):
        ids[b, : len(new)] = new
        positions[b] = start + int(cache.tail_lengths[b]) + torch.arange(longest)
    cache.new_lengths.copy_(int32(map(len, tokens)))
    last = int32(b * longest + len(new) - 1 for b, new in enumerate(tokens))
    with torch.inference_mode():
        out = decoder.extend(ops, ExtendInputs(ids.flatten(), positions.flatten(), last, cache, batch))
    shape = (decoder.model.num_layers, batch, longest, decoder.model.num_kv_heads, decoder.model.head_dim)
    assert out.k_new.shape == out.v_new.shape == shape
    stages.append(
        out.k_new, out.v_new, cache.arena, cache.block_table, cache.tail_lengths, cache.new_lengths, PAGE_TOKENS,
        cache.page_base,
    )  # fmt: skip
    cache.tail_lengths.add_(cache.new_lengths)
    return out.logits


def prefill(decoder: Decoder, ops: EagerOps, ids: Tensor, ratio: float = 0.0) -> PrefillOutputs[Tensor]:
    inputs = {"input_ids": ids, "positions": int32(range(len(ids)))}
    if decoder.hubkv is not None:
        plan = budget(decoder.model, decoder.hubkv, len(ids), ratio)
        inputs |= {
            "alpha": torch.tensor([decoder.hubkv.alpha(ratio)]), "window": int32([decoder.hubkv.window(len(ids))]),
            "rows_per_group": plan.rows_per_group,
        }  # fmt: skip
    with torch.inference_mode():
        return decoder.prefill(ops, PrefillInputs(**inputs))


def with_gate(model: Loaded) -> EagerOps:
    gate = engine_weights(random_gate(model.config, seed=3), DType.FLOAT32)
    return EagerOps({**model.weights, **gate}, DType.FLOAT32)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_dense_prefill_and_extend_equal_one_forward(architecture: str, tiny_model: Callable[..., Path]) -> None:
    """Two prompts of different lengths; a question of several tokens, then token by token."""
    model = load(tiny_model(architecture))
    decoder, ops = Decoder(model.config), model.ops()
    texts = [random_ids(model.config, 70, seed=5), random_ids(model.config, 33, seed=6)]
    starts = [50, 20]
    prompts = [prefill(decoder, ops, text[:start]) for text, start in zip(texts, starts, strict=True)]
    expected = [model.expected(text) for text in texts]
    for prompt, start, logits in zip(prompts, starts, expected, strict=True):
        torch.testing.assert_close(prompt.logits, logits[start - 1], rtol=0, atol=1e-4)
        every = torch.arange(start).int().expand(model.config.num_rows_per_token, -1)
        assert prompt.positions.view(-1, start).equal(every)
    cache = prompt_cache(model.config, prompts, 20, PAGE_TOKENS)
    new = [text[start:] for text, start in zip(texts, starts, strict=True)]
    done = [0, 0]
    for counts in ((7, 3), (1, 1), (1, 2), (1, 1)):
        tokens = [t[d : d + c] for t, d, c in zip(new, done, counts, strict=True)]
        logits = extend(decoder, ops, cache, tokens, starts)
        done = [d + c for d, c in zip(done, counts, strict=True)]
        for b in range(2):
            torch.testing.assert_close(logits[b], expected[b][starts[b] + done[b] - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("scope", Scope)
def test_prefill_keeps_the_best_rows_of_each_group(scope: Scope, tiny_model: Callable[..., Path]) -> None:
    """Each scope's rows, against refine and select of the whole in one piece; and rows come from the dense K and V."""
    model = load(tiny_model("qwen3"))
    config, hubkv = model.config, HubKVConfig(scope=scope)
    ops, ids = with_gate(model), random_ids(model.config, 90)
    dense = prefill(Decoder(config), ops, ids)
    scores: list[Tensor] = []
    original = ops.refine
    ops.refine = lambda s, *rest: (scores.append(s), original(s, *rest))[1]  # type: ignore[method-assign]
    ops.seconds.clear()
    out = prefill(Decoder(config, hubkv), ops, ids, 0.6)
    assert {"scorer", "refine", "select", "compact"} <= ops.seconds.keys()
    assert len(scores) == (1 if scope is Scope.MODEL else config.num_layers)

    plan = budget(config, hubkv, len(ids), 0.6)
    refined, _ = stages.refine(
        torch.cat(scores), torch.tensor([hubkv.alpha(0.6)]), int32([hubkv.window(len(ids))]), hubkv.nms_kernel,
        hubkv.penalty_factor, hubkv.head_weight_temperature, hubkv.min_head_weight, hubkv.max_head_weight,
        hubkv.sink_tokens,
    )  # fmt: skip
    positions, offsets = stages.select(refined, plan.num_groups, plan.rows_per_group)
    assert out.positions.equal(positions)
    assert out.head_offsets.equal(offsets)
    assert plan.num_rows == len(positions) < 0.45 * plan.num_pairs
    heads = np.repeat(np.arange(config.num_rows_per_token), np.diff(offsets))
    rows = torch.from_numpy(heads) * len(ids) + positions
    assert out.k_rows.equal(dense.k_rows[rows])
    assert out.v_rows.equal(dense.v_rows[rows])
    torch.testing.assert_close(out.logits, dense.logits)  # compression changes nothing before the first new token


@pytest.mark.parametrize("scope", [None, *Scope])
def test_rows_land_in_the_given_memory(scope: Scope | None, tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("llama"))
    decoder = Decoder(model.config, None if scope is None else HubKVConfig(scope=scope))
    ops, ids = with_gate(model), random_ids(model.config, 64)
    expected = prefill(decoder, ops, ids, 0.5)
    room = torch.full((2, len(expected.k_rows) + 5, model.config.head_dim), 7.0)
    for _ in range(2):  # the second prefill overwrites the first
        ops.rows_into = (room[0], room[1])
        out = prefill(decoder, ops, ids, 0.5)
        assert out.k_rows.data_ptr() == room[0].data_ptr()
        assert out.v_rows.data_ptr() == room[1].data_ptr()
        assert out.k_rows.equal(expected.k_rows)
        assert out.v_rows.equal(expected.v_rows)
    assert (room[:, len(expected.k_rows) :] == 7).all()


@pytest.mark.parametrize("scope", Scope)
def test_extend_after_compression_equals_masked_dense(scope: Scope, tiny_model: Callable[..., Path]) -> None:
    """Logits over the kept rows, against a forward whose later tokens do not see the evicted pairs, head by head."""
    model = load(tiny_model("llama"))
    config = model.config
    decoder, ops = Decoder(config, HubKVConfig(scope=scope)), with_gate(model)
    ids = random_ids(config, 110, seed=8)
    start = 96
    prompt = prefill(decoder, ops, ids[:start], 0.7)
    seen = torch.zeros(config.num_rows_per_token, len(ids), dtype=torch.bool)
    for head, (a, b) in enumerate(zip(prompt.head_offsets[:-1], prompt.head_offsets[1:], strict=True)):
        seen[head, prompt.positions[a:b].long()] = True
    seen[:, start:] = True
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril().repeat(config.num_rows_per_token, 1, 1)
    visible[:, start:] &= seen[:, None]
    visible = visible.view(config.num_layers, config.num_kv_heads, len(ids), len(ids))

    def masked(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        mask = visible[layer].repeat_interleave(config.group_size, 0)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(config.group_size, 0) for x in (k, v))
        weights = (q @ k.transpose(1, 2) * decoder.scale).masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)

    with torch.inference_mode():
        hidden = decoder.forward(ops, ids, int32(range(len(ids))), masked)
        expected = decoder.logits(ops, hidden)
    cache = prompt_cache(config, [prompt], len(ids) - start, PAGE_TOKENS)
    for first, last in ((start, start + 9), *((t, t + 1) for t in range(start + 9, len(ids)))):
        logits = extend(decoder, ops, cache, [ids[first:last]], [start])
        torch.testing.assert_close(logits[0], expected[last - 1], rtol=0, atol=1e-4)
    assert "attend" in ops.seconds


def test_scores_that_are_not_finite_are_counted(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("llama"))
    decoder, ops = Decoder(model.config, HubKVConfig()), with_gate(model)
    ops.weight("gate.1.b").fill_(float("nan"))
    with pytest.raises(ValueError, match=r"^scores: \d+ of 600 values are NaN or infinite"):
        prefill(decoder, ops, random_ids(model.config, 100), 0.5)


# ---- RoPE -----------------------------------------------------------------------------------------------------------


def test_llama3_frequencies() -> None:
    """Short waves stay, long ones are divided by the factor, between them it is smooth and monotone."""
    rope = RopeConfig(
        theta=500000.0, type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    scaled, attention_factor = rope_frequencies(rope, 128, 131072)
    plain, _ = rope_frequencies(RopeConfig(theta=500000.0), 128, 131072)
    waves = 2 * np.pi / plain
    assert attention_factor == 1.0
    np.testing.assert_allclose(scaled[waves < 2048], plain[waves < 2048], rtol=1e-6)
    np.testing.assert_allclose(scaled[waves > 8192], plain[waves > 8192] / 8, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()


def test_yarn_temperature() -> None:
    rope = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert rope_frequencies(rope, 128, 131072)[1] == pytest.approx(0.1 * np.log(4) + 1)
    assert rope_frequencies(rope.replace(attention_factor=0.5), 128, 131072)[1] == 0.5
    assert rope_frequencies(rope.replace(factor=1.0), 128, 131072)[1] == 1.0
