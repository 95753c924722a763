# SPDX-License-Identifier: Apache-2.0
"""``--dry-run``: what the TensorRT plans would be, on a machine without a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.cli import main
from hubkv_trt.engine import dry_run

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs ``hubkv build --backend tensorrt --dry-run``: (exit status, stdout, stderr). It writes nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, backend: str = "tensorrt") -> tuple[int, str, str]:
        before = sorted(tmp_path.rglob("*"))
        status = main(["build", "--dry-run", "--backend", backend, *map(str, arguments)])
        assert sorted(tmp_path.rglob("*")) == before
        return status, *capsys.readouterr()

    return call


def test_the_demo(run: Callable[..., Any], demo_model_path: Path) -> None:
    status, out, err = run("--hubkv", "--model", "demo")
    assert (status, err) == (0, "")
    assert out.strip() in (ROOT / "docs" / "tensorrt.md").read_text(), "the example there is not what is printed"
    assert "L = 30, Hq = 9, Hkv = 3, D = 64, V = 49152; bfloat16" in out
    prefill, extend = re.split(r"\n\nextend\.plan\n", out.split("prefill.plan\n")[1])
    assert "rows_per_group           int64     [1], read on the host" in prefill
    assert "input   362 weights, embedding.weight ... gate.29.b" in prefill
    assert "T 1..8192 (best at 8192), K/S 1..737280 (best at 184320)" in prefill
    assert re.findall(r"(\d+) (HubKV\w+|ATTENTION_INPUT)", prefill) == [
        ("30", "ATTENTION_INPUT"), ("1", "HubKVRefine"), ("1", "HubKVSelect"), ("1", "HubKVCompact"),
    ]  # fmt: skip
    assert "output  k_new                    bfloat16  [L, B, Tq, Hkv, D]" in extend
    assert "profile 0: B 1..16 (best at 16), Tq 1..1 (best at 1)" in extend
    assert "profile 1: B 1..16 (best at 1), Tq 1..512 (best at 512)" in extend
    assert re.findall(r"(\d+) (HubKV\w+|ATTENTION_INPUT)", extend) == [("30", "HubKVAttend")]
    sizes = {name.strip(): float(mib) for name, mib in re.findall(r"^  (\S.*?)  +([\d.]+) MiB", out, re.MULTILINE)}
    assert sizes.pop("weights, one copy for both plans") == pytest.approx(263.0)  # 134.5 million, and the gate's
    assert len(sizes) == 4
    assert all(size > 1 for size in sizes.values())


def test_options_change_it(run: Callable[..., Any], tiny_model: Make, tiny_gate: Make) -> None:
    given = ("--model", tiny_model("qwen2"), "--hubkv", "--gate", tiny_gate("qwen2"), "--max-input-len", 600)
    status, out, _ = run(
        *given, "--scope", "layer", "--weights", "embedded", "--dtype", "float16", "--max-batch-size", 3,
        "--max-extend-len", 40, "--min-ratio", 0.5, "--cache-budget", "2GiB",
    )  # fmt: skip
    assert status == 0
    assert "; float16" in out
    assert "k_rows.0 ... k_rows.2    float16   [K/L, D]" in out
    assert "T 1..600 (best at 600), K/S 1..600 (best at 300)" in out
    assert "B 1..3 (best at 1), Tq 1..40 (best at 40)" in out
    assert "3 HubKVRefine, 3 HubKVSelect, 3 HubKVCompact" in out
    assert " weights, embedding" not in out
    assert "weights, one copy in each plan" in out
    assert "in 2 GiB; dense" in out


def test_a_dense_engine(run: Callable[..., Any], tiny_model: Make) -> None:
    status, out, _ = run("--model", tiny_model("llama"))
    assert status == 0
    assert "alpha" not in out
    assert "K/L" in out
    assert re.findall(r"\d+ HubKV\w+", out) == ["3 HubKVCompact", "3 HubKVAttend"]


@pytest.mark.parametrize(
    ("arguments", "backend", "status", "message"),
    [
        ((), "eager", 2, "--dry-run: of use only together with --backend tensorrt"),
        ((), "auto", 2, "--dry-run: of use only together with --backend tensorrt"),
        (("--max-extend-len", "9"), "eager", 2, "--max-extend-len: of use only with --backend tensorrt"),
        (("--workspace-bytes", "1G"), "eager", 2, "--workspace-bytes: of use only with --backend tensorrt"),
        (("--dtype", "float32"), "tensorrt", 1, "dtype: 'float32' is not a type of TensorRT's fused attention"),
        (("--max-extend-len", "4096"), "tensorrt", 1, "max_extend_len: 4096 is not at most 1024"),
        (("--max-extend-len", "0"), "tensorrt", 1, "max_extend_len: 0"),
        (("--min-ratio", "0.5"), "tensorrt", 1, "min_ratio: 0.5 is not of use in an engine without HubKV"),
        (("--workspace-bytes", "1000"), "tensorrt", 1, "workspace_bytes: 1000 is not a number of bytes"),
        (("--timing-cache", "."), "tensorrt", 1, "timing_cache: '.' is not a file"),
        (("--max-batch-size", "9999999"), "tensorrt", 1, "max_extend_len: 512 makes k_new [L, B, Tq, Hkv, D]"),
        (("--max-batch-size", "9999999", "--max-extend-len", "1"), "tensorrt", 1, "max_batch_size: 9999999 makes"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], backend: str, status: int, message: str, run: Callable[..., Any], tiny_model: Make
) -> None:
    found, out, err = run("--model", tiny_model("llama"), *arguments, backend=backend)
    assert message in err
    assert (found, out) == (status, "")


def test_a_machine_without_any_builder_says_what_to_install(
    run: Callable[..., Any], tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in dry_run._MODULES:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    status, out, err = run("--model", tiny_model("llama"))
    assert (status, out) == (1, "")
    assert "no network builder works on this machine" in err
    assert "pip install --no-deps tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings" in err
