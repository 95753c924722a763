# SPDX-License-Identifier: Apache-2.0
"""With the refinement off, the kept KV pairs are those of kvpress's FastKVzipPress with the same gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate, FastKVzipPress

from hubkv_trt.config import DEFAULT_PRESET, HubKVConfig, Scope, budget
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.graph.ops import PrefillInputs
from hubkv_trt.integrations.kvpress import HubKVPress
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.runtime.llm import LLM
from hubkv_trt.scorers.fastkvzip import find_gate, load_gate
from kept_rows import as_mask

NUM_TOKENS = 400
TIE = 1e-4
"""Scores closer to the border than this may fall on either side: both models round differently through 30 layers."""


@pytest.fixture(scope="module")
def engine(demo_engine: Path) -> Engine:
    return load_engine(demo_engine, verify=False)


@pytest.fixture(scope="module")
def token_ids(demo_tokenizer: Any) -> list[int]:
    """Real text: Python's own help on its statements."""
    text = topics["assignment"] + topics["for"] + topics["exceptions"]
    return list(demo_tokenizer(text)["input_ids"][:NUM_TOKENS])


@pytest.fixture(scope="module")
def gates(demo_model_path: Path, engine: Engine) -> list[FastKVzipGate]:
    """kvpress's modules with the weights of the demo model's gate."""
    model = engine.config.model
    file = find_gate(str(demo_model_path))
    assert file is not None
    gate = load_gate(file, model)
    modules = []
    for layer in range(model.num_layers):
        state = {n.partition(".")[2]: t.float() for n, t in gate.tensors.items() if n.startswith(f"{layer}.")}
        state["k_base"], state["b"] = state["k_base"].unsqueeze(1), state["b"].unsqueeze(1)
        module = FastKVzipGate(
            layer, model.hidden_size, model.num_kv_heads, model.group_size, torch.float32, sink=gate.num_sinks
        )
        module.load_state_dict(state)
        modules.append(module.requires_grad_(False))
    return modules


