# SPDX-License-Identifier: Apache-2.0
"""The plugin library over the CUDA kernels, as users build it: what can be seen of it where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plugin import harness, registry
from plugin.harness import Library, log
from plugin.nodes import compact_case
from test_cuda_compile import kernel_report


@pytest.fixture(scope="module")
def shipped() -> Path:
    kernel_report.build()
    return Path(kernel_report.BUILD) / "libhubkv_plugin.so"


def test_exports_and_dependencies(shipped: Path) -> None:
    """CUDA's runtime and the kernels are inside."""
    harness.check_symbols(shipped)


def test_registry_creates_every_plugin(shipped: Path) -> None:
    command = [sys.executable, registry.__file__, str(shipped), "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    seen = json.loads(done.stdout)
    assert seen["created"] == [[name, True] for name in registry.GOOD for _ in range(2)]
    assert seen["cycles"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the kernel would read host memory")
def test_without_a_driver_enqueue_is_an_error(shipped: Path) -> None:
    library = Library(shipped)
    case = compact_case((1, 1, 8), 16, 4, "float16", 1)
    plugin = library.make("HubKVCompact")
    outputs = plugin.empty_outputs(case.inputs)
    described = [harness.describe(x) for x in case.inputs], [harness.describe(x) for x in outputs]
    for context, call in ((plugin, "cudaMemsetAsync"), (plugin.reload(), "cudaLaunchKernel")):
        assert context.shape_change(*described) == 0, log()
        assert context.enqueue(case.inputs, outputs, 0) != 0
        assert f"1 HubKVCompact: {call}: " in log()
    assert all(np.all(x == np.float16(-1)) for x in outputs)
    del plugin, context
    library.close()
