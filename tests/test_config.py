# SPDX-License-Identifier: Apache-2.0
"""Settings: presets, budgets, protection, and strict conversion from and to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.config import (
    DEFAULT_PRESET,
    PRESETS,
    Backend,
    Budgets,
    Config,
    DType,
    EngineConfig,
    HardKVConfig,
    HubKVConfig,
    ModelConfig,
    RopeConfig,
    Scope,
    budget,
    check_ratio,
)

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    eos_token_ids=(1, 2),
    rope=RopeConfig(
        theta=5e5,
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
ENGINE = EngineConfig(
    model=MODEL,
    dtype=DType.BFLOAT16,
    max_input_len=4096,
    max_batch_size=8,
    hubkv=HubKVConfig(ratio=0.5),
    backend=Backend.EAGER,
    model_name="m",
    versions={"torch": "2"},
    files={"weights.safetensors": "00ff"},
)


# ---- HubKV -----------------------------------------------------------------------------------------------------------

PAPER = {  # name -> k, gamma, tau, weights, p
    "fastkvzip": (1, 1.0, 0.0, None, 0.0),
    "fastkvzip_nms": (5, 0.5, 0.0, None, 0.0),
    "fastkvzip_head_nms_k5_p0.5_mild": (5, 0.5, 0.5, (0.8, 1.2), 0.0),
    "fastkvzip_head_nms_k5_p0.5_tiny": (5, 0.5, 0.25, (0.9, 1.1), 0.0),
    "fastkvzip_head_nms_gated_k5_p0.5_mild": (5, 0.5, 0.5, (0.8, 1.2), 2.0),
    "fastkvzip_head_nms_gated_k5_p0.5_tiny": (5, 0.5, 0.25, (0.9, 1.1), 2.0),
    "fastkvzip_head_nms_gated_k7_p0.2_mild": (7, 0.2, 0.5, (0.8, 1.2), 2.0),
}


def test_presets_are_the_papers() -> None:
    assert set(PRESETS) == {*PAPER, "prominence_k5_s2"}
    for name, (kernel, gamma, tau, weights, power) in PAPER.items():
        c = HubKVConfig.from_preset(name)
        assert (c.preset, c.nms_kernel, c.penalty_factor, c.head_weight_temperature, c.gate_power) == (
            name,
            kernel,
            gamma,
            tau,
            power,
        )
        if weights is not None:
            assert (c.min_head_weight, c.max_head_weight) == weights


def test_default_is_the_final_method() -> None:
    assert DEFAULT_PRESET == "fastkvzip_head_nms_gated_k5_p0.5_mild"
    assert HubKVConfig() == HubKVConfig.from_preset() == HubKVConfig.from_preset(DEFAULT_PRESET)


def test_preset_with_changes() -> None:
    c = HubKVConfig.from_preset("fastkvzip_nms", nms_kernel=9, ratio=0.25)
    assert (c.preset, c.nms_kernel, c.penalty_factor, c.ratio) == ("fastkvzip_nms", 9, 0.5, 0.25)
    with pytest.raises(ValueError, match="preset: 'unknown' is not one of fastkvzip, "):
        HubKVConfig.from_preset("unknown")


def test_alpha() -> None:
    gated, open_ = HubKVConfig(), HubKVConfig.from_preset("fastkvzip_nms")
    assert gated.alpha(0.5) == 0.25
    assert gated.alpha(0.9) == 0.9**2
    assert open_.alpha(0.001) == 1.0
    assert gated.alpha(0.0) == open_.alpha(0.0) == 0.0  # nothing removed, nothing refined, whatever p is


@pytest.mark.parametrize(
    ("num_tokens", "window"),
    [
        (1, 0),
        (49, 0),
        (50, 1),
        (99, 1),
        (100, 2),
        (31_999, 639),
        (32_000, 4096),
        (10**6, 4096),
    ],
)
def test_window(num_tokens: int, window: int) -> None:
    c = HubKVConfig()
    assert c.window(num_tokens) == window
    assert c.num_protected(num_tokens) == min(num_tokens, 4 + window)


def test_window_is_no_longer_than_the_prompt() -> None:
    c = HubKVConfig(long_context=1, window_tokens=4096)
    assert c.window(100) == 100
    assert c.num_protected(100) == 100
    assert c.num_protected(4098) == 4098
    assert HubKVConfig(sink_tokens=10, window_ratio=0.0).num_protected(3) == 3


@pytest.mark.parametrize(
    ("scope", "groups", "heads"),
    [
        (Scope.MODEL, 1, 12),
        (Scope.LAYER, 4, 3),
        (Scope.HEAD, 12, 1),
    ],
)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.75, 0.9])
def test_budget(scope: Scope, groups: int, heads: int, ratio: float) -> None:
    b = budget(MODEL, HubKVConfig(scope=scope), 1000, ratio)
    assert b.num_groups == groups
    assert b.rows_per_group == heads * 1000 - math.floor(ratio * (heads * 1000))
    assert b.num_rows == groups * b.rows_per_group
    assert b.num_pairs == 12_000
    assert b.effective_ratio == pytest.approx(ratio, abs=1e-9)


def test_budget_grows_to_what_is_protected() -> None:
    b = budget(MODEL, HubKVConfig(), 100, 0.99)
    assert b.num_rows == 12 * (4 + 2)
    assert b.effective_ratio == pytest.approx(0.94)
    assert budget(MODEL, HubKVConfig(), 3, 0.9).num_rows == 12 * 3


@settings(max_examples=200, deadline=None)
@given(
    scope=st.sampled_from(list(Scope)),
    num_tokens=st.integers(1, 200_000),
    ratio=st.floats(0, 1, exclude_max=True),
    sinks=st.integers(0, 100),
)
def test_budget_properties(scope: Scope, num_tokens: int, ratio: float, sinks: int) -> None:
    c = HubKVConfig(scope=scope, sink_tokens=sinks)
    b = budget(MODEL, c, num_tokens, ratio)
    heads = 12 // b.num_groups
    assert 1 <= b.rows_per_group <= heads * num_tokens
    assert b.rows_per_group >= heads * c.num_protected(num_tokens)
    if b.rows_per_group > heads * c.num_protected(num_tokens):
        # No more is removed than was asked for, and less than one pair too few.
        removed = heads * num_tokens - b.rows_per_group
        asked = Fraction(ratio) * heads * num_tokens
        assert removed <= asked * (1 + Fraction(1, 2**50))
        assert removed > asked * (1 - Fraction(1, 2**50)) - 1
    assert 0 <= b.effective_ratio < 1
    if ratio == 0:
        assert b.effective_ratio == 0


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), float("inf"), -float("inf"), True, "0.5", None])
def test_wrong_ratios(ratio: object) -> None:
    for function in (check_ratio, lambda r: HubKVConfig(ratio=r), lambda r: budget(MODEL, HubKVConfig(), 10, r)):
        with pytest.raises(ValueError, match=r"ratio: .* is not a compression ratio in \[0, 1\)"):
            function(ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_budget_of_no_tokens(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_tokens: {num_tokens}"):
        budget(MODEL, HubKVConfig(), num_tokens, 0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nms_kernel", 4),
        ("nms_kernel", 0),
        ("nms_kernel", -3),
        ("penalty_factor", 1.01),
        ("penalty_factor", -0.1),
        ("penalty_factor", float("nan")),
        ("head_weight_temperature", -1.0),
        ("min_head_weight", 0.0),
        ("min_head_weight", 1.3),
        ("gate_power", -1.0),
        ("sink_tokens", -1),
        ("window_ratio", 1.1),
        ("window_ratio", -0.1),
        ("window_tokens", -1),
        ("long_context", 0),
    ],
)
def test_wrong_hubkv_values(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: {value}"):
        HubKVConfig(**{field: value})
    with pytest.raises(ValueError, match=field):
        HubKVConfig().replace(**{field: value})


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        ENGINE,
        ENGINE.replace(hubkv=None),
        MODEL,
        RopeConfig(),
        HubKVConfig.from_preset("fastkvzip", scope=Scope.HEAD),
        HardKVConfig(),
        HardKVConfig.from_preset("held_out", layer_budget=300, condensed_rows=4),
    ],
)
def test_round_trip(config: Config) -> None:
    text = json.dumps(config.to_dict())
    back = type(config).from_dict(json.loads(text))
    assert back == config
    assert json.dumps(back.to_dict()) == text


def test_from_dict_fills_in_defaults() -> None:
    assert HubKVConfig.from_dict({}) == HubKVConfig()
    assert HubKVConfig.from_dict({"scope": "layer", "ratio": 0}).ratio == 0.0
    assert RopeConfig.from_dict({"theta": 10_000}) == RopeConfig()


@pytest.mark.parametrize(
    ("cls", "data", "message"),
    [
        (
            HubKVConfig,
            {"ratios": 0.5},
            r"HubKVConfig.ratios: unknown key \(known: centroids, evicted, evicted_mass, gate_power, ",
        ),
        (HubKVConfig, {"ratio": "0.5"}, "HubKVConfig.ratio: '0.5' is not a number"),
        (HubKVConfig, {"ratio": True}, "HubKVConfig.ratio: True is not a number"),
        (HubKVConfig, {"ratio": None}, "HubKVConfig.ratio: None is not a number"),
        (HubKVConfig, {"gate_power": float("inf")}, "HubKVConfig.gate_power: inf is not a finite number"),
        (HubKVConfig, {"gate_power": float("nan")}, "HubKVConfig.gate_power: nan is not a finite number"),
        (HubKVConfig, {"gate_power": 10**400}, "HubKVConfig.gate_power: 10+ is not a finite number"),
        (HubKVConfig, {"nms_kernel": 5.0}, "HubKVConfig.nms_kernel: 5.0 is not an integer"),
        (HubKVConfig, {"nms_kernel": True}, "HubKVConfig.nms_kernel: True is not an integer"),
        (HubKVConfig, {"scope": "token"}, "HubKVConfig.scope: 'token' is not one of model, layer, head"),
        (HubKVConfig, {"scope": ["model"]}, "HubKVConfig.scope"),
        (HubKVConfig, {"preset": 3}, "HubKVConfig.preset: 3 is not a text"),
        (HubKVConfig, {"nms_kernel": 6}, "nms_kernel: 6 is not an odd number"),
        (HubKVConfig, [], r"HubKVConfig: \[\] is not an object"),
        (RopeConfig, {"type": "dynamic"}, "rope.type: 'dynamic' is not one of default, linear, llama3, yarn"),
        (RopeConfig, {"theta": 0.0}, "rope.theta: 0.0"),
        (RopeConfig, {"factor": 0.5}, "rope.factor: 0.5"),
        (RopeConfig, {"truncate": 1}, "RopeConfig.truncate: 1 is not true or false"),
        (
            RopeConfig,
            {"original_max_position_embeddings": "8192"},
            "RopeConfig.original_max_position_embeddings: '8192'",
        ),
        (ModelConfig, {"architecture": "llama"}, "ModelConfig.vocab_size: missing"),
        (EngineConfig, {"model": 3}, "ModelConfig: 3 is not an object"),
    ],
)
def test_from_dict_refuses(cls: type[Config], data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls.from_dict(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"p": 0}, r"p: 0\.0 is not a number in \(0, 1\]"),
        ({"p": 1.5}, "p: 1.5"),
        ({"query_window": 0}, "query_window: 0 is not an integer in 1..256"),
        ({"query_window": 257, "interval": 300, "recent": 300}, "query_window: 257"),
        ({"query_window": 1, "budgets": "held_out"}, "query_window: 1 is not at least 2 with budgets = held_out"),
        ({"interval": 15}, "interval: 15 is not an integer >= 16"),
        ({"interval": 16}, "interval: 16 is not at least query_window = 32"),
        ({"recent": 31}, "recent: 31 is not at least query_window = 32"),
        ({"layer_budget": 0}, "layer_budget: 0"),
        ({"layer_budget": 7}, "layer_budget: 7 is not an integer >= 8 or null"),
        ({"upper_budget": 2.5}, "upper_budget: 2.5"),
        ({"sink_tokens": -1}, "sink_tokens: -1"),
        ({"min_rows": -1}, "min_rows: -1"),
        ({"importance": "h2o"}, "importance: 'h2o' is not one of vanilla, snapkv, rkv"),
        ({"budgets": "equal"}, "budgets: 'equal' is not one of mass, held_out"),
        ({"pool_kernel": 4}, "pool_kernel: 4"),
        ({"importance_share": 2}, "importance_share: 2"),
        ({"fill": 1}, "fill: 1 is not true or false"),
        ({"fill": True, "layer_budget": None}, "fill: True is not possible without a layer_budget"),
        ({"condensed_rows": 257}, "condensed_rows: 257"),
        ({"condensed_rows": 4, "layer_budget": None}, "condensed_rows: 4 is not possible without a layer_budget"),
        ({"condensed_rows": 9, "condense": "summarize"}, "condensed_rows: 9 is not at most 8"),
        ({"condense": "drop"}, "condense: .* is not merge or summarize"),
        ({"layer_budgets": 9}, "HardKVConfig.layer_budgets: unknown key"),
    ],
)
def test_hard_kv_refuses(data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HardKVConfig.from_dict(data)


def test_hard_kv_presets() -> None:
    assert HardKVConfig.from_preset() == HardKVConfig()
    shared = HardKVConfig.from_preset("held_out", layer_budget=512)
    assert (shared.budgets, shared.fill, shared.layer_budget, shared.upper_budget) == (
        Budgets.HELD_OUT,
        True,
        512,
        None,
    )
    with pytest.raises(ValueError, match="preset: 'best' is not one of default, held_out"):
        HardKVConfig.from_preset("best")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model", "num_layers"), 0, "model.num_layers: 0"),
        (("model", "num_heads"), 7, "model.num_heads: 7 is not a multiple of num_kv_heads = 3"),
        (("model", "num_heads"), 51, "num_heads / num_kv_heads: 17 is not at most 16"),
        (("model", "head_dim"), 60, "model.head_dim: 60 is not a multiple of 8"),
        (("model", "head_dim"), 264, "model.head_dim: 264"),
        (("model", "eos_token_ids"), 2, "ModelConfig.eos_token_ids: 2 is not a list"),
        (("model", "eos_token_ids"), [1, "2"], r"ModelConfig.eos_token_ids\[1\]: '2' is not an integer"),
        (("model", "experts"), 8, "ModelConfig.experts: unknown key"),
        (("model", "rope", "kind"), "x", "RopeConfig.kind: unknown key"),
        (("dtype",), "float8", "EngineConfig.dtype: 'float8' is not one of float32, float16, bfloat16"),
        (("max_input_len",), 8193, r"max_input_len: 8193 is not in 1..8192"),
        (("max_input_len",), 0, "max_input_len: 0"),
        (("max_batch_size",), 0, "max_batch_size: 0"),
        (("schema_version",), 2, "schema_version: 2 is not 1"),
        (("backend",), "onnx", "EngineConfig.backend: 'onnx' is not one of eager, tensorrt"),
        (("versions",), ["torch"], r"EngineConfig.versions: \['torch'\] is not an object"),
        (("files", "weights.safetensors"), 5, "EngineConfig.files.weights.safetensors: 5 is not a text"),
        (("hubkv", "ratio"), 1.0, "ratio: 1.0"),
    ],
)
def test_engine_refuses(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(json.dumps(ENGINE.to_dict()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_dict(data)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HubKVConfig().ratio = 0.5  # type: ignore[misc]


def test_bytes() -> None:
    assert (DType.FLOAT32.itemsize, DType.FLOAT16.itemsize, DType.BFLOAT16.itemsize) == (4, 2, 2)
    assert MODEL.group_size == 2
    assert MODEL.num_rows_per_token == 12
    assert MODEL.kv_bytes_per_token(DType.BFLOAT16) == 2 * 12 * 64 * 2
