# SPDX-License-Identifier: Apache-2.0
"""Engine directories: what a build writes is what a runtime reads, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hubkv_trt.config import PRESETS, Backend, DType, HubKVConfig, Scope, budget
from hubkv_trt.engine.backend import choose_backend
from hubkv_trt.engine.build import build_engine
from hubkv_trt.engine.directory import engine_writer, load_engine, read_config
from hubkv_trt.engine.summary import cache_figures, summarize
from hubkv_trt.models.checkpoint import load_config, load_tokenizer, load_weights
from hubkv_trt.runtime.cache import Ledger
from hubkv_trt.scorers.fastkvzip import engine_weights, load_gate
from tiny_models import save_tiny_model

Make = Callable[..., Path]
FILES = ("weights.safetensors", "gate.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def engine(tiny_engine: Make, tmp_path: Path) -> Path:
    """A copy of an engine directory that a test may damage."""
    return Path(shutil.copytree(tiny_engine("llama"), tmp_path / "engine"))


def snapshot(directory: Path) -> dict[str, str]:
    """Every file below a directory and its sha256."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


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


# ---- what is refused when an engine is built: nothing is left behind -------------------------------------------------


def damage(directory: Path, name: str) -> None:
    """Breaks a checkpoint in the way that the name says."""
    weights, config = directory / "model.safetensors", directory / "config.json"
    if name == "weights missing":
        weights.unlink()
    elif name == "weights truncated":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif name == "weights corrupt":
        weights.write_bytes(b"\xff" * 16 + weights.read_bytes()[16:])
    elif name == "config missing":
        config.unlink()
    elif name == "config corrupt":
        config.write_text(config.read_text()[:-30])
    elif name == "tokenizer missing":
        for file in directory.glob("tokenizer*"):
            file.unlink()
    elif name == "architecture":
        edit_json(config, lambda d: d.update(model_type="mamba", architectures=["MambaForCausalLM"]))
    elif name == "sliding window":
        edit_json(
            config,
            lambda d: d.update(
                model_type="qwen2",
                architectures=["Qwen2ForCausalLM"],
                use_sliding_window=True,
                sliding_window=32,
                max_window_layers=0,
                layer_types=["sliding_attention"] * 3,
            ),
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights missing", "safetensors"),
        ("weights truncated", r"model\.safetensors"),
        ("weights corrupt", r"model\.safetensors"),
        ("config missing", r"config\.json"),
        ("config corrupt", r"config\.json"),
        ("tokenizer missing", "tokenizer"),
        ("architecture", "mamba"),
        ("sliding window", "sliding"),
    ],
)
def test_bad_model_leaves_nothing(name: str, message: str, tiny_model: Make, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    damage(model, name)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_engine(model, tmp_path / "out" / "engine")
    assert snapshot(tmp_path) == before
    assert not any((tmp_path / "out").glob("*"))


def test_truncated_gguf(demo_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with open(demo_model_path, "rb") as stream:
        file.write_bytes(stream.read(20 << 20))
    with pytest.raises(ValueError, match=r"model\.gguf"):
        build_engine(file, tmp_path / "engine")
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not one of auto, float32"),
        ({"max_input_len": 1025}, r"max_input_len: 1025 is not in 1\.\.1024"),
        ({"max_input_len": 0}, "max_input_len: 0"),
        ({"max_batch_size": 0}, "max_batch_size: 0"),
        ({"backend": "cuda"}, "backend: 'cuda' is not one of auto, eager, tensorrt"),
        ({"hubkv": None, "gate": "some.pt"}, "gate: .* without HubKV"),
    ],
)
def test_bad_options_leave_nothing(options: dict[str, Any], message: str, tiny_model: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(tiny_model("llama"), tmp_path / "engine", **options)
    assert not any(tmp_path.iterdir())


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a directory nor a file"):
        build_engine(tmp_path / "model", tmp_path / "engine")


def test_model_without_a_gate_says_how_to_get_one(tiny_model: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--gate FILE.*train_gate\.py.*docs/gates\.md"):
        build_engine(tiny_model("llama"), tmp_path / "engine", hubkv=HubKVConfig())
    assert not any(tmp_path.iterdir())


def test_gate_of_another_model(tiny_model: Make, tiny_gate: Make, tmp_path: Path) -> None:
    other = save_tiny_model("llama", tmp_path / "other", hidden_size=96)
    with pytest.raises(ValueError, match="gate of another model"):
        build_engine(other, tmp_path / "engine", hubkv=HubKVConfig(), gate=tiny_gate("llama"))
    assert os.listdir(tmp_path) == ["other"]


def test_gate_that_is_not_there(tiny_model: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gate"):
        build_engine(tiny_model("llama"), tmp_path / "engine", hubkv=HubKVConfig(), gate=tmp_path / "gate.pt")


def test_tensorrt_where_it_is_missing_says_what_is() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)backend: tensorrt cannot be built.*Missing.*libhubkv_plugin\.so.*--backend eager"
    ):
        choose_backend("tensorrt")
    backend, reason = choose_backend("auto")
    assert backend is Backend.EAGER
    assert "tensorrt" in reason


# ---- whole or not at all ---------------------------------------------------------------------------------------------


def test_an_engine_is_replaced_only_with_force(engine: Path, tiny_model: Make) -> None:
    before = snapshot(engine.parent)
    with pytest.raises(ValueError, match="--force replaces it"):
        build_engine(tiny_model("llama"), engine)
    assert snapshot(engine.parent) == before
    build_engine(tiny_model("qwen2"), engine, force=True)
    assert load_engine(engine).config.model.architecture == "qwen2"
    assert os.listdir(engine.parent) == ["engine"]


@pytest.mark.parametrize("force", [False, True])
def test_other_files_are_never_replaced(force: bool, tiny_model: Make, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for output in (tmp_path, tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "engine"):
        with pytest.raises(ValueError, match="output"):
            build_engine(tiny_model("llama"), output, force=force)
    assert snapshot(tmp_path).keys() == {"thesis.txt"}


def test_an_empty_directory_is_used(tiny_model: Make, tmp_path: Path) -> None:
    build_engine(tiny_model("llama"), tmp_path)
    assert load_engine(tmp_path).path == tmp_path


def fail_half_way(output: Path, error: type[BaseException]) -> None:
    with engine_writer(output, force=True) as directory:
        (directory / "weights.safetensors").write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_a_failure_while_writing_leaves_the_old_engine(error: type[BaseException], engine: Path) -> None:
    before = snapshot(engine.parent)
    for output in (engine, engine.parent / "new"):
        with pytest.raises(error):
            fail_half_way(output, error)
        assert snapshot(engine.parent) == before
        assert os.listdir(engine.parent) == ["engine"]


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="GB are free on that disk"), engine_writer(tmp_path / "e", need_bytes=1 << 60):
        raise AssertionError("must not start")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_build_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The process is stopped while the files are being written."""
    model = save_tiny_model("llama", tmp_path / "model", hidden_size=512, intermediate_size=8192, num_hidden_layers=6)
    command = [
        sys.executable,
        "-m",
        "hubkv_trt.cli",
        "build",
        "--model",
        str(model),
        "--output",
        str(tmp_path / "engine"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob(".engine.partial-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == ["model"]


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
