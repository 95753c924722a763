# SPDX-License-Identifier: Apache-2.0
"""The code of docs/plugin.md: run, as far as TensorRT runs without a GPU, or else compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugin import harness
from simt.library import BUILD, ROOT

PAGE = (ROOT / "docs" / "plugin.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder with build/libhubkv_plugin.so."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "libhubkv_plugin.so").symlink_to(harness.host_only())
    return tmp_path


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run([str(x) for x in command], cwd=folder, check=False,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The registry is TensorRT's. Its lean library has no builder: the network here takes nodes down, as one would.
PRELUDE = """
import sys
import tensorrt_lean_bindings
import tensorrt_lean_libs
sys.modules["tensorrt"] = tensorrt_lean_bindings


class Layer:
    def __init__(self, *node):
        self.node = node

    def get_output(self, index):
        return self, index


class Network:
    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        assert isinstance(plugin, tensorrt_lean_bindings.IPluginV3), plugin
        return Layer(inputs, shape_inputs, plugin)


network = Network()
scores, alpha, window, rows_per_group = "scores", "alpha", "window", "rows_per_group"
keys, values = ["k0", "k1"], ["v0", "v1"]
"""
CHECK = """
assert compacted.node[0] == ["k0", "k1", "v0", "v1", (selected, 0), (selected, 1)]
assert selected.node[0][0][0].node[:2] == (["scores", "alpha", "window"], [])
assert selected.node[1] == ["rows_per_group"]
assert (k_rows, v_rows) == ((compacted, 0), (compacted, 1))
try:
    plugin("HubKVRefine", nms_kernel=np.int32([4]))
except ValueError as error:
    print(error)
"""


def test_python(built: Path) -> None:
    create, use = blocks("python")
    (built / "example.py").write_text("\n".join([PRELUDE, create, use, CHECK]))
    assert run(sys.executable, "example.py", folder=built) == "HubKVRefine: the logger has the reason\n"


MAIN = """
#include <cstdio>

int main()
{
    getPluginRegistry()->loadLibrary("build/libhubkv_plugin.so");
    nvinfer1::IPluginV3* const plugin = makeSelect(36);
    auto* const core = static_cast<nvinfer1::IPluginV3OneCore*>(
        plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kCORE));
    std::printf("%s %s %d\\n", core->getPluginNamespace(), core->getPluginName(), makeSelect(0) == nullptr);
}
"""


def compiled(headers: str | Path, folder: Path) -> None:
    import tensorrt_lean_libs

    (code,) = blocks("cpp")
    (folder / "example.cpp").write_text(code + MAIN)
    (library,) = Path(tensorrt_lean_libs.__file__).parent.glob("libnvinfer_lean.so*")
    options = ["-std=c++17", "-Wall", "-Werror", "-Wno-deprecated-declarations", "-o", "example"]
    options += [f"-isystem{x}" for x in (headers, header_folder("CUDA_RUNTIME"))]
    linked = [library, f"-Wl,-rpath,{library.parent},--unresolved-symbols=ignore-in-shared-libs"]
    run(os.environ.get("CXX", "g++"), *options, "example.cpp", *linked, folder=folder)


def header_folder(name: str) -> str:
    (found,) = re.findall(rf"^HUBKV_{name}_HEADERS:PATH=(.*)$", (BUILD / "CMakeCache.txt").read_text(), flags=re.M)
    return found


def test_cpp_compiles(built: Path) -> None:
    """Against TensorRT 10.14; it links."""
    compiled(header_folder("TENSORRT"), built)


def test_cpp_runs(built: Path) -> None:
    """In the registry of TensorRT 11, which is that of the headers without the functions that they call deprecated."""
    headers = shutil.copytree(header_folder("TENSORRT"), built / "headers")
    registry = headers / "NvInferRuntimeCommon.h"
    registry.write_text(re.sub(r"^ *TRT_DEPRECATED virtual [^;]*;\n", "", registry.read_text(), flags=re.M))
    compiled(headers, built)
    assert run("./example", folder=built) == "hubkv HubKVSelect 1\n"
