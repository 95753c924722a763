# SPDX-License-Identifier: Apache-2.0
"""The plugins under AddressSanitizer and UndefinedBehaviorSanitizer: nothing is found, and what is wrong would be."""

from __future__ import annotations

from pathlib import Path

from plugin import harness

HERE = Path(__file__).parent


def test_sanitizers_find_nothing() -> None:
    files = [HERE / "test_plugin_nodes.py", HERE / "test_plugin_run.py"]
    done = harness.sanitized("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    assert "skipped" not in done.stdout


def test_random_tables_are_never_a_fault() -> None:
    done = harness.sanitized(HERE / "plugin" / "fuzz.py", "0", "250")
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
    assert done.stdout.endswith("done\n")


def test_sanitizers_would_find_something() -> None:
    """refine, given less memory than its descriptions say."""
    script = """
import numpy as np
from plugin import harness
library = harness.Library(harness.emulated())
plugin = library.make("HubKVRefine").reload()
inputs = [np.zeros((1, 2, 4000), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)]
outputs = [np.zeros((1, 2, 4000), np.float32), np.zeros(1, np.int64)]
described = [harness.describe(x) for x in inputs], [harness.describe(x) for x in outputs]
assert plugin.shape_change(*described) == 0
small = np.zeros(7999, np.float32)  # one value less
outputs[0] = np.lib.stride_tricks.as_strided(small, (1, 2, 4000), (32000, 16000, 4))
plugin.enqueue(inputs, outputs, 1 << 20)
"""
    done = harness.sanitized("-c", script)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
