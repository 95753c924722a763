# SPDX-License-Identifier: Apache-2.0
"""The plugin library in TensorRT's own registry; what it exports and needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plugin import harness, registry
from plugin.harness import Library, log
from plugin.nodes import node


@pytest.fixture(scope="module")
def in_registry() -> tuple[dict, str]:
    command = [sys.executable, Path(registry.__file__), harness.host_only(), "100"]
    done = subprocess.run([str(x) for x in command], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_registry_finds_and_creates_every_plugin(in_registry: tuple[dict, str]) -> None:
    seen, _ = in_registry
    assert seen["created"] == [[name, True] for name in registry.GOOD for _ in range(2)]
    kinds = {name: {n: v.dtype.name.upper() for n, v in fields.items()} for name, fields in registry.GOOD.items()}
    listed = {
        name: {n: {"1": "FLOAT32", "5": "INT32", "10": "INT64"}.get(t, t) for n, t in fields.items()}
        for name, fields in seen["fields"].items()
    }
    assert listed == kinds


def test_registry_gets_null_for_bad_fields(in_registry: tuple[dict, str]) -> None:
    seen, stderr = in_registry
    assert len(seen["refused"]) == len(registry.refusals())
    messages = stderr.split("== ")[1:]
    for (name, said, refused), message in zip(seen["refused"], messages, strict=True):
        assert refused, (name, said)
        for part in said.split("|"):
            assert part in message.split("\n", 1)[1], (name, said)


def test_library_loads_and_unloads(in_registry: tuple[dict, str]) -> None:
    seen, _ = in_registry
    assert seen["cycles"] == 100
    assert not seen["left"]


def test_exports_and_dependencies() -> None:
    for file in (harness.host_only(), harness.emulated()):
        harness.check_symbols(file)


def test_core_without_cuda_answers_an_error() -> None:
    library = Library(harness.host_only())
    plugin = library.make("HubKVCompact")
    described = node("HubKVCompact")
    wanted = plugin.outputs(described)
    assert wanted is not None
    inputs = [np.zeros(x.shape, x.dtype) for x in described]
    outputs = [np.full(x.shape, 7, x.dtype) for x in wanted]
    for context in (plugin, plugin.reload()):
        assert context.shape_change(described, wanted) == 0
        assert context.enqueue(inputs, outputs, 0) != 0
        assert "not built with CUDA" in log()
    assert all((x == 7).all() for x in outputs)
    del plugin, context
    library.close()
