# SPDX-License-Identifier: Apache-2.0
"""Builds and loads the kernels that run on the CPU.

``build(mode)`` answers a library whose modes are ``plain``, ``asan`` (loads only under :func:`run_under_asan`) and
``race``. Everything is built incrementally in ``build/simt``; ``HUBKV_SIMT_BUILD`` names another folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("HUBKV_SIMT_BUILD", ROOT / "build" / "simt"))
MODES = ("plain", "asan", "race")
CORE = "hubkv_simt"
FIXTURES = "simt_fixtures"


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}")


@contextmanager
def _locked() -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(*targets: str, options: tuple[str, ...] = ()) -> None:
    """Builds targets of the emulator's CMake build; options ("-DHUBKV_PLUGIN=ON") are set there first, and stay.

    Raises:
        RuntimeError: they do not compile; the message is the compiler's.
    """
    with _locked():
        if not (BUILD / "CMakeCache.txt").is_file():
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            always = ["-DHUBKV_SIMT=ON", "-DHUBKV_CUDA=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
            always.append(f"-DPython3_EXECUTABLE={sys.executable}")  # whose wheels may have CUDA's headers
            _run("cmake", *generator, "-S", ROOT, "-B", BUILD, *always)
        if options:
            _run("cmake", *options, BUILD)
        _run("cmake", "--build", BUILD, "--target", *targets, "--parallel", "2")


@functools.cache
def build(mode: str, name: str = CORE) -> Path:
    """The library's file, made or brought up to date: the core, or the emulator's own fixtures.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    make(f"{name}_{mode}")
    return BUILD / "tests" / "simt" / f"lib{name}_{mode}.so"


@functools.cache
def load(mode: str) -> ctypes.CDLL:
    """The core with the prototypes of the C ABI. With ``HUBKV_CUDA`` it runs emulated kernels on host memory; a fault
    is the status ``HUBKV_CUDA_ERROR`` and its message ``hubkv_last_error()``.
    """
    from hubkv_trt import _library

    return _library.load(build(mode))


def _runtime(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    return subprocess.run(
        [compiler, f"-print-file-name={name}"], check=False, capture_output=True, text=True
    ).stdout.strip()


def run_under_asan(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS...`` with the sanitizers' runtime preloaded, so that it can load an ``asan`` library. An
    error of the kernels ends it with status 99 or 1 and a report on stderr.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{_runtime('libasan.so')}:{_runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")]),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=timeout)


def run_tests_under_asan(file: Path, selection: str) -> subprocess.CompletedProcess[str]:
    """The tests of ``file`` that pytest's ``-k selection`` takes, over the ``asan`` library, as ``run_under_asan``."""
    build("asan")
    return run_under_asan(
        "-c",
        "import os, sys, pytest; os.environ['HUBKV_TEST_DEVICE'] = 'sanitized'; sys.exit(pytest.main(sys.argv[1:]))",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        selection,
        file,
        timeout=400,
    )