def press_keeps(
    model: Any,
    gates: list[FastKVzipGate],
    token_ids: list[int],
    ratio: float,
    scope: Scope,
    refinement: HubKVConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What kvpress does not mask, bool [L, Hkv, T], and its scores float32 [L, Hkv, T]; empty with a refinement."""
    press = FastKVzipPress(compression_ratio=ratio, layerwise=scope is Scope.LAYER)
    press.gates = gates
    with torch.inference_mode(), press(model) if refinement is None else HubKVPress(press, refinement)(model):
        model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
    scores = np.empty(0) if press.score_val is None else torch.as_tensor(press.score_val).squeeze(1).numpy()
    kept = np.ones((len(gates), gates[0].nhead, len(token_ids)), bool)
    for layer, module in enumerate(model.model.layers):
        _, heads, tokens = module.self_attn.masked_key_indices
        kept[layer, heads, tokens] = False
        module.self_attn.masked_key_indices = None
    return kept, scores


Keeps = Callable[[HubKVConfig, float], np.ndarray]


@pytest.fixture(scope="module")
def keeps(engine: Engine, token_ids: list[int]) -> Keeps:
    """``keeps(hubkv, ratio)``: what a compressed context of the text holds, bool [L, Hkv, T]; made once for each."""
    made: dict[tuple[HubKVConfig, float], np.ndarray] = {}

    def make(hubkv: HubKVConfig, ratio: float) -> np.ndarray:
        if (hubkv, ratio) not in made:
            config = engine.config.replace(hubkv=hubkv)
            llm = LLM(dataclasses.replace(engine, config=config), cache_bytes=256 << 20)
            with llm.compress(token_ids, ratio=ratio) as context:
                segment = context.segment
                made[hubkv, ratio] = as_mask(
                    segment.positions, segment.head_offsets, engine.config.model, len(token_ids)
                )
        return made[hubkv, ratio]

    return make


@pytest.mark.parametrize(
    ("ratio", "scope"),
    [(0.75, Scope.MODEL), (0.9, Scope.MODEL), (0.75, Scope.LAYER)],
    ids=lambda v: getattr(v, "value", v),
)
def test_kept_pairs_equal_kvpress(
    demo_reference: Any,
    gates: list[FastKVzipGate],
    engine: Engine,
    token_ids: list[int],
    keeps: Keeps,
    ratio: float,
    scope: Scope,
) -> None:
    hubkv = HubKVConfig.from_preset("fastkvzip", scope=scope)
    # Below the cap: here kvpress would cut into the protected tokens, and we keep more.
    assert budget(engine.config.model, hubkv, NUM_TOKENS, ratio).effective_ratio == pytest.approx(ratio, abs=1e-3)
    theirs, scores = press_keeps(demo_reference, gates, token_ids, ratio, scope)
    ours = keeps(hubkv, ratio)
    assert ours.sum() == theirs.sum()
    groups = scores.reshape(1 if scope is Scope.MODEL else len(scores), -1)
    border = np.where(theirs.reshape(groups.shape), groups, np.inf).min(axis=1)  # the lowest score kept in each group
    distance = np.abs(scores - border.reshape((-1, 1, 1)))
    differ = ours != theirs
    assert differ.sum() <= 2e-3 * ours.sum()
    assert distance[differ].max(initial=0.0) < TIE


def test_preset_of_the_paper_keeps_other_pairs(keeps: Keeps) -> None:
    """The comparison above can fail: the refinement changes what is kept."""
    plain = keeps(HubKVConfig.from_preset("fastkvzip"), 0.75)
    refined = keeps(HubKVConfig.from_preset(DEFAULT_PRESET), 0.75)
    assert plain.sum() == refined.sum()
    assert (plain != refined).sum() > 0.01 * plain.sum()


def test_alpha_0_keeps_what_no_refinement_keeps(engine: Engine, token_ids: list[int], keeps: Keeps) -> None:
    """alpha = 0 leaves every score as it is, whatever the other parameters are."""
    hubkv = HubKVConfig.from_preset(DEFAULT_PRESET)
    rows = budget(engine.config.model, hubkv, len(token_ids), 0.75).rows_per_group
    ops = EagerOps({**engine.weights, **engine.gate}, engine.config.dtype)
    with torch.inference_mode():
        out = Decoder(engine.config.model, hubkv).prefill(
            ops,
            PrefillInputs(
                input_ids=torch.tensor(token_ids, dtype=torch.int32),
                positions=torch.arange(len(token_ids), dtype=torch.int32),
                alpha=torch.zeros(1),
                window=torch.tensor([hubkv.window(len(token_ids))], dtype=torch.int32),
                rows_per_group=rows,
            ),
        )
    ours = as_mask(out.positions, out.head_offsets, engine.config.model, len(token_ids))
    plain = keeps(HubKVConfig.from_preset("fastkvzip"), 0.75)
    assert np.array_equal(ours, plain)


@pytest.mark.parametrize("preset", [DEFAULT_PRESET, "prominence_k5_s2"])
def test_refinement_inside_kvpress(
    preset: str, demo_reference: Any, gates: list[FastKVzipGate], token_ids: list[int], keeps: Keeps
) -> None:
    """``HubKVPress`` around FastKVzipPress: off it is the press, on it keeps what we keep."""
    theirs, _ = press_keeps(demo_reference, gates, token_ids, 0.75, Scope.MODEL)
    off, _ = press_keeps(demo_reference, gates, token_ids, 0.75, Scope.MODEL, HubKVConfig.from_preset("fastkvzip"))
    assert np.array_equal(off, theirs)
    hubkv = HubKVConfig.from_preset(preset)
    on, _ = press_keeps(demo_reference, gates, token_ids, 0.75, Scope.MODEL, hubkv)
    ours = keeps(hubkv, 0.75)
    assert on.sum() == ours.sum()
    assert (on != ours).sum() <= 2e-3 * ours.sum()
    assert (on != theirs).sum() > 0.01 * theirs.sum()
