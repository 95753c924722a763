# SPDX-License-Identifier: Apache-2.0
"""Selection collapse: the runtime keeps what is observed, and calibration what it promises, on a model's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubkv_trt import HardKVConfig, HubKVConfig, SamplingParams
from hubkv_trt.cli import main
from hubkv_trt.config import Importance
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.observe.collapse import Collapse, Selection, observe_collapse
from hubkv_trt.observe.decoding import Decoding, collect_decoding
from hubkv_trt.ops import calibrate_top_p
from hubkv_trt.runtime.llm import LLM

Make = Callable[..., Path]
CONFIG = HardKVConfig(query_window=16, recent=32, interval=32, layer_budget=None, upper_budget=None, min_rows=0)
PROMPT = [int(x) for x in np.random.default_rng(0).integers(3, 259, 200)]
MASSES = (0.8, 0.9, 0.99)


@pytest.fixture(scope="module")
def state(tiny_engine: Make) -> Decoding:
    return collect_decoding(load_engine(tiny_engine()), PROMPT, CONFIG)


@pytest.fixture(scope="module")
def found(state: Decoding) -> Collapse:
    return observe_collapse(state, MASSES)


@pytest.mark.parametrize("importance", Importance)
@pytest.mark.parametrize("calibrate", [False, True])
def test_rows_are_those_that_the_runtime_keeps(tiny_engine: Make, importance: Importance, calibrate: bool) -> None:
    """A generation is compressed once; its tokens up to there, given as a text, lead to the same rows of each head."""
    config = CONFIG.replace(importance=importance, calibrate=calibrate, p=0.8)
    engine = load_engine(tiny_engine())
    llm = LLM(engine, cache_bytes=1 << 24, decode_compression=config)
    params = SamplingParams(max_tokens=config.tail_tokens + 2, ignore_eos=True)
    (output,) = llm.generate([PROMPT[:100]], params, ratio=0.0)
    assert output.stats.condensations == 1
    tokens = PROMPT[:100] + output.token_ids[: config.tail_tokens]
    rows = observe_collapse(collect_decoding(engine, tokens, config), [0.8]).find(importance, 0.8, calibrate).rows
    assert np.abs(np.array(rows) - np.array(output.stats.condensed_rows)).max() <= 1  # sums in another order


def test_selections_hang_together(found: Collapse) -> None:
    assert (found.tokens, found.candidates, found.protected) == (200, 168, 4)
    assert found.heads == 6
    assert found.query_window == 16
    assert len(found.selections) == len(MASSES) * len(Importance) * 2
    for s in found.selections:
        rows = np.concatenate(s.rows)
        assert s.minimum == rows.min() >= found.protected
        assert s.maximum == rows.max() <= found.candidates
        assert (s.mean, s.median) == (pytest.approx(rows.mean()), np.median(rows))
        assert s.share == pytest.approx(rows.sum() / (found.heads * found.candidates))
        assert 0 < s.worst_mass <= s.mass <= 1 + 1e-6
    for importance in Importance:
        for calibrated in (False, True):
            rows = [found.find(importance, p, calibrated).share for p in MASSES]
            assert rows == sorted(rows)


def test_plain_attention_needs_no_calibration(found: Collapse) -> None:
    """n* are the least rows that hold p, and the most that any order of as many rows can hold."""
    for p in MASSES:
        plain = found.find(Importance.VANILLA, p, False)
        assert plain.rows == found.find(Importance.VANILLA, p, True).rows
        assert plain.near == 1
        assert plain.worst_mass >= p - 1e-6
        for importance in Importance:
            other = found.find(importance, p, False)
            if all(a <= b for a, b in zip(np.concatenate(other.rows), np.concatenate(plain.rows), strict=True)):
                assert other.mass <= plain.mass + 1e-6


@pytest.mark.parametrize("p", MASSES)
@pytest.mark.parametrize("importance", Importance)
def test_calibration_keeps_the_order_and_gives_n_the_mass(state: Decoding, importance: Importance, p: float) -> None:
    raw, transformed, positions, offsets = state.score(importance)
    fixed = (positions, offsets, state.model.num_layers, p, 0, 0, 0, 0, False)
    wanted, _, _ = calibrate_top_p(raw, raw, *fixed)
    counts, temperatures, calibrated = calibrate_top_p(raw, transformed, *fixed)
    for number, values in enumerate(calibrated.view(len(counts), -1)):
        order = transformed[offsets[number] : offsets[number + 1]].argsort(descending=True, stable=True)
        ranked = values[order].double()
        assert bool((ranked.diff() <= 0).all())
        held = float(ranked[: int(wanted[number])].sum())
        reached = p - 1e-6 <= held <= p + min(0.01, (1 - p) / 10) + 1e-6
        assert reached or counts[number] == wanted[number] or temperatures[number] == 2.0**-10


def test_the_last_tokens_judge_all_but_the_recent(tiny_engine: Make, state: Decoding) -> None:
    """Candidates' scores do not change where recent tokens change that are outside the window."""
    tokens = [*PROMPT[:-32], *reversed(PROMPT[-32:-16]), *PROMPT[-16:]]
    other = collect_decoding(load_engine(tiny_engine()), tokens, CONFIG)
    assert state.queries.shape == (3, 16, 4, 16)
    assert state.candidates == 168
    assert torch.equal(other.segment.k_rows, state.segment.k_rows)
    assert torch.equal(other.segment.positions, state.segment.positions)
    assert torch.equal(other.queries[0], state.queries[0])  # of the first layer; later ones see the change
    assert not torch.equal(other.queries[1], state.queries[1])


