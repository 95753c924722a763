# SPDX-License-Identifier: Apache-2.0
"""Scorers: each gives what kvpress's press of the same method gives on the demo model, and engines are built so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from kvpress import (
    ExpectedAttentionPress,
    KnormPress,
    KVzipPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import DynamicCache

from hubkv_trt.cli import main
from hubkv_trt.config import Backend, DType, EngineConfig, HubKVConfig, Scope, Scorer, TensorRTConfig, budget
from hubkv_trt.engine.directory import Engine, load_engine, read_config
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.graph.ops import PrefillInputs
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.models.scoring import LayerScorer, LayerStates
from hubkv_trt.runtime.llm import LLM
from hubkv_trt.scorers.create import create_scorer
from hubkv_trt.scorers.kvzip import KVzipScorer, chat_frame, encode, repeat_prompts, teacher_scores
from hubkv_trt.scorers.snapkv import SnapKVScorer
from kept_rows import as_mask

NUM_TOKENS = 320
RATIO = 0.75
BY_LAYER = [scorer for scorer in Scorer if scorer not in (Scorer.FASTKVZIP, Scorer.KVZIP)]
PLAIN = HubKVConfig.from_preset("fastkvzip", scope=Scope.HEAD, sink_tokens=0, window_ratio=0.0)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def engine(demo_engine: Path) -> Engine:
    return load_engine(demo_engine, verify=False)


@pytest.fixture(scope="module")
def token_ids(demo_tokenizer: Any) -> list[int]:
    return list(demo_tokenizer(topics["exceptions"] + topics["for"])["input_ids"][:NUM_TOKENS])


@pytest.fixture(scope="module")
def presses() -> dict[Scorer, list[ScorerPress]]:
    """kvpress's press of each method, for each layer: its random press draws the same numbers for every one."""
    layers = range(30)
    return {
        Scorer.SNAPKV: [SnapKVPress(RATIO) for _ in layers],
        Scorer.EXPECTED_ATTENTION: [ExpectedAttentionPress(RATIO) for _ in layers],
        Scorer.KNORM: [KnormPress(RATIO) for _ in layers],
        Scorer.TOVA: [TOVAPress(RATIO) for _ in layers],
        Scorer.RANDOM: [RandomPress(RATIO, seed=layer) for layer in layers],
        Scorer.STREAMING_LLM: [StreamingLLMPress(RATIO) for _ in layers],
    }


@pytest.fixture(scope="module")
def theirs(
    demo_reference: Any, token_ids: list[int], presses: dict[Scorer, list[ScorerPress]]
) -> dict[Scorer, torch.Tensor]:
    """Scores float32 [L, Hkv, T] of the presses, from one pass of transformers' model, which they do not change."""
    found: dict[Scorer, list[torch.Tensor]] = {scorer: [] for scorer in presses}

    def hook(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        cached = kwargs["past_key_values"].layers[module.layer_idx]
        for scorer, by_layer in presses.items():
            press = by_layer[module.layer_idx]
            scores = press.score(module, kwargs["hidden_states"], cached.keys, cached.values, output[1], kwargs)
            found[scorer].append(scores[0].float())

    hooks = []
    for layer in demo_reference.model.layers:
        layer.self_attn.rotary_emb = demo_reference.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.inference_mode():
            demo_reference.model(input_ids=torch.tensor([token_ids]), past_key_values=DynamicCache())
    finally:
        for handle in hooks:
            handle.remove()
    return {scorer: torch.stack(scores) for scorer, scores in found.items()}


class Collector:
    """A scorer that keeps what it is shown."""

    def __init__(self) -> None:
        self.states: list[LayerStates[torch.Tensor]] = []

    def score(self, states: LayerStates[torch.Tensor]) -> torch.Tensor:
        self.states.append(states)
        return torch.zeros(states.keys.shape[1], states.keys.shape[0])


@pytest.fixture(scope="module")
def ops(engine: Engine) -> EagerOps:
    return EagerOps(engine.weights, DType.FLOAT32)


@pytest.fixture(scope="module")
def shown(engine: Engine, ops: EagerOps, token_ids: list[int]) -> tuple[Decoder, list[LayerStates[torch.Tensor]]]:
    """What the decoder shows a scorer in each layer."""
    decoder, collector = Decoder(engine.config.model, PLAIN), Collector()
    with torch.inference_mode():
        decoder.prefill(ops, inputs(decoder, token_ids), scorer=collector)
    return decoder, collector.states


def inputs(decoder: Decoder, token_ids: list[int]) -> PrefillInputs[torch.Tensor]:
    hubkv = decoder.hubkv
    assert hubkv is not None
    return PrefillInputs(
        input_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=torch.arange(len(token_ids), dtype=torch.int32),
        alpha=torch.tensor([hubkv.alpha(RATIO)]),
        window=torch.tensor([hubkv.window(len(token_ids))], dtype=torch.int32),
        rows_per_group=budget(decoder.model, hubkv, len(token_ids), RATIO).rows_per_group,
    )


def no_tokenizer() -> Any:
    raise AssertionError("a tokenizer was asked for")


def scores_of(scorer: Scorer, shown: tuple[Decoder, list[LayerStates[torch.Tensor]]]) -> torch.Tensor:
    made = create_scorer(scorer, shown[0], EagerOps({"none": torch.zeros(1)}, DType.FLOAT32), no_tokenizer)
    assert isinstance(made, LayerScorer)
    return torch.stack([made.score(states) for states in shown[1]])


# ---- against kvpress -------------------------------------------------------------------------------------------------

MAPS: dict[Scorer, Callable[[torch.Tensor], torch.Tensor]] = {
    Scorer.KNORM: lambda scores: 1 / (1 + scores.abs()),
    Scorer.EXPECTED_ATTENTION: lambda scores: 1 - 1 / (1 + scores.double()),
}
TOP = {
    Scorer.SNAPKV: slice(NUM_TOKENS - 64, NUM_TOKENS),
    Scorer.TOVA: slice(NUM_TOKENS - 1, NUM_TOKENS),
    Scorer.EXPECTED_ATTENTION: slice(0, 4),
}
"""Positions that the press puts above all others."""


@pytest.mark.parametrize("scorer", [s for s in BY_LAYER if s is not Scorer.STREAMING_LLM], ids=lambda s: s.value)
def test_scores_equal_kvpress(
    scorer: Scorer, shown: tuple[Decoder, list[LayerStates[torch.Tensor]]], theirs: dict[Scorer, torch.Tensor]
) -> None:
    ours, expected = scores_of(scorer, shown), theirs[scorer]
    assert ours.dtype is torch.float32
    assert ours.min() >= 0
    assert ours.max() <= 1
    expected = MAPS.get(scorer, lambda scores: scores)(expected).float()
    if scorer in TOP:
        top = TOP[scorer]
        assert (ours[..., top] == 1).all()
        expected[..., top] = 1
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=2e-3)


