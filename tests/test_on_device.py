# SPDX-License-Identifier: Apache-2.0
"""What the GPU's tests are made of, where there is no GPU: the scripts of tests/device over emulated kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import test_compact
from device import graphs, kernels
from device.moved import Mover, computing_on, through
from hubkv_trt import ops
from on_device import emulated
from simt.library import load


@pytest.mark.parametrize("name", kernels.CHECKS)
def test_small_shapes(name: str) -> None:
    with emulated(load("plain")):
        kernels.CHECKS[name]()


def test_replays() -> None:
    expected = graphs.host_results()
    with emulated(load("plain")):
        graphs.check(expected, device="cpu")


def test_replays_that_miss_a_table_are_seen() -> None:
    expected = graphs.host_results()
    expected[2] = expected[1]
    with pytest.raises(AssertionError, match="refine"):
        graphs.check(expected, device="cpu")


def test_moved_tensors_keep_their_place() -> None:
    memory = torch.arange(100, dtype=torch.float32)
    x, y = memory[3:99].view(4, 24)[:, 2:9], memory[50:60].view(torch.int32)
    moved = Mover("cpu")([x, (y, 7)])
    assert torch.equal(moved[0], x)
    assert torch.equal(moved[1][0], y)
    assert moved[1][1] == 7
    assert (moved[0].stride(), moved[0].storage_offset()) == (x.stride(), x.storage_offset())
    assert moved[0].untyped_storage().data_ptr() == moved[1][0].untyped_storage().data_ptr() != memory.data_ptr()


def test_all_that_was_written_comes_back() -> None:
    """Also outside of the tensors that a stage was given."""

    def fill(k_rows: torch.Tensor) -> None:
        torch.empty(0, dtype=torch.uint8).set_(k_rows.untyped_storage()).fill_(1)

    arena = torch.zeros(64, dtype=torch.uint8)
    through(fill, "cpu", ("k_rows",))(arena[8:16])
    assert bool((arena == 1).all())
    with computing_on("cpu"):
        test_compact.test_into_an_arena()
        with pytest.raises(ValueError, match="k_rows: strides"):
            ops.compact_into(
                test_compact.K,
                test_compact.K,
                test_compact.POSITIONS,
                test_compact.OFFSETS,
                torch.zeros(8, 8)[::2],
                torch.zeros(4, 8),
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the script would begin its five minutes")
def test_the_script_fails_where_no_gpu_is(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    script = Path(__file__).parent / "device/run.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stdout
    assert (tmp_path / "run.log").read_text() == done.stdout


def test_the_script_refuses_a_section_that_it_has_not() -> None:
    script = Path(__file__).parent / "device/run.sh"
    done = subprocess.run([script, "build", "tables"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "section: 'tables' is not one of build " in done.stderr


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """On the host kernels, whose times say nothing here; it compares results with torch's before it times them."""
    script = Path(__file__).parents[1] / "benchmarks/device.py"
    command = [sys.executable, script, "--quick", "--device", "cpu", "--json", tmp_path / "figures"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    figures = json.loads((tmp_path / "figures").read_text())
    assert {row["stage"] for row in figures["rows"]} >= {"refine", "select", "compact", "attend", "append", "plan"}
    assert all(row["ours"]["device"] > 0 for row in figures["rows"])
