# SPDX-License-Identifier: Apache-2.0
"""Builds: what is refused, and that an engine directory appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.config import Backend, HubKVConfig
from hubkv_trt.engine.backend import choose_backend
from hubkv_trt.engine.build import build_engine
from hubkv_trt.engine.directory import engine_writer, load_engine
from tiny_models import edit_json, save_tiny_model, snapshot

Make = Callable[..., Path]


@pytest.fixture
def engine(tiny_engine: Make, tmp_path: Path) -> Path:
    """A copy of an engine directory that a test may replace."""
    return Path(shutil.copytree(tiny_engine("llama"), tmp_path / "engine"))


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
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
    )
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
