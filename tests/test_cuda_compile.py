# SPDX-License-Identifier: Apache-2.0
"""What the CUDA compiler makes of the kernels: nothing spills, and memory moves 16 bytes at a time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("kernel_report", ROOT / "build_scripts/kernel_report.py")
assert _SPEC is not None and _SPEC.loader is not None
kernel_report = importlib.util.module_from_spec(_SPEC)
sys.modules["kernel_report"] = kernel_report
_SPEC.loader.exec_module(kernel_report)

SOURCES = sorted(ROOT.glob("cpp/*/*.cu"))

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


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_spills(source: Path) -> None:
    kernels = kernel_report.report(source)
    assert kernels
    for kernel in kernels:
        assert kernel.spills == 0, kernel
        assert kernel.occupancy() > 0, kernel


@pytest.mark.parametrize("stage", VECTORS)
def test_memory_moves_in_vectors(stage: str) -> None:
    kernels = {kernel.name: kernel for kernel in kernel_report.report(ROOT / f"cpp/{stage}/{stage}.cu")}
    for name, (loads, stores) in VECTORS[stage].items():
        assert kernels[name].vector_loads >= loads, kernels[name]
        assert kernels[name].vector_stores >= stores, kernels[name]