def test_a_dense_engine_will_do_and_wrong_input_is_refused(tiny_engine: Make, state: Decoding) -> None:
    dense = load_engine(tiny_engine(hubkv=None))
    steps: list[None] = []
    same = collect_decoding(dense, PROMPT, CONFIG, lambda: steps.append(None))
    assert torch.equal(same.queries, state.queries)
    assert len(steps) == 3
    for call, message in (
        (lambda: collect_decoding(dense, PROMPT[:32], CONFIG), "token_ids: '32 tokens' is not in 33..1024"),
        (lambda: collect_decoding(dense, PROMPT * 6, CONFIG), "token_ids: '1200 tokens' is not in 33..1024"),
        (lambda: observe_collapse(state, []), r"masses: \[\] is not one or more in"),
        (lambda: observe_collapse(state, [0.0]), r"masses: \[0.0\] is not one or more in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_command(tiny_engine: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "text.txt"
    document.write_text("The lantern is red. " * 30)
    base: list[Any] = ["observe", "--engine", tiny_engine(hubkv=HubKVConfig()), "--document", document]
    base = [*map(str, base), "--max-tokens", "120"]
    decode = [*base, "--decode-compression", "query_window=8,recent=16", "--p", "0.5,0.9"]
    assert main([*decode, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(Collapse.__dataclass_fields__)
    assert found["candidates"] == found["tokens"] - 16
    assert [(s["p"], s["importance"], s["calibrated"]) for s in found["selections"]] == [
        (p, importance.value, calibrated)
        for p in (0.5, 0.9)
        for importance in Importance
        for calibrated in (False, True)
    ]
    assert all(set(s) == set(Selection.__dataclass_fields__) for s in found["selections"])
    figure = tmp_path / "rows.svg"
    assert main([*decode, "--plot", str(figure)]) == 0
    assert "rkv, p = 0.9" in figure.read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 2 + 12
    for options, message in (
        ([*base, "--p", "0.9"], "--p: goes with --decode-compression"),
        ([*decode, "--segment-tokens", "0"], "--segment-tokens: does not go with"),
        ([*decode, "--oracle"], "--oracle: does not go with"),
    ):
        assert main(options) == 2
        assert message in capsys.readouterr().err
