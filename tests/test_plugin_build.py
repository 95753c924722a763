# SPDX-License-Identifier: Apache-2.0
"""How CMake decides whether the plugins are built, and with which headers."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from simt.library import ROOT


def configure(folder: Path, *options: str) -> tuple[int, str]:
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), "-DHUBKV_CUDA=OFF", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_headers_are_those_of_the_root_that_is_named(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("kernel_lens")
    assert spec is not None and spec.submodule_search_locations
    root = tmp_path / "TensorRT"
    root.mkdir()
    (root / "include").symlink_to(Path(spec.submodule_search_locations[0]) / "include" / "tensorrt")
    status, said = configure(tmp_path / "build", "-DHUBKV_PLUGIN=ON", f"-DTENSORRT_ROOT={root}")
    assert status == 0, said
    assert f"TensorRT plugins (HUBKV_PLUGIN=ON): TRUE {root}/include" in said


def test_without_headers_the_error_says_what_to_do(tmp_path: Path) -> None:
    nowhere = f"-DCMAKE_FIND_ROOT_PATH={tmp_path}", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY"
    status, said = configure(tmp_path, "-DHUBKV_PLUGIN=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON", *nowhere)
    assert status != 0
    assert "HUBKV_PLUGIN=ON: no headers of TensorRT ('HUBKV_TENSORRT_HEADERS-NOTFOUND')" in said
    assert "Set TENSORRT_ROOT, or pip install --no-deps kernel-lens" in said


def test_automatic_follows_the_cuda_kernels(tmp_path: Path) -> None:
    status, said = configure(tmp_path)
    assert status == 0
    assert "TensorRT plugins (HUBKV_PLUGIN=AUTO): FALSE" in said
    status, said = configure(tmp_path, "-DHUBKV_PLUGIN=perhaps")
    assert status != 0
    assert "HUBKV_PLUGIN: 'perhaps' is not AUTO, ON or OFF" in said
