# SPDX-License-Identifier: Apache-2.0
"""Runs tests of the stages, which are written for CPU tensors, on the kernels of the GPU.

``emulated`` and ``races`` execute the kernels on the CPU (``tests/simt``, builds ``plain`` and ``race``), ``gpu`` on
the CUDA device that torch sees (where it sees none, conftest.py leaves those tests out). A test file takes over the
tests of a stage's own file: oracles, cases and properties are the same on all devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from device.moved import computing_on
from hubkv_trt import _abi, _library, _stages_cache, _stages_decode, _stages_prefill, _stages_rewrite
from simt.library import load

BUILDS = {"emulated": "plain", "races": "race", "sanitized": "asan"}
# "sanitized" loads only in a process that run_under_asan() starts: it sets HUBKV_TEST_DEVICE.
DEVICES = (
    [os.environ["HUBKV_TEST_DEVICE"]]
    if "HUBKV_TEST_DEVICE" in os.environ
    else ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]
)
DEVICES_AND_RACES = [*DEVICES, *(["races"] if "emulated" in DEVICES else [])]

# What a GPU does not check (values in device memory), and what only the host has.
HOST_ONLY = {"test_refuses_tensors", "test_thread_count_changes_nothing"}


def taken_from(*modules: ModuleType, without: tuple[str, ...] = ()) -> dict[str, Callable[..., None]]:
    """The tests of these files for another file to update its globals with, renamed by their stage."""
    found = {}
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and name not in HOST_ONLY and name not in without:
                found[f"{module.__name__}_{name.removeprefix('test_')}"] = test
    return found


def _emulated_workspace(x: Tensor, size: int) -> Tensor:
    """No larger than asked for, so that an overrun is one; aligned as CUDA's are; full of NaN."""
    # Of NumPy: torch fills with threads, which a forked process does not have.
    memory = torch.from_numpy(np.full(size + 256, 0xFF, np.uint8))
    start = -memory.data_ptr() % 256
    return memory[start : start + size]


@contextlib.contextmanager
def emulated(library: ctypes.CDLL) -> Iterator[None]:
    """``torch.ops.hubkv`` on CPU tensors runs the CUDA kernels of this library of ``simt.library``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_library, _stages_cache):
            patch.setattr(module, "library", lambda: library)
        for module in (_stages_prefill, _stages_cache, _stages_decode, _stages_rewrite):
            patch.setattr(module, "place", lambda _: (_abi.CUDA, None))
        for module in (_stages_prefill, _stages_cache, _stages_decode):
            patch.setattr(module, "workspace", _emulated_workspace)
        _stages_cache._attend_calls.clear()  # they hold workspace sizes of the other device
        yield
    _stages_cache._attend_calls.clear()


def on(device: str) -> contextlib.AbstractContextManager[None]:
    return computing_on("cuda") if device == "gpu" else emulated(load(BUILDS[device]))
