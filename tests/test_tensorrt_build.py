# SPDX-License-Identifier: Apache-2.0
"""Builds for TensorRT: bindings, profiles, limits and files of the plans, with the builder of TensorRT-RTX."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx_bindings as trt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.config import (
    Backend,
    DType,
    EngineConfig,
    HubKVConfig,
    ModelConfig,
    Scope,
    TensorRTConfig,
    WeightsPlace,
    budget,
)
from hubkv_trt.engine import build, plans
from hubkv_trt.engine.bindings import extend_bindings, prefill_bindings, weight_shapes
from hubkv_trt.engine.build_progress import BuildProgress
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.engine.estimate import device_weight_bytes, extend_bytes, prefill_bytes
from hubkv_trt.engine.network import extend_network, prefill_network
from hubkv_trt.engine.plan_options import PlanOptions
from hubkv_trt.engine.plans import OLDEST_VERSION, build_plans, check_device, check_version
from hubkv_trt.engine.profiles import add_profiles, check_sizes, extend_profiles, max_rows, prefill_profiles
from hubkv_trt.engine.summary import summarize
from hubkv_trt.graph.lowered import LoweredOps
from plugin import harness, network_nodes
from tiny_models import edit_json
from trt_eval.builder import Builder

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[1]

TINY = ModelConfig("llama", 256, 64, 96, 3, 4, 2, 16, 1024)
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072)
SCOPES = [*Scope, None]


def engine(model: ModelConfig = TINY, scope: Scope | None = Scope.MODEL, **changes: Any) -> EngineConfig:
    """A TensorRT engine; ``changes`` of EngineConfig and TensorRTConfig."""
    own = {name: value for name, value in changes.items() if name not in TensorRTConfig.__dataclass_fields__}
    limits = {name: value for name, value in changes.items() if name not in own}
    hubkv = None if scope is None else HubKVConfig(scope=scope)
    values = {"dtype": DType.BFLOAT16, "max_input_len": 512, "max_batch_size": 4, "hubkv": hubkv, **own}
    return EngineConfig(model, backend=Backend.TENSORRT, tensorrt=TensorRTConfig(**limits), **values)


# ---- bindings --------------------------------------------------------------------------------------------------------


def test_prefill_reads_and_gives_what_is_documented() -> None:
    table = prefill_bindings(engine(last_queries=8))
    listed = [(b.name, b.dtype, b.shape) for b in table.values() if not b.is_weight]
    assert listed == [
        ("input_ids", "int32", (-1,)),
        ("alpha", "float32", (1,)),
        ("window", "int32", (1,)),
        ("rows_per_group", "int64", (1,)),
        ("logits", "float32", (256,)),
        ("k_rows", "bfloat16", (-1, 16)),
        ("v_rows", "bfloat16", (-1, 16)),
        ("positions", "int32", (-1,)),
        ("head_offsets", "int64", (7,)),
        ("non_finite", "int64", (1,)),
        ("last_queries", "bfloat16", (3, -1, 4, 16)),
    ]
    assert [b.name for b in table.values() if b.is_shape] == ["rows_per_group"]
    dense = {name for name, b in prefill_bindings(engine(scope=None)).items() if not b.is_weight}
    rows = {f"{side}_rows.{layer}" for side in "kv" for layer in range(3)}
    assert dense == {"input_ids", "logits", "positions", "head_offsets", *rows}


def test_extend_reads_and_gives_what_is_documented() -> None:
    listed = [(b.name, b.dtype, b.shape) for b in extend_bindings(engine(new_queries=True)).values() if not b.is_weight]
    assert listed == [
        ("input_ids", "int32", (-1, -1)),
        ("positions", "int32", (-1, -1)),
        ("last_tokens", "int32", (-1,)),
        ("arena", "int64", (2,)),
        ("segments", "int64", (-1, 4)),
        ("block_table", "int32", (-1, -1)),
        ("tail_lengths", "int32", (-1,)),
        ("new_lengths", "int32", (-1,)),
        ("work", "int32", (3, -1, 4)),
        ("work_count", "int32", (3,)),
        ("logits", "float32", (-1, 256)),
        ("k_new", "bfloat16", (3, -1, -1, 2, 16)),
        ("v_new", "bfloat16", (3, -1, -1, 2, 16)),
        ("q_new", "bfloat16", (3, -1, -1, 4, 16)),
    ]


@pytest.mark.parametrize("plan", ["prefill", "extend"])
def test_documented_inputs_and_outputs_are_those_that_there_are(plan: str) -> None:
    table_of: Any = {"prefill": prefill_bindings, "extend": extend_bindings}[plan]
    (table,) = re.findall(rf"\| {plan}\.plan \|.*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "docs" / "tensorrt.md").read_text())
    columns = [row.split("|")[1] for row in table.splitlines()]
    outputs = {name for cell in columns if "out:" in cell for name in re.findall("`(.*?)`", cell)}
    inputs = {name for cell in columns if "out:" not in cell for name in re.findall("`(.*?)`", cell)}
    changes = {"last_queries": 2, "new_queries": True}
    found = [b for scope in SCOPES for b in table_of(engine(scope=scope, **changes)).values() if not b.is_weight]
    assert inputs == {b.name for b in found if b.is_input}
    by_layer = {b.name for b in found if "." in b.name and b.name != "k_rows.0"}
    assert outputs == {b.name for b in found if not b.is_input} - by_layer


def test_both_plans_share_their_weights(tiny_engine: Make) -> None:
    """Weight inputs are the tensors of the files, alike in both plans; prefill alone reads the gate."""
    files = load_engine(tiny_engine("qwen2", dtype="bfloat16"))
    config = files.config.replace(backend=Backend.TENSORRT, tensorrt=TensorRTConfig(max_extend_len=64))
    prefill, extend = (
        {name: (b.dtype, b.shape) for name, b in table.items() if b.is_weight}
        for table in (prefill_bindings(config), extend_bindings(config))
    )
    stored = {n: (str(t.dtype)[6:], tuple(t.shape)) for n, t in {**files.weights, **files.gate}.items()}
    assert prefill == stored
    assert extend == {name: stored[name] for name in files.weights}
    embedded = config.replace(tensorrt=TensorRTConfig(weights=WeightsPlace.EMBEDDED))
    assert not any(b.is_weight for b in prefill_bindings(embedded).values())
    total = sum(t.numel() * t.element_size() for t in (*files.weights.values(), *files.gate.values()))
    assert device_weight_bytes(config) == total
    assert device_weight_bytes(embedded) > total


@pytest.mark.parametrize("weights", list(WeightsPlace))
@pytest.mark.parametrize("scope", SCOPES)
def test_networks_have_exactly_the_bindings(scope: Scope | None, weights: WeightsPlace) -> None:
    config = engine(scope=scope, weights=weights, last_queries=3, new_queries=True)
    tensors = {n: torch.zeros(shape, dtype=getattr(torch, t)) for n, t, shape in weight_shapes(config, 16)}
    builder = Builder()
    for network_of in (prefill_network, extend_network):
        made = network_of(trt, builder.builder, config, tensors, LoweredOps)
        network = made.definition
        found = {}
        for tensors_of, count in ((network.get_input, network.num_inputs), (network.get_output, network.num_outputs)):
            for tensor in map(tensors_of, range(count)):
                found[tensor.name] = (tensor.dtype, tuple(tensor.shape), tensor.is_network_input)
        assert found == {n: (getattr(trt, b.dtype), b.shape, b.is_input) for n, b in made.bindings.items()}
        names = [network.get_layer(i).name for i in range(network.num_layers)]
        assert len(set(names)) == len(names)
        assert {"layers.0", "layers.1", "layers.2"} <= {".".join(name.split(".")[:2]) for name in names}
        kinds = Counter(network.get_layer(i).type.name for i in range(network.num_layers))
        assert kinds["SHAPE"] <= 3  # the number of tokens is asked for once, not in every layer
    assert builder.messages == []


# ---- limits ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 400),
    ratio=st.sampled_from([0.0, 0.3, 0.75, 0.99]),
    scope=st.sampled_from(Scope),
    window_tokens=st.sampled_from([0, 5, 90]),
    long_context=st.sampled_from([1, 50, 200, 399, 400]),
)
def test_no_prompt_keeps_more_than_the_profile_allows(
    tokens: int, ratio: float, scope: Scope, window_tokens: int, long_context: int
) -> None:
    """Whatever the window's rule, which changes at ``long_context`` tokens."""
    hubkv = HubKVConfig(scope=scope, window_ratio=0.3, window_tokens=window_tokens, long_context=long_context)
    config = engine(max_input_len=tokens, min_ratio=ratio).replace(hubkv=hubkv)
    kept = [budget(TINY, hubkv, t, ratio) for t in range(1, tokens + 1)]
    assert max_rows(config) == max(k.num_rows for k in kept)
    low, usual, high = prefill_profiles(config)[0]["K/S"]
    assert low == 1
    assert low <= usual <= high == max(k.rows_per_group for k in kept)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("tokens", "batch", "new"), [(1, 1, 1), (512, 4, 64), (1024, 1, 1024)])
