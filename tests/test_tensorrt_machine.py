# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's plans and plugins belong to a machine, by the answers of TensorRT's own registry and runtimes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hubkv_trt.cuda import device
from hubkv_trt.engine.bindings import extend_bindings
from hubkv_trt.engine.trt_log import make_logger
from hubkv_trt.runtime.executors import machine, plans
from plugin import harness
from tensorrt_config import make_config


@pytest.mark.parametrize("version", ["10.14.1", "10.14.1.48", "10.14.1.48.post1"])
def test_plans_of_this_tensorrt_and_gpu_pass(version: str) -> None:
    machine.check_machine(make_config(), version, device.Device(0, "9.0"))


@pytest.mark.parametrize(
    ("version", "capability", "message"),
    [
        (
            "10.14.2.9",
            "9.0",
            r"tensorrt.version: the plans were built by TensorRT 10.14.1 and cannot be read by 10.14.2.9",
        ),
        ("10.15.1", "9.0", r"install tensorrt==10.14.1"),
        ("11.4.0.106", "9.0", r"cannot be read by 11.4.0.106"),
        ("10.14.10", "9.0", r"cannot be read by 10.14.10"),
        ("10.14.1", "8.9", r"built for a GPU of 9.0, GPU 3 has 8.9: build the engine again"),
    ],
)
def test_plans_of_another_tensorrt_or_gpu_are_refused(version: str, capability: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        machine.check_machine(make_config(), version, device.Device(3, capability))


def test_a_plan_that_cannot_be_read_says_what_tensorrt_said(tmp_path: Path) -> None:
    """By the real runtime of TensorRT-RTX, which answers without a GPU."""
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    messages = make_logger(trt)
    file = tmp_path / "extend.plan"
    file.write_bytes(b"no plan" * 1000)
    with pytest.raises(
        ValueError, match=r"extend.plan: TensorRT \S+ cannot read the plan \(.*incompatible serialization"
    ):
        plans.Plan(trt, trt.Runtime(messages), messages, file, extend_bindings(make_config()))


def test_messages_keep_the_last_errors_until_they_are_taken() -> None:
    trt = pytest.importorskip("tensorrt_lean_bindings")
    messages = make_logger(trt)
    severity = trt.ILogger.Severity
    assert not messages.failed
    messages.log(severity.WARNING, "only a warning")
    assert messages.reason() == "TensorRT gave no reason"
    for index in range(6):
        messages.log(severity.ERROR, f" error {index}\n")
    messages.log(severity.INTERNAL_ERROR, "the worst")
    assert messages.failed
    assert messages.reason() == "error 3 / error 4 / error 5 / the worst"
    assert messages.reason() == "TensorRT gave no reason"


LOADING = """
import sys
from pathlib import Path
import tensorrt_lean_libs, tensorrt_lean_bindings as trt
from hubkv_trt.engine.plugin_library import load_plugins

class Newer(trt.IPluginCreatorV3One):
    def __init__(self):
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_namespace, self.plugin_version = "HubKVSelect", "hubkv", "2"
        self.field_names = trt.PluginFieldCollection([])

newer = Newer()
for file in sys.argv[1:]:
    if file == "newer":
        assert trt.get_plugin_registry().register_creator(newer, "hubkv")
        continue
    try:
        load_plugins(trt, Path(file))
        print("loaded")
    except ValueError as error:
        print(error)
"""


def test_the_plugin_library_is_loaded_once_or_refused(tmp_path: Path) -> None:
    """In TensorRT's own registry: no file, no library, one with plugins of another version, ours, ours again."""
    pytest.importorskip("tensorrt_lean_bindings")
    (tmp_path / "text.so").write_text("no library")
    ours = str(harness.host_only())
    arguments = [str(tmp_path / "none.so"), str(tmp_path / "text.so"), "newer", str(tmp_path / "text.so"), ours, ours]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plugin library", "loaded"))]
    expected = [
        "none.so is not there: build it",
        "text.so: TensorRT finds no HubKVRefine, HubKVSelect, HubKVCompact, HubKVPlan, HubKVAttend of version 1 in it;",
        "HubKVAttend of version 1 in it (there are HubKVSelect 2); ",
        "loaded",
        "loaded",
    ]
    assert len(lines) == len(expected), done.stdout
    for line, part in zip(lines, expected, strict=True):
        assert part in line
