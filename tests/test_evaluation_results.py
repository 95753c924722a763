# SPDX-License-Identifier: Apache-2.0
"""The file of an evaluation loses nothing and measures nothing twice; its report pairs what belongs together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doors import TEXT, assert_alike, sample
from hubkv_trt.cli import main
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.evaluation.methods import Method
from hubkv_trt.evaluation.report import report, summarize
from hubkv_trt.evaluation.results import FILE, Answer, Cell, ResultsFile, load_results
from hubkv_trt.evaluation.run import Evaluation, header, run
from hubkv_trt.evaluation.sample import Sample


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> Engine:
    return load_engine(tiny_engine("llama"))


# ---- the file --------------------------------------------------------------------------------------------------------


def evaluation(**changes: Any) -> Evaluation:
    values = {
        "methods": (Method.parse("gate"), Method.parse("gate+hubkv")),
        "ratios": (0.5, 0.8),
        "samples": 2,
        "tokens": 9,
    }
    return Evaluation(**{**values, **changes})


SOURCES = {task: lambda index, task=task: sample(task, index) for task in ("doors", "gates")}


@pytest.fixture(scope="module")
def output(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that ran to its end."""
    directory = tmp_path_factory.mktemp("evaluation")
    run(engine, evaluation(), SOURCES, directory)
    return directory


def test_tasks_take_turns(output: Path) -> None:
    cells = list(load_results(output).cells.values())
    order = list(dict.fromkeys((c.task, c.index) for c in cells))
    assert order == [("doors", 0), ("gates", 0), ("doors", 1), ("gates", 1)]
    assert len(cells) == 4 * 5


@pytest.mark.parametrize("left_out", [1, 300, 1500])
def test_what_was_stopped_goes_on(left_out: int, output: Path, engine: Engine, tmp_path: Path) -> None:
    """Killed at any byte: whole lines stay, a torn one is measured anew, and the end is the same."""
    whole = (output / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-left_out])
    before = load_results(tmp_path)
    results = run(engine, evaluation(), SOURCES, tmp_path)
    assert list(before.cells.items()) == list(results.cells.items())[: len(before.cells)]
    assert results.cells == load_results(tmp_path).cells
    assert_alike(results.cells.values(), load_results(output).cells.values())
    assert len(results.headers) == len(before.headers)
    assert len(load_results(tmp_path).headers) == 2


