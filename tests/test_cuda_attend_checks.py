# SPDX-License-Identifier: Apache-2.0
"""The kernels of plan and attend: the host's very work list, bits that do not depend on the batch, and no result that
hangs on the order of threads, a barrier or the tables being right."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import test_attend
import test_plan
from hubkv_trt import ops
from on_device import DEVICES, emulated, on
from ragged_cache import RaggedCache, new_rows, random_cache
from simt.library import ROOT, build, load, run_tests_under_asan
from simt.mutate import remove_barriers

HERE = Path(__file__).parent


def plan_case(library: ctypes.CDLL) -> None:
    """More heads than threads, several of them without rows."""
    cache = random_cache(sequences=[(40, 0), (None, 0), (300, 0)] * 45, num_layers=1, head_dim=8, max_pages=0)
    with emulated(library):
        test_plan.check(cache, 300, 16)
        test_plan.check(cache, 2000, 1)


def attend_case(library: ctypes.CDLL) -> None:
    """One, two and four tiles of queries in a block, several parts of a head, and queries shared out."""
    cache = random_cache(sequences=[(90, 20), (None, 3)], num_layers=1, num_kv_heads=1, head_dim=40)
    with emulated(library):
        for num_new, group in ((1, 1), (1, 3), (2, 4), (5, 3), (17, 2)):
            test_attend.check(cache, num_new, group, rows_per_item=16)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def attend(device: str, cache: RaggedCache, rows: tuple[Tensor, ...], **options) -> Tensor:
    with on(device):
        return cache.attend(*rows, **options)


@pytest.mark.parametrize(
    "sequences",
    [
        [(100, 0)],
        [(None, 0)],
        [(0, 0)],
        [(1, 5), (None, 3), (1000, 0)],
        [(50, 1)] * 300,
    ],
)
@pytest.mark.parametrize("spare", [0, 7, 500])
@pytest.mark.parametrize("min_rows", [1, 17, 1000, 2**63 - 1])
def test_plan_is_the_one_of_the_host(device, sequences, spare, min_rows) -> None:
    cache = random_cache(sequences=sequences, num_layers=2, head_dim=8, max_pages=0)
    arguments = (cache.arena, cache.segments, 2, 2, len(sequences) * 2 + spare, min_rows)
    work, work_count = ops.plan(*arguments)
    with on(device):
        again, again_count = ops.plan(*arguments)
    assert torch.equal(work, again)
    assert torch.equal(work_count, again_count)


def test_plan_of_more_heads_than_shared_memory_holds(device: str) -> None:
    cache = random_cache(sequences=[(9, 0)], num_layers=1, num_kv_heads=9000, head_dim=8, max_pages=0)
    work, work_count = cache.plan(12_000, 1)
    with on(device):
        again, again_count = cache.plan(12_000, 1)
    assert torch.equal(work, again)
    assert torch.equal(work_count, again_count)


@pytest.mark.parametrize("num_new", [1, 3, 12])
def test_permuted_batch_changes_no_bit(device: str, num_new: int) -> None:
    cache = random_cache(sequences=[*test_attend.MIXED, (400, 90)], row_bias=True, num_layers=1)
    rows = new_rows(cache, num_new, 4)
    lengths = test_attend.ints(*[min(num_new, 1 + n % 3) for n in range(7)])
    out = attend(device, cache, rows, new_lengths=lengths)
    order = [3, 6, 0, 5, 1, 4, 2]
    permuted = attend(device, cache.take(order), tuple(x[order] for x in rows), new_lengths=lengths[order])
    assert torch.equal(permuted.view(torch.uint8), out[order].view(torch.uint8))


@pytest.mark.parametrize("num_new", [1, 40])
def test_long_tails_are_cut(device: str, num_new: int) -> None:
    """Into up to 16 pieces; what is left over goes to all of them."""
    cache = random_cache(sequences=[(30, 4501), (None, 600), (None, 0)], num_layers=1, num_kv_heads=1, head_dim=8)
    with on(device):
        test_attend.check(cache, num_new, 2)


def test_many_parts_are_merged(device: str) -> None:
    """More than the lanes of a block look up at once."""
    cache = random_cache(sequences=[(2500, 300)], num_layers=1, num_kv_heads=1, head_dim=8, seed=3)
    with on(device):
        test_attend.check(cache, 1, 2, capacity=400, rows_per_item=16)


@pytest.mark.parametrize("dtype", test_attend.DTYPES)
@pytest.mark.parametrize("offset", [1, 3])
def test_rows_off_the_grid(device: str, dtype: torch.dtype, offset: int) -> None:
    """q, k and v that begin at any element, at strides of their own."""
    cache = random_cache(sequences=[(20, 5), (None, 2)], num_layers=1, dtype=dtype)
    for num_new in (1, 20):
        rows = new_rows(cache, num_new, 2)
        shifted = []
        for extra, x in enumerate(rows):
            width = x.shape[2] * x.shape[3] + 8 * extra
            memory = torch.zeros(2 * num_new * width + offset, dtype=dtype)[offset:].view(2, num_new, width)
            memory[..., : x.shape[2] * x.shape[3]] = x.flatten(2)
            shifted.append(memory[..., : x.shape[2] * x.shape[3]].unflatten(2, x.shape[2:]))
        assert torch.equal(attend(device, cache, tuple(shifted)), attend(device, cache, rows))


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_the_order_of_threads_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SEED", str(seed))
    for case in (plan_case, attend_case):
        case(load("plain"))


def test_random_tables_are_never_a_fault() -> None:
    build("plain")
    done = subprocess.run(
        [sys.executable, HERE / "fuzz_tables.py", "1000", "150", "emulated"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-300:]} {done.stderr[-3000:]}"
    assert done.stdout.endswith("done\n")


def test_sanitizers_find_nothing() -> None:
    done = run_tests_under_asan(
        HERE / "test_cuda_attend.py", "new_lengths or page_sizes or fused or infinity or (test_plan and 17)"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("file", "unit", "case", "barriers"),
    [
        ("plan/plan.cu", "plan/plan.cu", plan_case, 6),
        ("attend/attend_rows.h", "attend/attend.cu", attend_case, 3),
        ("attend/attend_merge.h", "attend/attend.cu", attend_case, 1),
    ],
)
def test_barriers_are_needed(file, unit, case, barriers) -> None:
    mutants = remove_barriers(ROOT / "cpp" / file, case, unit=ROOT / "cpp" / unit)
    assert len(mutants) == barriers
    for mutant in mutants:
        assert mutant.caught, mutant
