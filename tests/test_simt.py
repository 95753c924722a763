# SPDX-License-Identifier: Apache-2.0
"""The emulator that runs .cu files on the CPU: right kernels pass under any schedule, planted faults are reported."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simt import mutate
from simt.library import FIXTURES, build, run_under_asan

SEEDS = (0, 1, 2, 3)
CUDA_ERROR = 3
KERNELS = Path(__file__).parent / "simt" / "kernels"


@functools.cache
def fixtures(mode: str) -> ctypes.CDLL:
    return open_fixtures(build(mode, FIXTURES))


def open_fixtures(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    library.fixture_error.restype = ctypes.c_char_p
    return library


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def run(library: ctypes.CDLL, name: str, *arguments: Any) -> str:
    """The message of the fault, "" for none. Arrays go as pointers, numbers as int64."""
    values = [pointer(a) if isinstance(a, np.ndarray) else ctypes.c_int64(a) for a in arguments]
    status = getattr(library, f"fixture_{name}")(*values)
    assert status in (0, CUDA_ERROR)
    return library.fixture_error().decode() if status else ""


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SIMT_SEED", str(request.param))
    return int(request.param)


# ---- right kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "race"])
class TestRightKernels:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_sums_of_blocks(self, mode: str, seed: int, dtype: type) -> None:
        values = np.random.default_rng(seed).integers(-50, 50, (5, 1024)).astype(dtype)
        sums = np.empty(5, dtype)
        name = "block_sums" if dtype is np.float32 else "block_sums_double"
        assert run(fixtures(mode), name, values, sums, 5, 1024) == ""
        assert (sums == values.sum(axis=1)).all()

    def test_halves_in_dynamic_shared_memory_and_counts(self, mode: str, seed: int) -> None:
        values = np.random.default_rng(seed).standard_normal(256).astype(np.float16)
        out, positives, total = np.empty_like(values), np.empty(2, np.int32), np.zeros(1, np.uint64)
        assert run(fixtures(mode), "reverse", values, out, positives, total, 256) == ""
        assert (out == values[::-1]).all()
        assert (positives == (values > 0).sum()).all()
        assert total[0] == 255

    def test_memory_of_a_warp_ordered_by_syncwarp(self, mode: str, seed: int) -> None:
        values, out = np.arange(32, dtype=np.int32), np.empty(32, np.int32)
        assert run(fixtures(mode), "rotate", values, out, 7) == ""
        assert (out == np.roll(values, -7)).all()

    def test_functions_of_a_warp(self, mode: str, seed: int) -> None:
        out = np.empty((7, 32), np.int32)
        assert run(fixtures(mode), "warp_functions", out) == ""
        lane = np.arange(32)
        pairs = np.where(lane < 16, lane ^ 1, 0)
        assert (out[0] == 5 + pairs).all()
        assert (out[1] == np.where(lane >= 3, lane - 3, lane)).all()
        assert (out[2] == np.where(lane % 16 < 13, lane + 3, lane)).all()
        assert (out[3] == lane ^ 17).all()
        assert (out[4] == lane // 8 * 8 + (lane + 1) % 8).all()
        assert (out[5] == sum(1 << i for i in range(0, 32, 3))).all()
        assert (out[6] == 1).all()


def test_the_seed_sets_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int) -> list[int]:
        monkeypatch.setenv("SIMT_SEED", str(seed))
        ticket, out = np.zeros(1, np.uint32), np.empty(120, np.uint32)
        assert run(fixtures("plain"), "order", ticket, out, 3, 40) == ""
        return out.tolist()

    orders = [order(seed) for seed in SEEDS]
    assert orders[0] == list(range(120))
    assert all(sorted(one) == orders[0] for one in orders)
    assert len({tuple(one) for one in orders}) == len(SEEDS)
    assert order(2) == orders[2]


@pytest.mark.parametrize(("grid", "block", "shared"), [(0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 227 * 1024 + 1)])
def test_launches_that_no_device_takes(grid: int, block: int, shared: int) -> None:
    message = run(fixtures("plain"), "launch", grid, block, shared)
    assert re.match(r"order: no device launches grid \(\d+, 1, 1\), block \(\d+, 1, 1\), \d+ bytes", message)


# ---- meetings --------------------------------------------------------------------------------------------------------

MEETINGS = [
    ("barrierInOneBranch", r"divergent barrier: it waits in __syncthreads while thread \(40, 0, 0\) has returned"),
    (
        "barriersInBothBranches",
        r"divergent barrier: it reaches __syncthreads while .* waits in __syncthreads at ",
    ),
    ("unequalTripCounts", r"divergent barrier: it waits in __syncthreads_or while .* has returned"),
    ("maskWithoutOwnLane", r"wrong mask: __any_sync with mask 0xffff leaves out its own lane (1[6-9]|2\d|3[01])"),
    ("maskOfAbsentLane", r"divergent collective: it (reaches|waits in) __shfl_sync.* has returned"),
    (
        "masksThatDiffer",
        r"(wrong mask|divergent collective): it reaches __ballot_sync with mask 0xf{4,8}, but thread",
    ),
    ("maskPastTheBlock", r"wrong mask: __syncwarp with mask 0xffffffff names lanes that the block does not have"),
    ("collectivesThatDiffer", r"divergent collective: it reaches __shfl_(down_)?sync.* waits in __shfl_(down_)?sync"),
    ("collectiveAgainstBarrier", r"divergent collective: it (reaches|waits in) __all_sync.* waits in __syncthreads at"),
    ("sourceOutsideMask", r"bad shuffle source: in __shfl_down_sync with mask 0xff lane [4-7] reads lane (8|9|1[01])"),
    ("widthOfTwelve", r"__shfl_xor_sync with mask 0xffffffff: width 12 is not a power of two in 1\.\.32"),
]


def lines_of(kernel: str, file: str) -> range:
    """Numbers of the lines of a fixture kernel."""
    lines = (KERNELS / file).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(rf"\b{kernel}\(", line))
    last = next(i for i in range(first, len(lines)) if lines[i] == "}")
    return range(first + 1, last + 2)


def check_place(message: str, kernel: str, file: str) -> None:
    place = re.match(
        rf"{kernel}(<.*>)?, {re.escape(file)}:(\d+), block \([01], 0, 0\), thread \(\d+, 0, 0\): ", message
    )
    assert place, message
    assert int(place[2]) in lines_of(kernel, file)


@pytest.mark.parametrize("mode", ["plain", "race"])
@pytest.mark.parametrize("number", range(len(MEETINGS)), ids=[name for name, _ in MEETINGS])
def test_wrong_meetings(mode: str, number: int, seed: int) -> None:
    kernel, pattern = MEETINGS[number]
    out = np.zeros(64, np.int32)
    message = run(fixtures(mode), "fault", number, out, 48 if kernel == "maskPastTheBlock" else 64)
    check_place(message, kernel, "faults.cu")
    assert re.search(pattern, message), message
    # The next launch is not disturbed.
    assert run(fixtures(mode), "warp_functions", np.empty((7, 32), np.int32)) == ""


# ---- races -----------------------------------------------------------------------------------------------------------

RACES = [
    ("sharedAcrossWarps", "race|uninitialised: it reads tile"),
    ("sharedWithinWarp", "race|uninitialised: it reads tile"),
    ("sharedWriteAfterRead", r"race: it (reads|writes) byte \d+ of 256 dynamic shared bytes"),
    ("sharedBytes", r"race: it writes tile \+ \d+ \(shared\), which thread \(\d+, 0, 0\) writes"),
    ("sharedVectors", r"race: it (reads|writes) tile \+ \d+ \(shared\)|uninitialised: it reads tile"),
    ("sharedHalves", r"race: it writes tile \+ \d+ \(shared\), which thread \(\d+, 0, 0\) writes at races"),
    ("halfWarpBarrier", "race|uninitialised: it reads tile"),
    ("sharedAtomicThenRead", r"race: it (reads|atomically updates) count \+ 0 \(shared\)"),
    ("uninitialisedStatic", r"uninitialised: it reads tile \+ 256 \(shared\), which no thread of the block wrote"),
    ("uninitialisedDynamic", r"uninitialised: it reads byte 68 of 256 dynamic shared bytes"),
    ("uninitialisedCounter", r"uninitialised: it atomically updates count"),
    ("globalWithinBlock", r"race: it (reads|writes) global 0x[0-9a-f]+, which thread .* (reads|writes) at races"),
    ("globalAcrossBlocks", r"race: it writes global 0x[0-9a-f]+, which another block writes at races\.cu:\d+ with no"),
    ("globalReadAcrossBlocks", r"race: it (reads|writes) global 0x[0-9a-f]+, which another block"),
    ("globalWriteAfterReadAcrossBlocks", r"race: it (reads|writes) global 0x[0-9a-f]+, which another block"),
    ("globalAtomicAndWrite", r"race: it (writes|atomically updates) global 0x[0-9a-f]+, which"),
    ("pastDynamicShared", r"out of bounds: it writes 4 bytes at byte 256 of 256 dynamic shared bytes"),
]


@pytest.mark.parametrize("number", range(len(RACES)), ids=[name for name, _ in RACES])
def test_races(number: int, seed: int) -> None:
    kernel, pattern = RACES[number]
    library = fixtures("race")
    assert run(library, "race", number, np.zeros(320, np.int32), 0) == ""
    message = run(library, "race", number, np.zeros(320, np.int32), 1)
    check_place(message, kernel, "races.cu")
    assert re.search(pattern, message), message


# ---- bounds ----------------------------------------------------------------------------------------------------------

BOUNDS = [
    ("globalRead", 16, "heap-buffer-overflow"),
    ("globalWrite", 1, "heap-buffer-overflow"),
    ("globalAtomic", 1, "heap-buffer-overflow"),
    ("staticShared", 1, "global-buffer-overflow"),
    ("staticSharedOfTemplate", 1, "global-buffer-overflow"),
    ("dynamicShared", 1, "use-after-poison"),
    ("local", 1, "stack-buffer-overflow"),
    ("misaligned", 1, "misaligned address"),
]


def run_bounds(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_under_asan(__file__, build("asan", FIXTURES), *map(str, arguments))


def bounds_main(file: str, *numbers: str) -> None:
    """The body of the subprocess: runs fixture_bounds(number, past) for each pair, and a wrong meeting first."""
    library = open_fixtures(Path(file))
    assert "divergent barrier" in run(library, "fault", 0, np.zeros(64, np.int32), 64)
    for number, past in zip(numbers[::2], numbers[1::2], strict=True):
        # numpy's own small blocks have no redzones; 4096 elements come from malloc.
        values, out = np.ones(4096, np.int32), np.zeros(4096, np.int32)
        offset = 4096 - 64
        message = run(library, "bounds", int(number), values[offset:], out[offset:], int(past))
        assert message == "", message
        assert int(number) == len(BOUNDS) - 1 or (out[offset:] == 1).all()
    print("all right")


def test_right_kernels_pass_the_sanitizers() -> None:
    done = run_bounds(*(value for number in range(len(BOUNDS)) for value in (number, 0)))
    assert done.returncode == 0, done.stderr
    assert "all right" in done.stdout


@pytest.mark.parametrize("number", range(len(BOUNDS)), ids=[name for name, _, _ in BOUNDS])
def test_overruns(number: int) -> None:
    kernel, past, pattern = BOUNDS[number]
    done = run_bounds(number, past)
    assert done.returncode != 0
    assert re.search(pattern, done.stderr), done.stderr
    assert kernel in done.stderr
    assert "bounds.cu" in done.stderr


# ---- mutation --------------------------------------------------------------------------------------------------------


def sums_case(library: ctypes.CDLL) -> None:
    library.fixture_error.restype = ctypes.c_char_p
    values, sums = np.ones((2, 256), np.float32), np.empty(2, np.float32)
    assert run(library, "block_sums", values, sums, 2, 256) == ""
    assert (sums == 256).all()
    halves, out = np.ones(64, np.float16), np.empty(64, np.float16)
    assert run(library, "reverse", halves, out, np.empty(2, np.int32), np.zeros(1, np.uint64), 64) == ""
    assert run(library, "rotate", np.arange(32, dtype=np.int32), np.empty(32, np.int32), 3) == ""


def test_every_barrier_of_the_right_kernels_is_needed() -> None:
    results = mutate.remove_barriers(KERNELS / "right.cu", sums_case, name=FIXTURES)
    barriers = ["__syncthreads", "__syncthreads", "__syncthreads_count", "__syncwarp", "__syncwarp"]
    assert [result.text for result in results] == barriers
    assert all(result.caught and "right.cu" in result.how for result in results), results


def test_a_barrier_that_nothing_needs_is_told() -> None:
    def case(library: ctypes.CDLL) -> None:
        library.fixture_error.restype = ctypes.c_char_p
        out = np.zeros(64, np.int32)
        assert run(library, "own_element", out) == ""
        assert (out == np.arange(64)).all()

    (result,) = mutate.remove_barriers(KERNELS / "redundant.cu", case, name=FIXTURES)
    assert (result.line, result.text, result.caught) == (14, "__syncthreads", False)


def test_a_case_that_fails_by_itself_is_refused() -> None:
    def case(library: ctypes.CDLL) -> None:
        raise AssertionError("this case is wrong")

    with pytest.raises(RuntimeError, match="fails on the right kernel: AssertionError: this case is wrong"):
        mutate.remove_barriers(KERNELS / "redundant.cu", case, name=FIXTURES)


if __name__ == "__main__":
    bounds_main(*sys.argv[1:])
