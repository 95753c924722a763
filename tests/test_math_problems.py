# SPDX-License-Identifier: Apache-2.0
"""The runner for files of math problems."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PROBLEMS = [{"problem": "What is 6 times 7?", "answer": "042"}, {"problem": "Half of one?", "answer": "\\frac{1}{2}"}]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import math_problems

    return math_problems


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("so \\boxed{41}, no, \\boxed{42}", "042", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{\\dfrac{\\sqrt{3}}{2}}", "$\\dfrac{\\sqrt{3}}{2}$", True),
        ("\\boxed{1{,}000}", "1000", True),
        ("it is 7, then 12.", "12", True),
        ("\\boxed{x + 1}", "x+1", True),
        ("\\boxed{x + 2}", "x+1", False),
        ("", "1", False),
        ("\\boxed{}", "", False),
        ("\\boxed{1/0}", "1", False),
    ],
)
def test_answers(runner: Any, text: str, answer: str, right: bool) -> None:
    assert runner.same(runner.boxed(text), answer) is right


def test_files(runner: Any, tmp_path: Path) -> None:
    expected = [(p["problem"], p["answer"]) for p in PROBLEMS]
    (tmp_path / "a.json").write_text(json.dumps(PROBLEMS))
    other = [{"problem_statement": p, "golden_answer": a, "subject": "x"} for p, a in expected]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, other)) + "\n")
    assert runner.load(tmp_path / "a.json") == runner.load(tmp_path / "b.jsonl") == expected
    for text in ('[{"problem": "x"}]', "[1]", "{", '{"problem": 1}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ValueError, match=r"^data: .*c\.json: not a list or lines of objects with one of problem"):
            runner.load(tmp_path / "c.json")


def test_two_problems(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    data, out = tmp_path / "two.json", tmp_path / "out.json"
    data.write_text(json.dumps(PROBLEMS))
    cascade = "p=0.8,query_window=8,interval=16,recent=16,layer_budget=48"
    command = [sys.executable, str(BENCHMARKS / "math_problems.py"), "--data", str(data), "--max-tokens", "80",
               "--engine", str(tiny_engine("llama")), "--decode-compression", cascade, "--samples", "2",
               "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "of 4 right" in done.stdout
    results = json.loads(out.read_text())["results"]
    assert [r["answer"] for r in results] == ["042", "042", "\\frac{1}{2}", "\\frac{1}{2}"]
    assert any(r["stats"]["condensations"] for r in results)