@pytest.mark.parametrize("scorer", BY_LAYER, ids=lambda s: s.value)
def test_kept_pairs_equal_kvpress(
    scorer: Scorer, ops: EagerOps, engine: Engine, token_ids: list[int], theirs: dict[Scorer, torch.Tensor]
) -> None:
    """The rows that a prefill with this scorer gives are those of the press, ties and rounding aside."""
    decoder = Decoder(engine.config.model, PLAIN.replace(scorer=scorer))
    with torch.inference_mode():
        made = create_scorer(scorer, decoder, ops, no_tokenizer)
        out = decoder.prefill(ops, inputs(decoder, token_ids), scorer=made)
    ours = as_mask(out.positions, out.head_offsets, decoder.model, NUM_TOKENS)
    scores = theirs[scorer]
    count = int(NUM_TOKENS * (1 - RATIO))
    best = scores.topk(count)
    expected = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, best.indices, True).numpy()
    border = best.values[..., -1:]
    near = ((scores - border).abs() <= 1e-3 * border.abs()).numpy()
    assert (ours.sum(-1) == count).all()
    differ = ours != expected
    assert not (differ & ~near).any()
    assert scorer is Scorer.STREAMING_LLM or differ.sum() <= 4e-3 * ours.sum()


def test_streaming_llm_keeps_sinks_and_the_latest(shown: tuple[Decoder, list[LayerStates[torch.Tensor]]]) -> None:
    scores = scores_of(Scorer.STREAMING_LLM, shown)
    for count in (10, 80, 300):
        kept = scores[7].topk(count).indices.sort().values
        assert kept.tolist() == 3 * [[*range(4), *range(NUM_TOKENS - count + 4, NUM_TOKENS)]]


