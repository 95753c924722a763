# SPDX-License-Identifier: Apache-2.0
"""Runs of whole test files in processes of their own: random tables, and every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTRUCTION_SETS = ["scalar", "avx2", "avx512"]  # a CPU that lacks one runs the next lower: the tests hold all the same


def run(*arguments: str, isa: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HUBKV_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    assert done.returncode == 0, f"exit code {done.returncode}; the output ends with\n{tail}"
    return done.stdout


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_random_tables_are_never_a_fault(isa: str) -> None:
    assert run(str(HERE / "fuzz_tables.py"), "0", "700", isa=isa).endswith("done\n")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS[:-1])
def test_instruction_set_equals_oracle(isa: str) -> None:
    """The oracle tests again for the sets below the best one, which all other tests use."""
    program = (
        "import sys, pytest; from hubkv_trt import ops; print('isa', ops.cpu_isa()); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    tests = [
        "test_refine.py::test_equals_oracle",
        "test_refine.py::test_equals_oracle_for_every_kernel",
        "test_refine.py::test_scores_that_are_not_finite",
        "test_select.py::test_equals_oracle_with_ties",
        "test_select.py::test_all_values_equal_keep_the_first",
        "test_compact.py::test_equals_oracle",
        "test_attend.py::test_equals_oracle",
        "test_attend.py::test_equals_oracle_for_every_group",
        "test_attend.py::test_permuted_batch_and_threads_change_no_bit",
        "test_attend.py::test_extreme_logits",
        "test_append.py::test_equals_oracle",
        "test_score_window.py::test_equals_oracle",
        "test_score_window.py::test_windows_and_groups",
        "test_held_out_loss.py::test_equals_oracle",
        "test_held_out_loss.py::test_windows_and_groups",
    ]
    out = run("-c", program, "-q", "-p", "no:cacheprovider", *(str(HERE / t) for t in tests), isa=isa)
    used = out.split("isa ", 1)[1].split()[0]
    assert INSTRUCTION_SETS.index(used) <= INSTRUCTION_SETS.index(isa)
