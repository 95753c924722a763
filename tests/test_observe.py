# SPDX-License-Identifier: Apache-2.0
"""Observations: each measure on texts whose answer is known, the whole on an engine, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt import HubKVConfig, Scope
from hubkv_trt.cli import main
from hubkv_trt.config import budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.observe import Observations, collect_scores, observe_scores
from hubkv_trt.observe.measures import autocorrelation, random_segments_covered, segments_covered, selectivity
from hubkv_trt.runtime.llm import LLM

Make = Callable[..., Path]
TOKENS = list(range(3, 200))


@pytest.fixture(scope="module")
def scores(tiny_engine: Make) -> torch.Tensor:
    return collect_scores(load_engine(tiny_engine()), TOKENS)


def test_segments() -> None:
    kept = np.zeros((2, 100), bool)  # four segments of 32, the last of 4 tokens
    assert segments_covered(kept, 32) == 0
    kept[0, [0, 1, 31]] = True
    kept[1, [32, 99]] = True
    assert segments_covered(kept, 32) == (1 + 2) / 8
    assert segments_covered(~np.zeros((2, 100), bool), 32) == 1


def test_random_segments_are_the_mean_of_draws() -> None:
    rng = np.random.default_rng(0)
    kept = np.zeros((4000, 70), bool)
    kept[:, :5] = True
    kept = rng.permuted(kept, axis=1)
    expected = random_segments_covered(np.array([5]), 70, 32)
    assert expected == pytest.approx(segments_covered(kept, 32), abs=0.01)
    assert random_segments_covered(np.array([0]), 70, 32) == 0
    assert random_segments_covered(np.array([70]), 70, 32) == 1
    assert random_segments_covered(np.array([1, 1]), 64, 32) == pytest.approx(0.5)


def test_autocorrelation_of_known_series() -> None:
    t = np.arange(4000)
    noise = np.random.default_rng(0).random(4000)
    found = autocorrelation(np.stack([np.sin(2 * np.pi * t / 8), np.zeros(4000)]), 8)
    np.testing.assert_allclose(found, [math.cos(2 * math.pi * lag / 8) / 2 for lag in range(1, 9)], atol=2e-3)
    assert max(map(abs, autocorrelation(noise[None], 8))) < 0.06
    x = np.random.default_rng(1).random(50)
    c = x - x.mean()
    assert autocorrelation(x[None], 3)[2] == pytest.approx((c[3:] * c[:-3]).sum() / (c * c).sum())


def test_selectivity_is_that_of_refine() -> None:
    x = np.random.default_rng(0).random((3, 50))
    np.testing.assert_allclose(selectivity(x), [h.std() / (h.mean() + 1e-6) for h in x])


def test_scores_are_those_that_the_product_selects_by(tiny_engine: Make, scores: torch.Tensor) -> None:
    """With the refinement off, the rows that a prompt keeps are the largest of the collected scores."""
    engine = load_engine(tiny_engine(hubkv=HubKVConfig.from_preset("fastkvzip", ratio=0.8)))
    llm = LLM(engine, cache_bytes=1 << 24)
    with llm.compress(TOKENS) as context:
        rows = np.asarray(context.stats.rows)
    hubkv, model = engine.config.hubkv, engine.config.model
    assert hubkv is not None
    found = observe_scores(scores, model, hubkv, [0.8], max_lag=4)
    kept = {k.method: k for k in found.kept}
    assert kept["base"].pairs == rows.sum() - hubkv.num_protected(len(TOKENS)) * model.num_rows_per_token
    assert kept["base"].segments == kept["refined"].segments
    inner = scores[..., hubkv.sink_tokens : len(TOKENS) - hubkv.window(len(TOKENS))].flatten(0, 1)
    threshold = inner.flatten().sort(descending=True).values[kept["base"].pairs - 1]
    assert rows.flatten().tolist() == ((inner >= threshold).sum(1) + hubkv.num_protected(len(TOKENS))).tolist()


@pytest.mark.parametrize("scope", Scope)
def test_observations_hang_together(tiny_engine: Make, scores: torch.Tensor, scope: Scope) -> None:
    model = load_engine(tiny_engine()).config.model
    hubkv = HubKVConfig(scope=scope)
    found = observe_scores(scores, model, hubkv, [0.9, 0.5, 0.75], segment_tokens=16, max_lag=5, oracle=True)
    assert json.loads(json.dumps(found.to_dict()))["tokens"] == len(TOKENS)
    assert [s.ratio for s in found.shapes] == [0, 0.9, 0.75, 0.5]
    assert 0 < found.hub_share <= 1
    for shape in found.shapes:
        assert len(shape.autocorrelation) == 5
        assert list(shape.selectivity) == sorted(shape.selectivity)
    for method in ("base", "refined", "placebo", "random", "greedy"):
        kept = [k for k in found.kept if k.method == method]
        assert [k.ratio for k in kept] == [0.9, 0.75, 0.5]
        assert [k.segments for k in kept] == sorted(k.segments for k in kept)
        protected = hubkv.num_protected(len(TOKENS)) * model.num_rows_per_token
        assert [k.pairs for k in kept] == [
            budget(model, hubkv, len(TOKENS), k.ratio).num_rows - protected for k in kept
        ]
        inner = len(TOKENS) - hubkv.num_protected(len(TOKENS))
        segments = model.num_rows_per_token * -(-inner // 16)
        pairs = np.diff([0, *(k.pairs for k in kept)])
        gained = sum(k.gain * p for k, p in zip(kept, pairs, strict=True))
        assert gained == pytest.approx(kept[-1].segments * segments)
        if method == "random":
            assert [k.coverage for k in kept] == [None] * 3
        else:
            assert all(k.coverage is not None and k.coverage <= 1 + 1e-9 for k in kept)


def test_wrong_input_is_refused(tiny_engine: Make, scores: torch.Tensor) -> None:
    engine = load_engine(tiny_engine())
    model, hubkv = engine.config.model, HubKVConfig()
    broken = scores.clone()
    broken[0, 0, 9] = torch.nan
    for call, message in (
        (lambda: observe_scores(scores[:1], model, hubkv), "scores: .* is not of the model's"),
        (lambda: observe_scores(broken, model, hubkv), "scores: .* is not finite"),
        (lambda: observe_scores(scores, model, hubkv, []), "ratios: .* is not one or more"),
        (lambda: observe_scores(scores, model, hubkv, [0.0]), "ratios: .* is not one or more"),
        (lambda: observe_scores(scores, model, hubkv, segment_tokens=0), "segment_tokens: 0 is not"),
        (lambda: observe_scores(scores, model, hubkv, max_lag=500), "max_lag: 500 is not in"),
        (lambda: observe_scores(scores, model, HubKVConfig(sink_tokens=500)), "max_lag: 32 is not in"),
        (lambda: collect_scores(engine, []), "token_ids: '0 tokens' is not in"),
        (lambda: collect_scores(engine, [3] * 513), "token_ids: '513 tokens' is not in"),
        (lambda: collect_scores(load_engine(tiny_engine(hubkv=None)), TOKENS), "engine: it is dense"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_command(tiny_engine: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "text.txt"
    document.write_text("The lantern is red. " * 30)
    base: list[Any] = ["observe", "--engine", tiny_engine(), "--document", document, "--max-tokens", 120]
    base += ["--ratios", "0.5,0.9", "--max-lag", 8, "--segment-tokens", 16]
    assert main([*map(str, base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(Observations.__dataclass_fields__)
    assert found["tokens"] <= 120
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        figure = tmp_path / f"figure{suffix}"
        assert main([*map(str, base), "--oracle", "--plot", str(figure)]) == 0
        assert figure.read_bytes().startswith(start)
    capsys.readouterr()
    assert main([*map(str, base), "--oracle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [line.split(" | ") for line in lines if line.startswith("|")]
    assert {len(row) for row in tables[:12]} == {6}
    assert [row[1].strip() for row in tables[2:7]] == ["base", "refined", "placebo", "greedy", "random"]
    assert len({len(line) for line in lines[-5:]}) == 1
    assert main([*map(str, base), "--json", "--scope", "head", "--preset", "fastkvzip"]) == 0
    kept = {k["method"]: k for k in json.loads(capsys.readouterr().out)["kept"]}
    assert kept["base"]["segments"] == kept["refined"]["segments"]
    assert main(["observe", "--engine", str(tiny_engine()), "--document", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err