def test_profiles_are_ranges_that_the_builder_takes(scope: Scope | None, tokens: int, batch: int, new: int) -> None:
    config = engine(scope=scope, max_input_len=tokens, max_batch_size=batch, max_extend_len=new)
    builder = Builder()
    builder_config = builder.builder.create_builder_config()
    for table, profiles in (
        (prefill_bindings(config), prefill_profiles(config)),
        (extend_bindings(config), extend_profiles(config)),
    ):
        for ranges in profiles:
            assert all(1 <= low <= usual <= high for low, usual, high in ranges.values())
            dynamic = {d for b in table.values() if b.is_input for d, n in zip(b.dims, b.shape, strict=True) if n < 0}
            assert dynamic <= set(ranges)
        add_profiles(builder.builder, builder_config, table, profiles)
    assert builder_config.num_optimization_profiles == 3
    assert builder.messages == []


def test_sizes_that_tensorrt_cannot_hold_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"max_input_len: 131072 makes k_rows .*--max-input-len 65535.*--min-ratio 0\.51"
    ):
        check_sizes(engine(LLAMA_8B, max_input_len=131072))
    check_sizes(engine(LLAMA_8B, max_input_len=65535))
    check_sizes(engine(LLAMA_8B, max_input_len=131072, min_ratio=0.51))
    check_sizes(engine(LLAMA_8B, Scope.LAYER, max_input_len=131072))
    check_sizes(engine(LLAMA_8B, None, max_input_len=131072))
    with pytest.raises(ValueError, match=r"max_extend_len: 40000 makes k_new .*--max-extend-len \d+ at most.*batch"):
        check_sizes(engine(LLAMA_8B, max_extend_len=40000, max_batch_size=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": DType.FLOAT32}, "dtype: 'float32' is not .*--backend eager"),
        ({"max_extend_len": 1025}, "max_extend_len: 1025 is not at most 1024"),
        ({"max_extend_len": 0}, "max_extend_len: 0 is not an integer >= 1"),
        ({"last_queries": 513}, "last_queries: 513 is not at most max_input_len = 512"),
        ({"last_queries": -1}, "last_queries: -1"),
        ({"min_ratio": 1.0}, "min_ratio: 1.0"),
        ({"weights": "shared"}, "weights: 'shared' is not a WeightsPlace"),
        ({"min_ratio": 0.5, "scope": None}, "min_ratio: 0.5 is not .*without HubKV"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**changes)


def test_only_a_tensorrt_engine_has_plans() -> None:
    with pytest.raises(ValueError, match=r"tensorrt: .* is not null where the backend is eager"):
        engine().replace(backend=Backend.EAGER)
    with pytest.raises(ValueError, match="backend: 'eager' has no plans"):
        prefill_bindings(engine().replace(backend=Backend.EAGER, tensorrt=None))


def test_settings_survive_json() -> None:
    config = engine(weights=WeightsPlace.EMBEDDED, version="10.14.1", compute_capability="9.0", last_queries=2)
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    data = config.to_dict()
    data["tensorrt"]["surprise"] = 1
    with pytest.raises(ValueError, match=r"TensorRTConfig\.surprise: unknown key"):
        EngineConfig.from_dict(data)
    with pytest.raises(ValueError, match="tensorrt: None is not given"):
        EngineConfig.from_dict({**config.to_dict(), "tensorrt": None})


def test_gpu_and_version_must_have_what_the_networks_need() -> None:
    for dtype, capability in ((DType.BFLOAT16, (8, 0)), (DType.BFLOAT16, (12, 0)), (DType.FLOAT16, (7, 5))):
        check_device(dtype, capability)
    with pytest.raises(ValueError, match=r"dtype: bfloat16 needs compute capability 8\.0 .* has 7\.5: --dtype float16"):
        check_device(DType.BFLOAT16, (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 7\.0"):
        check_device(DType.FLOAT16, (7, 0))
    for version in ("10.14.1", "10.15.0.29", "11.4.0.106"):
        check_version(version)
    for version in ("10.13.3", "9.3.0"):
        with pytest.raises(ValueError, match=rf"tensorrt: '{version}' is not version 10\.14 or later"):
            check_version(version)


def test_estimates_grow_with_what_they_depend_on() -> None:
    by_layer, by_model = (engine(LLAMA_8B, scope, max_input_len=65535) for scope in (Scope.LAYER, Scope.MODEL))
    waiting = 31 * (LLAMA_8B.kv_bytes_per_token(DType.BFLOAT16) // 32 + 8 * LLAMA_8B.num_kv_heads)
    assert prefill_bytes(by_model, 1000) - prefill_bytes(by_layer, 1000) == 1000 * waiting
    assert prefill_bytes(by_layer, 2000) == 2 * prefill_bytes(by_layer, 1000)
    assert extend_bytes(by_model, 8, 1) == 8 * extend_bytes(by_model, 1, 1)


# ---- the build -------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings and errors of TensorRT so far, but for the one about the driver that is not there."""
    caplog.set_level(logging.WARNING, "hubkv_trt.tensorrt")
    return lambda: [r.getMessage() for r in caplog.records if "cudaError 35" not in r.getMessage()]


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
@pytest.mark.parametrize("weights", list(WeightsPlace))
def test_plans_are_built(weights: WeightsPlace, tmp_path: Path, log: Callable[[], list[str]]) -> None:
    config = engine(weights=weights, max_extend_len=16)
    tensors = {n: torch.rand(shape).to(getattr(torch, t)) for n, t, shape in weight_shapes(config, 16)}
    options = PlanOptions(workspace_bytes=1 << 26, timing_cache=tmp_path / "cache" / "timings")
    build_plans(trt, config, tensors, tmp_path, options, ops=LoweredOps, target="8.9")
    assert {p.name for p in tmp_path.iterdir()} == {"prefill.plan", "extend.plan", "cache"}
    assert (tmp_path / "prefill.plan").read_bytes()[:4] == (tmp_path / "extend.plan").read_bytes()[:4]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["timings"]
    # Without a driver TensorRT-RTX does not read a timing cache back, and says so.
    assert [line for line in log() if "timing cache" not in line] == []
    content = (tmp_path / "extend.plan").read_bytes()
    inside = tensors["layers.1.down.weight"].view(torch.uint8).numpy().tobytes() in content
    assert inside == (weights is WeightsPlace.EMBEDDED)


def test_a_build_that_tensorrt_refuses_says_why(tmp_path: Path) -> None:
    class Broken(LoweredOps):
        def first(self, x: Any) -> Any:
            one = self.layers.slice(x, (5, 0), (1, x.shape[1]), "outside")
            return self.layers.reshape(one, x.shape[1])

    with pytest.raises(
        RuntimeError, match=r"prefill\.plan: TensorRT 1\.7.* could not build it: .*outside|TensorRT refused"
    ):
        build_plans(trt, engine(max_extend_len=16), {}, tmp_path, ops=Broken, target="8.9")
    assert list(tmp_path.iterdir()) == []


def test_profiles_that_contradict_themselves_are_refused() -> None:
    config, builder = engine(), Builder()
    settings = builder.builder.create_builder_config()
    with pytest.raises(RuntimeError, match="refused the optimization profile"):
        add_profiles(
            builder.builder, settings, extend_bindings(config), [{**extend_profiles(config)[0], "B": (4, 2, 1)}]
        )


@pytest.mark.parametrize("value", [0, -1, 1000, 1.5e9, True])
def test_workspace_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="workspace_bytes"):
        PlanOptions(workspace_bytes=value)


def test_timing_cache_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timing_cache: .* is not a file"):
        PlanOptions(timing_cache=tmp_path)


def test_interruption_ends_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while TensorRT runs, in the middle of a call back into Python."""
    seen: list[str] = []
    start = BuildProgress.start

    def interrupted(self: BuildProgress, phase: str, steps: int) -> None:
        start(self, phase, steps)
        seen.append(phase)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BuildProgress, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            build_plans(trt, engine(max_extend_len=16), {}, tmp_path, ops=LoweredOps, target="8.9")
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_and_taken_away(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with BuildProgress("extend.plan", show=True) as progress:
        progress.start("Timing graph nodes", 4)
        bar = progress._bars["Timing graph nodes"]
        assert [progress.step("Timing graph nodes", i) for i in range(3)] == [True] * 3
        assert bar.n == 3
        assert bar.total == 4
        progress.interrupted = True
        assert progress.step("Timing graph nodes", 3) is False
    assert bar.disable  # closed, although its phase never ended


def test_plugin_nodes_are_those_of_the_library(tmp_path: Path) -> None:
    """Every node of real networks, made by the real creators in TensorRT's registry."""
    nodes = []
    builder = Builder()
    hubkv = {"penalty_factor": 1, "head_weight_temperature": 0, "max_head_weight": 2}  # whole numbers are numbers too
    for scope in Scope:
        config = engine().replace(hubkv=HubKVConfig(scope=scope, **hubkv))
        for network_of in (prefill_network, extend_network):
            made = network_of(trt, builder.builder, config, {}, LoweredOps)
            for call in made.ops.calls:
                fields = {name: [value.dtype.name, value.item()] for name, value in call.fields.items()}
                nodes.append([call.name, fields, [x.name for x in call.inputs], [x.name for x in call.shape_inputs]])
    names = [node[0] for node in nodes]
    assert {name: names.count(name) for name in names} == {
        "HubKVRefine": 7, "HubKVSelect": 7, "HubKVCompact": 7, "HubKVAttend": 9,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, network_nodes.__file__, str(harness.host_only())],
        input=json.dumps(nodes), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["nodes"] == [[True, inputs, shapes] for _, _, inputs, shapes in nodes]
    assert "HubKVSelect refused its fields {'num_groups': 0}" in answer["refused"]


def test_every_call_is_one_that_the_oldest_version_has() -> None:
    """Against the headers of TensorRT 10.14; what newer versions add is asked for by ``has`` before it is called."""
    spec = importlib.util.find_spec("kernel_lens")
    assert spec is not None
    (package,) = spec.submodule_search_locations or ()
    names = ("NvInfer.h", "NvInferRuntime.h", "NvInferVersion.h")
    headers = "".join((Path(package) / "include" / "tensorrt" / name).read_text() for name in names)
    version = tuple(int(n) for n in re.findall(r"#define TRT_(?:MAJOR|MINOR)_ENTERPRISE (\d+)", headers))
    assert version == OLDEST_VERSION
    source = "".join(
        (ROOT / "python" / "hubkv_trt" / file).read_text()
        for file in ("graph/tensorrt.py", "graph/network_layers.py", "engine/network.py", "engine/profiles.py")
    )
    calls = set(re.findall(r"(?:network|profile|builder_config)\.((?:add|set|mark)_\w+)\(", source))
    newer = set(re.findall(r'self\.has\("(\w+)"\)', source))
    assert newer == {"add_attention_v2", "add_rotary_embedding"}
    assert len(calls) > 15
    methods = set(re.findall(r"\b(\w+?)(?:v2)?\(", headers.lower()))
    missing = {name for name in calls if name.replace("_", "") not in methods}
    assert missing == {*newer, "set_shape", "set_shape_input"}  # set_shape*: setDimensions, setShapeValues in C++


# ---- the engine directory --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_model: Make, tiny_gate: Make) -> Path:
    """An engine of the backend tensorrt, by ``build_engine``, with plans by TensorRT-RTX in place of TensorRT."""

    def build_with_rtx(config: EngineConfig, weights: Any, directory: Path, options: Any, progress: bool) -> None:
        build_plans(trt, config, weights, directory, options, progress=progress, ops=LoweredOps, target="8.9")

    def machine(limits: TensorRTConfig, dtype: DType) -> TensorRTConfig:
        return limits.replace(version=trt.__version__, compute_capability="8.9", plugin_library="/lib/plugin.so")

    directory = tmp_path_factory.mktemp("engines") / "tensorrt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_backend", lambda asked: (Backend.TENSORRT, "as asked"))
        patch.setattr(build, "_build_plans", build_with_rtx)
        patch.setattr(plans, "for_this_machine", machine)
        build.build_engine(
            tiny_model("llama"),
            directory,
            hubkv=HubKVConfig(),
            gate=tiny_gate("llama"),
            max_input_len=512,
            max_batch_size=4,
            tensorrt=TensorRTConfig(max_extend_len=32),
        )
    return directory


def test_an_engine_directory_holds_its_plans(built: Path) -> None:
    config = load_engine(built).config
    assert config.dtype is DType.BFLOAT16
    made = {"version": trt.__version__, "compute_capability": "8.9", "plugin_library": "/lib/plugin.so"}
    assert config.tensorrt == TensorRTConfig(max_extend_len=32, **made)
    assert {"prefill.plan", "extend.plan", "weights.safetensors", "gate.safetensors"} <= set(config.files)
    text = summarize(built, config)
    assert f"TensorRT {trt.__version__}, compute capability 8.9" in text
    assert "shared weights, up to 32 new tokens" in text


@pytest.mark.parametrize("name", ["prefill.plan", "extend.plan"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "sha256 .* was truncated or changed"),
        (lambda file: file.unlink(), "missing; build the engine again"),
        (
            lambda file: edit_json(file.parent / "engine.json", lambda data: data["files"].pop(file.name)),
            "files has no .*build the engine again",
        ),
        (
            lambda file: edit_json(file.parent / "engine.json", lambda data: data.update(schema_version=0)),
            "schema_version: 0 is not 1",
        ),
    ],
)
def test_plans_that_do_not_match_engine_json(
    name: str, damage: Callable[[Path], Any], message: str, built: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "engine"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy / name)
    with pytest.raises(ValueError, match=message):
        load_engine(copy)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_real_plans_of_a_tiny_model(tiny_model: Make, tiny_gate: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt")
    report = build.build_engine(
        tiny_model("llama"),
        tmp_path / "engine",
        hubkv=HubKVConfig(),
        gate=tiny_gate("llama"),
        max_input_len=512,
        backend="tensorrt",
        plans=PlanOptions(timing_cache=tmp_path / "timings"),
    )
    assert load_engine(report.path).config.tensorrt is not None
    assert (tmp_path / "timings").stat().st_size > 0