def test_kept_pairs_of_kvzip_equal_kvpress(
    engine: Engine, demo_reference: Any, demo_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat prompt, served: model scope, sinks protected."""
    ids = [*encode(demo_tokenizer, chat_frame(demo_tokenizer)[0]), *encode(demo_tokenizer, topics["with"][:600])]
    demo_tokenizer.save_pretrained(tmp_path)  # KVzipPress loads the tokenizer from where the model came from
    monkeypatch.setattr(demo_reference.config, "_name_or_path", str(tmp_path))

    class Capture(KVzipPress):
        def compress_post(self, model: Any) -> None:
            super().compress_post(model)
            self.captured = self.score_val[:, 0].clone()

    press = Capture(compression_ratio=0.5)
    with torch.inference_mode(), press(demo_reference):
        demo_reference(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    expected = np.ones(press.captured.shape, bool)
    for layer, module in enumerate(demo_reference.model.layers):
        _, heads, tokens = module.self_attn.masked_key_indices
        expected[layer, heads, tokens] = False
        module.self_attn.masked_key_indices = None

    hubkv = HubKVConfig.from_preset("fastkvzip", scorer=Scorer.KVZIP, window_ratio=0.0)
    llm = LLM(dataclasses.replace(engine, config=engine.config.replace(hubkv=hubkv), gate={}), cache_bytes=256 << 20)
    with llm.compress(ids, ratio=0.5) as context:
        assert context.stats.seconds["scorer"] > 0.3 * context.stats.seconds["prefill"]  # its cost is shown
        ours = as_mask(context.segment.positions, context.segment.head_offsets, engine.config.model, len(ids))
    differ = ours != expected
    scores = press.captured.numpy()
    assert ours.sum() == expected.sum()
    assert differ.sum() <= 4e-3 * ours.sum()
    assert np.abs(scores - scores[expected].min())[differ].max(initial=0.0) < 1e-4


# ---- properties ------------------------------------------------------------------------------------------------------


def random_states(num_tokens: int, seed: int = 0) -> LayerStates[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (48,), "queries": (6, 8), "keys": (2, 8), "values": (2, 8)}
    return LayerStates(0, **{n: torch.randn(num_tokens, *s, generator=generator) for n, s in shapes.items()})


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64, 65])
@pytest.mark.parametrize("scorer", BY_LAYER, ids=lambda s: s.value)
def test_short_prompts_are_scored(scorer: Scorer, num_tokens: int, tiny_model: Make) -> None:
    from hubkv_trt.models.checkpoint import load_config

    decoder = Decoder(load_config(tiny_model("llama")).replace(head_dim=8))
    made = create_scorer(scorer, decoder, EagerOps({"none": torch.zeros(1)}, DType.FLOAT32), no_tokenizer)
    assert isinstance(made, LayerScorer)
    scores = made.score(random_states(num_tokens))
    assert scores.shape == (2, num_tokens)
    assert ((scores >= 0) & (scores <= 1)).all()


def test_snapkv_is_its_definition() -> None:
    """One head at a time with a dense softmax, in float64."""
    states = random_states(40)
    found = SnapKVScorer(0.5, window=7, kernel=3).score(states)
    for head in range(2):
        total = torch.zeros(33, dtype=torch.float64)
        for query_head in range(3 * head, 3 * head + 3):
            logits = 0.5 * states.queries[:, query_head].double() @ states.keys[:, head].double().T
            logits[torch.ones(40, 40, dtype=torch.bool).triu(1)] = -torch.inf
            seen = logits.softmax(-1)[33:, :33].mean(0)
            padded = torch.cat([seen.new_zeros(1), seen, seen.new_zeros(1)])
            total += (padded[:-2] + padded[1:-1] + padded[2:]) / 3
        torch.testing.assert_close(found[head, :33].double(), total / 3, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("scope", list(Scope), ids=lambda s: s.value)
@pytest.mark.parametrize("scorer", [Scorer.KVZIP, Scorer.SNAPKV], ids=lambda s: s.value)
def test_scopes(scorer: Scorer, scope: Scope, tiny_engine: Make) -> None:
    """Each scope keeps its budget, the best scores of each group of heads."""
    hubkv = HubKVConfig.from_preset("fastkvzip", scorer=scorer, scope=scope)
    engine = load_engine(tiny_engine("llama", hubkv=hubkv))
    model, ids = engine.config.model, [5 + (7 * i * i) % 200 for i in range(200)]
    llm = LLM(engine, cache_bytes=64 << 20)
    with llm.compress(ids, ratio=0.5) as context:
        kept = as_mask(context.segment.positions, context.segment.head_offsets, model, len(ids))
    expected = budget(model, hubkv, len(ids), 0.5)
    assert (kept.reshape(expected.num_groups, -1).sum(1) == expected.rows_per_group).all()
    assert kept[..., :4].all()
    assert kept[..., len(ids) - hubkv.window(len(ids)) :].all()
    if scorer is Scorer.KVZIP:
        ops, prompts = EagerOps(engine.weights, DType.FLOAT32), repeat_prompts(engine.load_tokenizer())
        scores = teacher_scores(Decoder(model), ops, ids, prompts).scores.clone()
        scores[..., :4], scores[..., len(ids) - hubkv.window(len(ids)) :] = 2.0, 2.0
        groups = scores.reshape(expected.num_groups, -1)
        mask = torch.from_numpy(kept.reshape(expected.num_groups, -1))
        lowest = torch.where(mask, groups, torch.inf).min(1).values
        assert (torch.where(mask, -torch.inf, groups).max(1).values <= lowest + 1e-5).all()


def test_kvzip_needs_room_for_its_second_pass(tiny_engine: Make) -> None:
    """The request is refused and the engine goes on."""
    hubkv = HubKVConfig(scorer=Scorer.KVZIP)
    llm = LLM(tiny_engine("llama", hubkv=hubkv, max_input_len=1000), cache_bytes=64 << 20)
    with pytest.raises(ValueError, match=r"context and repeat pass are .* the model has 1024: shorten"):
        llm.compress([5] * 600)
    with llm.compress([5, 6, 7] * 50) as context:
        assert context.stats.seconds["scorer"] > 0


def test_kvzip_leaves_the_chat_opening_out(tiny_engine: Make) -> None:
    engine = load_engine(tiny_engine("llama", hubkv=HubKVConfig(scorer=Scorer.KVZIP)))
    tokenizer = engine.load_tokenizer()
    opening = encode(tokenizer, chat_frame(tokenizer)[0])
    decoder, ops = Decoder(engine.config.model), EagerOps(engine.weights, DType.FLOAT32)
    scorer = KVzipScorer(decoder, ops, tokenizer)
    keys = values = [torch.randn(60, 2, decoder.model.head_dim, generator=torch.Generator().manual_seed(1))] * 3
    with torch.inference_mode():
        chat = torch.stack([*scorer.score_prompt(torch.tensor((opening + [9] * 60)[:60]), keys, values)])
        text = torch.stack([*scorer.score_prompt(torch.tensor([9] * 60), keys, values)])
        opened = [k[: len(opening)] for k in keys]
        alone = torch.stack([*scorer.score_prompt(torch.tensor(opening), opened, opened)])
    assert (chat[..., : len(opening)] == 0).all()
    assert (chat[..., len(opening) :] > 0).all()
    assert (text > 0).all()
    assert (alone > 0).all()


# ---- engines ---------------------------------------------------------------------------------------------------------


def test_engine_records_its_scorer(tiny_model: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Built by the command: no gate is asked for, none is written, and the engine answers."""
    directory = tmp_path / "engine"
    build = ["build", "--model", str(tiny_model("llama")), "--output", str(directory), "--backend", "eager"]
    assert main([*build, "--hubkv", "--scorer", "snapkv"]) == 0
    assert "snapkv" in capsys.readouterr().out
    config = read_config(directory)
    assert config.hubkv is not None
    assert config.hubkv.scorer is Scorer.SNAPKV
    assert not (directory / "gate.safetensors").exists()
    (output,) = LLM(directory).generate([[5] * 200], ratio=0.5)
    assert output.stats.seconds["scorer"] > 0

    data = json.loads((directory / "engine.json").read_text())
    data["hubkv"]["scorer"] = "snap"
    (directory / "engine.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"scorer: 'snap' is not one of fastkvzip, kvzip, snapkv, expected_attention"):
        read_config(directory)


def test_engines_of_before_have_the_gate() -> None:
    data = HubKVConfig().to_dict()
    del data["scorer"]
    assert HubKVConfig.from_dict(data) == HubKVConfig(scorer=Scorer.FASTKVZIP)


def test_what_does_not_go_together_is_refused(
    tiny_model: Make, tiny_gate: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", "--model", str(tiny_model("llama")), "--output", str(tmp_path / "engine"), "--backend"]
    for options, message in (
        (["eager", "--scorer", "knorm"], "--scorer: of use only together with --hubkv"),
        (["eager", "--hubkv", "--scorer", "knorm", "--gate", str(tiny_gate("llama"))], "read by the scorer knorm"),
        (["tensorrt", "--dry-run", "--hubkv", "--scorer", "knorm"], "take fastkvzip, or --backend eager"),
    ):
        assert main([*build, *options]) != 0
        assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_tensorrt_has_the_gate_only(engine: Engine) -> None:
    config = engine.config.replace(hubkv=HubKVConfig(scorer=Scorer.KVZIP))
    values: dict[str, Any] = {**config.to_dict(), "backend": Backend.TENSORRT, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"scorer: 'kvzip' is not in the graph of a TensorRT engine"):
        EngineConfig.from_dict({**values, "tensorrt": TensorRTConfig().to_dict()})


def test_observed_tokens_are_kept() -> None:
    """They have no score of their own, so the budget never falls below them."""
    hubkv = HubKVConfig(scorer=Scorer.SNAPKV)
    assert hubkv.window(100) == 64
    assert hubkv.window(10) == 10
    assert hubkv.window(10000) == 200
    assert HubKVConfig(scorer=Scorer.TOVA, window_ratio=0.0).window(100) == 1
