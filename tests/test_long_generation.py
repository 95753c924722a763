# SPDX-License-Identifier: Apache-2.0
"""The likelihoods of benchmarks/long_generation.py are those of decoding token by token, and its report runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hubkv_trt.config import HardKVConfig
from hubkv_trt.runtime.llm import LLM, SamplingParams

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CASCADE = HardKVConfig(p=0.8, query_window=8, interval=16, recent=16, layer_budget=48, upper_budget=96)


@pytest.fixture
def long_nll(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_nll

    return long_nll


@pytest.mark.parametrize("config", [None, CASCADE])
def test_forced_is_decoding(tiny_engine: Callable[..., Path], long_nll: object, config: HardKVConfig | None) -> None:
    llm = LLM(tiny_engine("llama"), decode_compression=config or CASCADE, cache_bytes=64 << 20)
    prompt = list(range(5, 55))
    params = SamplingParams(max_tokens=150, ignore_eos=True, return_log_probs=True, decode_compression=config or False)
    (output,) = llm.generate([prompt], params, ratio=0.5)
    nll, stats = long_nll.forced(llm, prompt, output.token_ids, config, 0.5)  # type: ignore[attr-defined]
    assert stats.condensations == output.stats.condensations
    if config is not None:
        assert stats.condensations >= 5
        assert np.array_equal(stats.condensed_rows, output.stats.condensed_rows)
    np.testing.assert_allclose(nll, -np.array(output.output_log_probs[1:]), atol=1e-4)  # type: ignore[index]
    llm.cache.audit()


@pytest.mark.parametrize("name", ["HARD-KV merged", "HARD-KV summarized"])
def test_condensed_rows_and_biases_are_paid_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from long_settings import settings

    for budget, row_bytes in ((48, 516), (512, 260), (1024, 1028)):
        config = settings(budget, 128, 32, row_bytes)[name]
        assert config is not None and config.condensed_rows > 0
        rows = config.layer_budget + config.condensed_rows
        assert rows * (row_bytes + 4) <= budget * row_bytes < (rows + 1) * (row_bytes + 4)


def test_intervals_are_paired(long_nll: object) -> None:
    noise = np.random.default_rng(1).normal(0, 3, 4000)
    found = long_nll.compare(noise + 0.1, noise, 16)  # type: ignore[attr-defined]
    assert found["mean"] == pytest.approx(0.1)
    assert found["low"] == pytest.approx(found["high"])
    found = long_nll.compare(noise, np.zeros(4000), 16)  # type: ignore[attr-defined]
    assert found["low"] < 0 < found["high"]
    assert found["high"] - found["low"] == pytest.approx(4 * 3 / np.sqrt(4000), rel=0.2)


def test_report(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "long_generation.py"), "--quick", "--engine", str(tiny_engine("llama")),
               "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    assert "byte ceiling" in done.stdout
    assert "over dense" in done.stdout
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1
    data = json.loads((tmp_path / "out.json").read_text())
    hard, dense = data["speed"]["HARD-KV"], data["speed"]["dense"]
    assert hard["condensations"] >= 2
    assert hard["step_rows"][-1] < dense["step_rows"][-1]
    assert hard["ceiling"] > 1 == dense["ceiling"]
    assert data["nll"]["HARD-KV"]["own"]["over_dense"]["low"] <= data["nll"]["HARD-KV"]["own"]["over_dense"]["mean"]


def test_report_on_held_out_budgets(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "held_out.py"), "--quick", "--engine", str(tiny_engine("llama")),
               "--json", str(tmp_path / "out.json")]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    assert "shuffled" in done.stdout
    nll = json.loads((tmp_path / "out.json").read_text())["nll"]
    means = {way: texts["station_handbook.txt"] for way, texts in nll.items()}
    del means["bounded"]  # no head of the tiny model comes near its bound
    assert len(set(means.values())) == len(means) == 6  # every other way keeps other rows
