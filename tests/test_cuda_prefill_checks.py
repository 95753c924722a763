# SPDX-License-Identifier: Apache-2.0
"""The kernels of refine, select, compact and append under sanitizers, on random tables, with threads in several orders,
and without each of their barriers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import test_append
import test_compact
import test_refine
import test_select
from on_device import emulated
from simt.library import ROOT, build, load, run_tests_under_asan, run_under_asan
from simt.mutate import remove_barriers

HERE = Path(__file__).parent


def refine_case(library: ctypes.CDLL) -> None:
    """Every kernel of refine: windows in registers, in shared memory, and past a tile."""
    scores = test_refine.uniform(1, 2, 2300)
    with emulated(library):
        for kernel in (5, 301, 2501):
            test_refine.both(scores, 0.7, 40, nms_kernel=kernel)


def select_case(library: ctypes.CDLL) -> None:
    """Ties at the threshold within a tile, several tiles and groups."""
    refined = np.random.default_rng(0).random((2, 2, 2500), np.float32).round(2)
    with emulated(library):
        test_select.both(refined, 2, 1777)
        test_select.both(np.repeat(refined, 80, axis=0), 1, 100_000)


def rows_case(library: ctypes.CDLL) -> None:
    with emulated(library):
        test_compact.test_equals_oracle(test_compact.DTYPES[1], 80)
        test_append.test_equals_oracle(test_append.DTYPES[1], 40, 2)


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_the_order_of_threads_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SEED", str(seed))
    for case in (refine_case, select_case, rows_case):
        case(load("plain"))


def test_sanitizers_find_nothing() -> None:
    done = run_tests_under_asan(
        HERE / "test_cuda_prefill.py", "equals_oracle and not every or alignment or strides or outside or pages"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_sanitizers_would_find_something() -> None:
    """select, told of more scores than there are."""
    script = """
import numpy as np
from hubkv_trt import _abi
from simt.library import load
library = load("asan")
refined, scratch = np.zeros(4096, np.float32), np.zeros(1 << 20, np.uint8)
rows, offsets = np.zeros(4096, np.int32), np.zeros(2, np.int64)
params = _abi.SelectParams(1, 1, 4096 + 64, 100)
library.hubkv_select(_abi.CUDA, None, params, refined.ctypes.data, rows.ctypes.data, offsets.ctypes.data,
                     -(-scratch.ctypes.data // 256) * 256, 1 << 19)
"""
    build("asan")
    done = run_under_asan("-c", script)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_random_tables_are_never_a_fault() -> None:
    build("plain")
    done = subprocess.run(
        [sys.executable, HERE / "fuzz_tables.py", "0", "100", "emulated"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-300:]} {done.stderr[-3000:]}"
    assert done.stdout.endswith("done\n")


BARRIERS = [
    ("refine/refine_moments.h", "refine", refine_case, 1),
    ("refine/refine_wide.h", "refine", refine_case, 3),
    ("select/select_digits.h", "select", select_case, 3),
    ("select/select.cu", "select", select_case, 1),
]


@pytest.mark.parametrize(("file", "stage", "case", "barriers"), BARRIERS)
def test_barriers_are_needed(file: str, stage: str, case: Callable[[ctypes.CDLL], None], barriers: int) -> None:
    mutants = remove_barriers(ROOT / "cpp" / file, case, unit=ROOT / f"cpp/{stage}/{stage}.cu")
    assert len(mutants) == barriers
    for mutant in mutants:
        assert mutant.caught, mutant


def test_no_barrier_is_left_out() -> None:
    listed = {file for file, *_ in BARRIERS}
    for stage in ("refine", "select", "compact", "append"):
        for path in (ROOT / "cpp" / stage).iterdir():
            assert ("__sync" in path.read_text()) == (f"{stage}/{path.name}" in listed), path


def test_barriers_of_shared_functions_are_needed() -> None:
    """Each is needed by one of the two stages."""
    caught = set()
    everything = set()
    for stage, case in (("refine", refine_case), ("select", select_case)):
        for mutant in remove_barriers(ROOT / "cpp/common/device.h", case, unit=ROOT / f"cpp/{stage}/{stage}.cu"):
            everything.add(mutant.line)
            if mutant.caught:
                caught.add(mutant.line)
    assert len(everything) == 2
    assert caught == everything
