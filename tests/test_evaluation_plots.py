# SPDX-License-Identifier: Apache-2.0
"""The figures of an evaluation: which are drawn, and that what they show is in the results."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hubkv_trt.engine.directory import load_engine
from hubkv_trt.evaluation.methods import FULL
from hubkv_trt.evaluation.plots import plot_report, plot_scores
from hubkv_trt.evaluation.results import Answer, Cell, Results

METHODS = ("gate", "gate+hubkv", "random")


def results(tasks: tuple[str, ...] = ("passkey", "continuation"), scopes: tuple[str, ...] = ("model",)) -> Results:
    """Four samples a task at two ratios; nothing is generated for continuation."""
    rng = random.Random(0)
    found = Results()

    def cell(task: str, index: int, method: str, scope: str, ratio: float) -> None:
        right = None if task == "continuation" else float(rng.random() > ratio)
        rows = [[round(100 * (1 - ratio) * rng.uniform(0.5, 1.5)) for _ in range(3)] for _ in range(4)]
        answers = [Answer(rng.uniform(1, 2 + ratio), 2, 0.1, 0.9, right)]
        made = Cell(task, index, method, scope, ratio, ratio, 100, 0.1, rows, answers)
        found.cells[made.key] = made

    for task in tasks:
        for index in range(4):
            cell(task, index, FULL, "model", 0.0)
            for scope in scopes:
                for method in METHODS:
                    for ratio in (0.5, 0.9):
                        cell(task, index, method, scope, ratio)
    return found


def texts(path: Path) -> list[str]:
    """What is written in a figure."""
    return [e.text.strip() for e in ElementTree.parse(path).iter() if e.tag.endswith("text") and e.text]


def test_quality_shows_every_task_and_method(tmp_path: Path) -> None:
    quality, rows = plot_report(results(), tmp_path)
    assert [quality.name, rows.name] == ["quality-model.svg", "rows-model.svg"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [quality.name, rows.name]
    written = texts(quality)
    assert written.count("passkey") == 2  # accuracy and NLL
    assert written.count("continuation") == 1  # NLL alone
    assert set(METHODS) | {"full cache"} <= set(written)
    assert {*METHODS, "layer", "KV head"} <= set(texts(rows))
    assert quality.stat().st_size < 150_000
    assert rows.stat().st_size < 100_000


def test_many_tasks_take_several_lines(tmp_path: Path) -> None:
    tasks = ("passkey", "multi_key", "key_value", "multi_hop", "paragraph_qa")
    written = texts(plot_report(results(tasks), tmp_path)[0])
    assert [written.count(task) for task in tasks] == [2] * 5


def test_each_scope_has_figures_of_its_own(tmp_path: Path) -> None:
    written = plot_report(results(("passkey",), ("model", "layer")), tmp_path)
    assert [p.name for p in written] == ["quality-layer.svg", "rows-layer.svg", "quality-model.svg", "rows-model.svg"]


def test_equal_results_give_equal_files(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    for first, second in zip(
        *(plot_report(results(("passkey",)), each) for each in (tmp_path, tmp_path / "again")), strict=True
    ):
        assert first.read_bytes() == second.read_bytes()


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    only_full = results()
    only_full.cells = {key: cell for key, cell in only_full.cells.items() if cell.method == FULL}
    with pytest.raises(ValueError, match=r"^results: no cell of a compressed context"):
        plot_report(only_full, tmp_path)
    assert not list(tmp_path.iterdir())


def test_scores_of_a_head_with_its_hubs(tmp_path: Path, tiny_engine: Callable[..., Path]) -> None:
    engine = load_engine(tiny_engine("llama"))
    tokens = list(range(3, 123))
    plot_scores(engine, tokens, tmp_path / "scores.svg", layer=1, head=0, first=10, count=50)
    written = texts(tmp_path / "scores.svg")
    assert "layer 1, head 0" in written
    (hubs,) = (re.fullmatch(r"hub \((\d+) of 50\)", text) for text in written if text.startswith("hub"))
    assert hubs
    assert 50 / 5 - 2 <= int(hubs[1]) <= 50 / 3 + 2  # a maximum of five in a row
    assert "protected" not in written
    plot_scores(engine, tokens, tmp_path / "all.svg", layer=1, head=0)
    assert "protected" in texts(tmp_path / "all.svg")
    for name, wrong in (("layer", 99), ("head", 99), ("first", 120), ("count", 0)):
        with pytest.raises(ValueError, match=rf"^{name}: {wrong} is not"):
            plot_scores(engine, tokens, tmp_path / "no.svg", **{"layer": 1, "head": 0, name: wrong})
    assert not (tmp_path / "no.svg").exists()
