# SPDX-License-Identifier: Apache-2.0
"""Models that cannot load say why, and leave the server and the other models alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hubkv_trt.engine.directory import ENGINE_FILE, WEIGHTS_FILE
from hubkv_trt.serving.client import HubKVClient
from hubkv_trt.serving.fields import INPUTS, OUTPUTS
from hubkv_trt.serving.repository import ModelParameters, read_parameters, write_model
from hubkv_trt.serving.triton_server import TritonServer
from triton_site import ENVIRONMENT, ROOT, SECONDS, TEMPLATE, TritonSite


def remove(engine: Path) -> None:
    shutil.rmtree(engine)


def tamper(engine: Path) -> None:
    file = engine / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def age(engine: Path) -> None:
    data = json.loads((engine / ENGINE_FILE).read_text())
    data["schema_version"] += 1
    (engine / ENGINE_FILE).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "break_it", "reason"),
    [
        ("missing", remove, "no such directory"),
        ("tampered", tamper, "build the engine again"),
        ("other_version", age, "schema_version"),
    ],
)
def test_broken_engines(triton: TritonSite, name: str, break_it: Callable[[Path], None], reason: str) -> None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    folder = triton.add_model(name)
    break_it(folder / "engine")
    before = len(triton.log())
    with InferenceServerClient(triton.server.grpc) as client:
        with pytest.raises(InferenceServerException, match=f"load failed for model '{name}'.*{reason}"):
            client.load_model(name, client_timeout=SECONDS)
        assert not client.is_model_ready(name, client_timeout=SECONDS)
        assert client.is_server_ready(client_timeout=SECONDS)
    printed = triton.log()[before:]
    assert "engine: " in printed
    assert reason in printed
    with HubKVClient(triton.server.grpc, timeout=SECONDS) as good:
        assert good.generate("a", max_tokens=2).final


# ---- repositories ----------------------------------------------------------------------------------------------------


def test_the_script_writes_what_the_model_reads(triton: TritonSite, tmp_path: Path) -> None:
    """Engine by absolute path, and every parameter; what is there is replaced on request only."""
    script = [sys.executable, str(ROOT / "build_scripts" / "make_triton_repo.py"), "--engine", str(triton.engine),
              "--output", str(tmp_path), "--name", "other", "--unary", "--cache-bytes", "32MiB", "--tail-tokens", "96",
              "--max-waiting", "3", "--prefill-tokens-per-step", "64", "--overcommit", "0.5"]  # fmt: skip
    subprocess.run(script, check=True, timeout=SECONDS)
    text = (tmp_path / "other" / "config.pbtxt").read_text()
    assert 'name: "other"' in text
    assert "decoupled: false" in text
    assert (tmp_path / "other" / "1" / "model.py").read_bytes() == (TEMPLATE / "1" / "model.py").read_bytes()
    for field in (*INPUTS, *OUTPUTS):
        assert text.count(f'name: "{field.name}"') == 1
    for key, value in {"engine": str(triton.engine), "cache_bytes": "33554432", "overcommit": "0.5"}.items():
        assert f'key: "{key}" value: {{ string_value: "{value}" }}' in text
    parameters = ModelParameters(str(triton.engine))
    with pytest.raises(ValueError, match=r"exists; use --force"):
        write_model(TEMPLATE, tmp_path, parameters, name="other")
    write_model(TEMPLATE, tmp_path, parameters, name="other", force=True)
    assert "decoupled: true" in (tmp_path / "other" / "config.pbtxt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_parameters(tmp_path: Path) -> None:
    def read(**values: str) -> ModelParameters:
        return read_parameters({"parameters": {k: {"string_value": v} for k, v in values.items()}}, tmp_path)

    assert read(engine="engine", max_waiting="5") == ModelParameters(str(tmp_path / "engine"), max_waiting=5)
    assert read(engine="/e", cache_bytes="7").engine == "/e"
    given = read(engine="/e", max_waiting="5", overcommit="0.25")
    assert given.service == {"max_waiting": 5, "overcommit": 0.25}
    for values, message in (
        ({}, "engine is missing"),
        ({"engine": "e", "cache_byte": "1"}, "cache_byte"),
        ({"engine": "e", "cache_bytes": "1e9"}, "cache_bytes: '1e9' is not an integer"),
        ({"engine": "e", "tail_tokens": "0"}, "tail_tokens: 0 is not an integer greater than 0"),
        ({"engine": "e", "overcommit": "-1"}, "overcommit: '-1' is not a fraction"),
        ({"engine": "e", "overcommit": "1.5"}, r"overcommit: 1\.5 is not a fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**values)


def test_refused_repositories(tmp_path: Path, tiny_engine: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        write_model(TEMPLATE, tmp_path / "r", ModelParameters(str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="name: 'a/b'"):
        write_model(TEMPLATE, tmp_path / "r", ModelParameters(str(tiny_engine("llama"))), name="a/b")
    assert not (tmp_path / "r").exists()


# ---- the server's environment ----------------------------------------------------------------------------------------


def test_environments_without_triton(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no virtual environment there"), TritonServer(tmp_path, tmp_path):
        pass
    with (
        pytest.raises(ValueError, match="nvidia-pytriton is not installed"),
        TritonServer(Path(sys.prefix), tmp_path),
    ):
        pass


def test_ports_that_are_taken(triton: TritonSite, tmp_path: Path) -> None:
    port = int(triton.server.grpc.rpartition(":")[2])
    with pytest.raises(ValueError, match="not all are free"), TritonServer(ENVIRONMENT, tmp_path, grpc_port=port):
        pass
