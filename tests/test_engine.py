# SPDX-License-Identifier: Apache-2.0
"""Engine directories: what a build writes is what a runtime reads, and nothing else is accepted."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hubkv_trt.config import PRESETS, Backend, DType, HubKVConfig, Scope, budget
from hubkv_trt.engine.build import build_engine
from hubkv_trt.engine.directory import load_engine, load_tensors, read_config, save_tensors
from hubkv_trt.engine.summary import cache_figures, summarize
from hubkv_trt.models.checkpoint import load_config, load_tokenizer, load_weights
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.scorers.fastkvzip import engine_weights, load_gate
from tiny_models import edit_json, snapshot

Make = Callable[..., Path]
FILES = ("weights.safetensors", "gate.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def engine(tiny_engine: Make, tmp_path: Path) -> Path:
    """A copy of an engine directory that a test may damage."""
    return Path(shutil.copytree(tiny_engine("llama"), tmp_path / "engine"))


# ---- what a build writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_round_trip(architecture: str, tiny_engine: Make, tiny_model: Make, tiny_gate: Make) -> None:
    path, source = tiny_engine(architecture), tiny_model(architecture)
    engine = load_engine(path)
    assert engine.config.model == load_config(source)
    assert engine.config.hubkv == HubKVConfig()
    assert engine.config.backend is Backend.EAGER
    assert engine.config.model_name == architecture
    assert set(engine.config.versions) >= {"hubkv-trt", "torch", "transformers", "python"}

    weights = load_weights(source, DType.FLOAT32)
    assert engine.weights.keys() == weights.keys()
    assert all(torch.equal(engine.weights[name], weights[name]) for name in weights)
    gate = engine_weights(load_gate(tiny_gate(architecture)), DType.FLOAT32)
    assert engine.gate.keys() == gate.keys()
    assert all(torch.equal(engine.gate[name], gate[name]) for name in gate)

    text = "a text <|im_end|> and more"
    assert engine.load_tokenizer().encode(text) == load_tokenizer(source).encode(text)
    messages = [{"role": "user", "content": "hello"}]
    assert engine.load_tokenizer().apply_chat_template(messages, tokenize=False) == load_tokenizer(
        source
    ).apply_chat_template(messages, tokenize=False)


def test_files_are_all_recorded_and_readable(tiny_engine: Make) -> None:
    path = tiny_engine("llama")
    recorded = read_config(path).files
    found = snapshot(path)
    del found["engine.json"]
    assert recorded == found
    assert set(FILES) <= set(recorded)
    umask = os.umask(0)
    os.umask(umask)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask for file in path.iterdir())


def test_dense_engine_has_no_gate(tiny_engine: Make) -> None:
    engine = load_engine(tiny_engine("llama", hubkv=None))
    assert engine.config.hubkv is None
    assert engine.gate == {}
    assert not (engine.path / "gate.safetensors").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype(dtype: str, tiny_engine: Make) -> None:
    engine = load_engine(tiny_engine("qwen3", dtype=dtype))
    assert engine.config.dtype.value == dtype
    assert {str(tensor.dtype) for tensor in engine.weights.values()} == {f"torch.{dtype}"}


def test_builds_are_repeatable(tiny_engine: Make, tiny_model: Make, tiny_gate: Make, tmp_path: Path) -> None:
    build_engine(
        tiny_model("llama"),
        tmp_path / "again",
        hubkv=HubKVConfig(),
        gate=tiny_gate("llama"),
        dtype="float32",
        max_input_len=512,
        max_batch_size=4,
    )
    assert snapshot(tmp_path / "again") == snapshot(tiny_engine("llama"))


def test_auto_means_eager_float32_and_all_positions(tiny_model: Make, tmp_path: Path) -> None:
    report = build_engine(tiny_model("llama"), tmp_path / "engine")
    assert report.config.max_input_len == report.config.model.max_position_embeddings == 1024
    if report.config.backend is Backend.EAGER:
        assert report.config.dtype is DType.FLOAT32
    assert report.backend_reason


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("scope", list(Scope))
def test_settings_survive(preset: str, scope: Scope, engine: Path) -> None:
    hubkv = HubKVConfig.from_preset(preset, ratio=0.6, scope=scope, sink_tokens=2)
    config = read_config(engine).replace(hubkv=hubkv)
    (engine / "engine.json").write_text(json.dumps(config.to_dict()))
    assert load_engine(engine).config.hubkv == hubkv


# ---- what is refused when an engine is opened ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "engine.json"])
def test_missing_file(name: str, engine: Path) -> None:
    (engine / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_engine(engine)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(name: str, engine: Path) -> None:
    file = engine / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=rf"{name}: sha256 .* truncated or changed.*build the engine again"):
        load_engine(engine)


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit(name: str, engine: Path) -> None:
    data = bytearray((engine / name).read_bytes())
    data[len(data) // 2] ^= 1
    (engine / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}: sha256"):
        load_engine(engine)


def test_truncated_weights_without_verifying(engine: Path) -> None:
    file = engine / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"weights\.safetensors: not a whole safetensors file"):
        load_engine(engine, verify=False)


def test_wrong_checksum(engine: Path) -> None:
    edit_json(engine / "engine.json", lambda d: d["files"].update({"tokenizer.json": "0" * 64}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: sha256 .* is not the recorded 000000000000"):
        load_engine(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(colour="red"), r"EngineConfig\.colour: unknown key"),
        (lambda d: d["model"].update(colour="red"), r"model.*colour: unknown key|ModelConfig\.colour: unknown key"),
        (lambda d: d["hubkv"].update(colour="red"), r"colour: unknown key"),
        (lambda d: d.pop("dtype"), r"EngineConfig\.dtype: missing"),
        (lambda d: d.update(dtype="int8"), r"dtype: 'int8' is not one of float32"),
        (lambda d: d.update(schema_version=2), r"schema_version: 2 is not 1.*build the engine again"),
        (lambda d: d.update(max_input_len=0), r"max_input_len: 0 is not"),
        (lambda d: d.update(max_input_len=9999), r"max_input_len: 9999 is not in 1\.\.1024"),
        (lambda d: d["hubkv"].update(ratio=1.0), r"ratio: 1\.0 is not a compression ratio"),
        (lambda d: d["hubkv"].update(nms_kernel=4), r"nms_kernel: 4 is not an odd number"),
        (lambda d: d["hubkv"].update(preset="mine"), r"engine\.json: preset: 'mine' is not one of"),
        (lambda d: d["model"]["rope"].update(low_freq_factor=None), r"rope\.low_freq_factor: None is not a number"),
        (lambda d: d["model"].update(num_layers=10**12), r"num_layers: 1000000000000 is not at most"),
        (lambda d: d["model"].update(rms_norm_eps=-1.0), r"rms_norm_eps: -1\.0 is not a number > 0"),
        (lambda d: d["hubkv"].update(nms_kernel="5"), r"nms_kernel: '5' is not an integer"),
        (lambda d: d["files"].update({"../x": "0"}), r"files: '\.\./x' is not a plain file name"),
        (lambda d: d["files"].pop("weights.safetensors"), r"files has no weights\.safetensors"),
        (lambda d: d["model"].update(num_layers=2), r"tensor layers\.2\..* unknown"),
        (lambda d: d["model"].update(num_layers=4), r"tensor layers\.3\..* missing"),
        (lambda d: d["model"].update(intermediate_size=97), r"gate_up\.weight|down\.weight"),
        (lambda d: d.update(dtype="bfloat16"), r"torch\.float32 .* does not fit engine\.json"),
    ],
)
def test_settings_that_are_refused(change: Callable[[dict[str, Any]], Any], message: str, engine: Path) -> None:
    edit_json(engine / "engine.json", change)
    with pytest.raises(ValueError, match=message) as error:
        load_engine(engine)
    assert "engine.json" in str(error.value) or "weights.safetensors" in str(error.value)


def test_gate_of_another_model_in_an_engine(engine: Path) -> None:
    file = engine / "gate.safetensors"
    gate = load_tensors(file)
    save_tensors(file, {name: t for name, t in gate.items() if not name.startswith("gate.2.")})
    with pytest.raises(ValueError, match=r"gate\.safetensors: tensor gate\.2\..*: missing"):
        load_engine(engine, verify=False)
    save_tensors(file, {**gate, "gate.1.qk_proj.bias": gate["gate.1.qk_proj.bias"][:-16]})
    with pytest.raises(ValueError, match=r"gate\.1\.qk_proj\.bias: torch\.float32 .* does not fit engine\.json"):
        load_engine(engine, verify=False)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nonsense", b"\xff\xfe\x00"])
def test_settings_that_are_no_json_object(text: str | bytes, engine: Path) -> None:
    (engine / "engine.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"engine\.json"):
        load_engine(engine)


def test_no_engine_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        load_engine(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no engine directory"):
        load_engine(tmp_path)


# ---- the summary -----------------------------------------------------------------------------------------------------


def test_summary_counts_as_the_ledger_does(tiny_engine: Make) -> None:
    config = load_engine(tiny_engine("llama")).config
    assert config.hubkv is not None
    rows = budget(config.model, config.hubkv, 512, 0.75).num_rows
    ledger = Ledger(config.model, config.dtype)
    figures = cache_figures(config, 100 << 20)
    assert figures["dense_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert figures["kept_bytes_per_token"] * 512 == ledger.segment_bytes(rows)
    assert figures["dense_sequences"] == (100 << 20) // (512 * 768)
    assert figures["kept_sequences"] == (100 << 20) // ledger.segment_bytes(rows)
    assert figures["protected_tokens"] == 4 + int(0.02 * 512)
    text = summarize(tiny_engine("llama"), config, cache_bytes=100 << 20)
    for part in (
        "r = 0.75",
        "model scope",
        "768 dense",
        f"{figures['kept_sequences']:,.0f} kept",
        "100.0 MiB",
        "weights.safetensors",
    ):
        assert part in text, part


def test_summary_names_changed_parameters(tiny_engine: Make) -> None:
    config = load_engine(tiny_engine("llama")).config
    changed = config.replace(hubkv=HubKVConfig(nms_kernel=7))
    assert "changed" not in summarize(Path("x"), config)
    assert "with nms_kernel changed" in summarize(Path("x"), changed)
