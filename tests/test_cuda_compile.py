# SPDX-License-Identifier: Apache-2.0
"""What the CUDA compiler makes of the kernels: nothing spills, and memory moves 16 bytes at a time."""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from hubkv_trt import _abi, _library

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("kernel_report", ROOT / "build_scripts/kernel_report.py")
assert _SPEC is not None and _SPEC.loader is not None
kernel_report = importlib.util.module_from_spec(_SPEC)
sys.modules["kernel_report"] = kernel_report
_SPEC.loader.exec_module(kernel_report)

# 16-byte loads and stores of global memory that a kernel's loop is made of, at least.
VECTORS = {
    "refine": {
        "chunkMoments": (8, 0),
        "refineScores<0>": (4, 4),
        "refineScores<1>": (4, 4),
        "refineScores<2>": (4, 4),
        "refineScores<3>": (4, 4),
        "refineScores<4>": (4, 4),
    },
    "select": {
        "countDigits<0>": (4, 0),
        "countDigits<1>": (4, 0),
        "countDigits<2>": (4, 0),
        "countTiles": (8, 0),
        "writeTiles": (4, 0),
        "clearHistograms": (0, 1),
    },
    "compact": {"copyRows<16>": (8, 8)},
    "append": {"appendTokens<16>": (2, 2)},
}


# attendRows<T, lanes of a row, vectors of a lane, queries>: a step has the keys and values of 4 rows, or 2.
VECTORS["attend"] = {
    f"attendRows<{element}, {lanes}, {vectors}, {queries}>": (
        2 * vectors * (4 if vectors == 1 and 4 * queries <= lanes else 2),
        0,
    )
    for element, shapes in {
        "float": [(16, 1), (32, 1), (32, 2)],
        "Float16": [(8, 1), (16, 1), (32, 1)],
        "BFloat16": [(8, 1), (16, 1), (32, 1)],
    }.items()
    for lanes, vectors in shapes
    for queries in (1, 2, 4)
}


@pytest.fixture(scope="module")
def library() -> Path:
    """libhubkv as a user's ``cmake -DHUBKV_CUDA=ON`` builds it, with warnings as errors."""
    return kernel_report.build()


@pytest.mark.parametrize("architecture", kernel_report.ARCHITECTURES)
@pytest.mark.parametrize("stage", kernel_report.STAGES)
def test_nothing_spills(stage: str, architecture: int) -> None:
    kernels = kernel_report.report(stage, architecture)
    assert kernels
    for kernel in kernels:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.occupancy() > 0, kernel


@pytest.mark.parametrize("architecture", kernel_report.ARCHITECTURES)
@pytest.mark.parametrize("stage", VECTORS)
def test_memory_moves_in_vectors(stage: str, architecture: int) -> None:
    kernels = {kernel.name: kernel for kernel in kernel_report.report(stage, architecture)}
    for name, (loads, stores) in VECTORS[stage].items():
        assert kernels[name].vector_loads >= loads, kernels[name]
        assert kernels[name].vector_stores >= stores, kernels[name]


def test_all_row_kernels_are_listed() -> None:
    kernels = {kernel.name for kernel in kernel_report.report("attend")}
    assert {name for name in kernels if name.startswith("attendRows")} == set(VECTORS["attend"])


def test_the_library_has_code_for_every_gpu(library: Path) -> None:
    """Machine code for the architectures named, and PTX that later ones compile, of every stage."""
    found = embedded_code(library)
    stages = len(kernel_report.STAGES)
    assert found == {("code", arch): stages for arch in kernel_report.ARCHITECTURES} | {("PTX", 120): stages}


def embedded_code(library: Path) -> Counter[tuple[str, int]]:
    """("code" or "PTX", architecture) of what nvcc put into the file. A fat binary is a header of 16 bytes and entries;
    an entry begins with its kind (1: PTX, 2: machine code), the bytes of its header and of what follows, and has its
    architecture at byte 28.
    """
    found: Counter[tuple[str, int]] = Counter()
    data = library.read_bytes()
    for match in re.finditer(b"\x50\xed\x55\xba\x01\x00\x10\x00", data):
        at = match.end() + 8
        end = at + struct.unpack_from("<Q", data, match.end())[0]
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            found[{1: "PTX", 2: "code"}[kind], struct.unpack_from("<I", data, at + 28)[0]] += 1
            at += header + size
    return found


def test_the_library_loads_where_no_driver_is(library: Path) -> None:
    """CUDA's runtime is inside; a call is refused by it, not by the loader."""
    needed = subprocess.run(["ldd", library], check=True, capture_output=True, text=True).stdout
    assert "libcuda" not in needed
    loaded = _library.load(library)
    assert loaded.hubkv_has_cuda() == 1
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[-1] for line in exported.splitlines()} == set(_abi.PROTOTYPES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the call would read host memory")
def test_a_call_without_a_driver_is_an_error(library: Path) -> None:
    loaded, memory = _library.load(library), torch.zeros(4096, dtype=torch.uint8)
    params = _abi.CacheParams(1, 1, 1, 8, _abi.FLOAT32, 16, 0, 0, 1)
    status = loaded.hubkv_plan(_abi.CUDA, None, params, 16, *[memory.data_ptr()] * 4)
    assert status == _abi.CUDA_ERROR
    assert "cudaLaunchKernel" in loaded.hubkv_last_error().decode()