def test_more_is_added_and_nothing_measured_twice(output: Path, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes((output / FILE).read_bytes())
    more = evaluation(ratios=(0.5, 0.7), half="second")
    results = run(engine, more, {"doors": SOURCES["doors"]}, tmp_path)
    new = list(results.cells.values())[20:]
    assert [(c.task, c.index, c.method, c.ratio) for c in new] == [
        ("doors", 1, "gate", 0.7),
        ("doors", 1, "gate+hubkv", 0.7),
    ]
    assert {c.index for c in results.half("first").cells.values()} == {0}


def test_other_settings_go_elsewhere(output: Path, engine: Engine) -> None:
    size = (output / FILE).stat().st_size
    with pytest.raises(ValueError, match=r"was made with seed 0, not 5: name another directory"):
        run(engine, evaluation(seed=5), SOURCES, output)
    assert (output / FILE).stat().st_size == size


def test_a_damaged_line_is_named(output: Path, tmp_path: Path) -> None:
    lines = (output / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join([lines[0], lines[1][:50] + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 2: not a line of an evaluation"):
        load_results(tmp_path)


def test_a_sample_that_fails_leaves_the_others(engine: Engine, tmp_path: Path) -> None:
    def broken(index: int) -> Sample:
        return dataclasses.replace(sample("gates", index), context=TEXT * 10)

    with pytest.raises(ValueError, match="at most max_input_len = 512"):
        run(engine, evaluation(), {"doors": SOURCES["doors"], "gates": broken}, tmp_path)
    assert len(load_results(tmp_path).cells) == 5


# ---- the report ------------------------------------------------------------------------------------------------------


def cell(method: str, index: int, nll: float, ratio: float = 0.9) -> Cell:
    answers = [Answer(4 * nll, 4, 0.1, 0.5, 1.0, "yes"), Answer(2 * nll, 2, 0.3, 1.0, None, None)]
    return Cell("doors", index, method, "model", ratio, ratio, 100, 0.2, [[5, 5]], answers)


def test_differences_are_paired_by_context(tmp_path: Path, engine: Engine) -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(0, 100, 30)  # contexts differ far more than methods
    file = ResultsFile(tmp_path, header(engine, evaluation()))
    for i, nll in enumerate(hard):
        file.add(
            [cell("full", i, nll, 0.0), cell("gate", i, nll + 2), cell("gate+hubkv", i, nll + 1 + 0.1 * rng.random())]
        )
        if i != 7:
            file.add([cell("gate+placebo", i, nll + 2 + rng.normal())])
    file.close()
    results = load_results(tmp_path)
    rows = summarize(results)
    refined = rows["model", "doors", 0.9, "gate+hubkv"]
    assert refined.base is not None
    assert refined.placebo is not None
    assert (refined.base.other, refined.placebo.other) == ("gate", "gate+placebo")
    assert (refined.base.nll.contexts, refined.placebo.nll.contexts) == (30, 29)
    assert -1 < refined.base.nll.low < refined.base.nll.mean < refined.base.nll.high < -0.9
    assert refined.base.adjusted == pytest.approx(3 * refined.base.p)  # the smallest of three
    assert rows["model", "doors", 0.9, "gate"].base is None
    assert rows["model", "doors", 0.9, "gate+placebo"].placebo is None
    text = report(results)
    assert "## doors, scope model" in text
    assert "over the 3 comparisons" in text
    assert text.count(" gate+hubkv |") == 1


def test_rows_for_evicted_pairs_are_held_against_dropping(tmp_path: Path, engine: Engine) -> None:
    file = ResultsFile(tmp_path, header(engine, evaluation()))
    means = {"gate": 3, "gate+hubkv": 2, "gate+placebo": 3, "gate+hubkv+summarize": 1, "gate+placebo+summarize": 1.5}
    for i in range(8):
        file.add([cell("full", i, 0.5, 0.0), *(cell(name, i, nll + 0.01 * i) for name, nll in means.items())])
    file.close()
    rows = summarize(load_results(tmp_path))
    others = {
        name: tuple(None if c is None else c.other for c in (row.base, row.placebo))
        for (_, _, _, name), row in rows.items()
    }
    assert others == {
        "full": (None, None),
        "gate": (None, None),
        "gate+hubkv": ("gate", "gate+placebo"),
        "gate+placebo": ("gate", None),
        "gate+hubkv+summarize": ("gate+hubkv", "gate+placebo+summarize"),
        "gate+placebo+summarize": ("gate+placebo", None),
    }
    found = rows["model", "doors", 0.9, "gate+hubkv+summarize"].base
    assert found is not None
    assert found.nll.mean == pytest.approx(-1)


def test_command(tiny_engine: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--output", str(tmp_path)]
    measure = [
        *arguments, "--engine", str(tiny_engine("llama")), "--tasks", "continuation",
        "--methods", "gate,gate+hubkv+merge,random", "--ratios", "0.6", "--tokens", "300", "--samples", "2",
        "--scopes", "model,layer",
    ]  # fmt: skip
    assert main(measure) == 0
    first = (tmp_path / FILE).read_bytes()
    assert main(measure) == 0  # nothing is missing
    assert (tmp_path / FILE).read_bytes().startswith(first)
    assert "14 measurements" in capsys.readouterr().out
    assert main([*arguments, "--report"]) == 0
    assert "## continuation, scope layer" in capsys.readouterr().out
    assert (tmp_path / "report.md").read_text().startswith("# Evaluation")
    assert main([*arguments, "--tasks", "riddles"]) == 2
    assert "riddles: not of passkey" in capsys.readouterr().err


def test_command_with_a_dataset(
    tiny_engine: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of a file count from 0 in each of its tasks; a short file has fewer than were asked for."""
    lines = [
        f'{{"context": "{TEXT}", "question": "Code {i}?", "answers": ["7214"], "task": "doors"}}' for i in range(3)
    ]
    (tmp_path / "doors.jsonl").write_text("\n".join(lines))
    arguments = ["eval", "--output", str(tmp_path), "--engine", str(tiny_engine("llama")), "--tasks", ""]
    arguments += ["--dataset", str(tmp_path / "doors.jsonl"), "--methods", "gate", "--ratios", "0.5", "--no-generate"]
    assert main([*arguments, "--samples", "2"]) == 0
    assert [c.key[:3] for c in load_results(tmp_path).cells.values()] == [
        ("doors", i, method) for i in range(2) for method in ("full", "gate")
    ]
    assert main([*arguments, "--samples", "9"]) == 0
    assert len(load_results(tmp_path).cells) == 6
    capsys.readouterr()
