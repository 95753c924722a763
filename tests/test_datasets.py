# SPDX-License-Identifier: Apache-2.0
"""Dataset files: the shapes in which they are published, and what is said about a line that has none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hubkv_trt.evaluation.answers import score
from hubkv_trt.evaluation.datasets import read_samples
from hubkv_trt.evaluation.sample import Question, Sample

ROW = {"context": "Some text.", "question": "What?", "answer": "this"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def one(path: Path, row: Any) -> Sample:
    (sample,) = read_samples(write(path, row))
    return sample


def test_longbench(tmp_path: Path) -> None:
    row = {
        "input": "Who wrote it?", "context": "A paper.\n", "answers": ["Ann Lee", "A. Lee"], "length": 2, "_id": "7f",
        "dataset": "qasper", "language": "en", "all_classes": None,
    }  # fmt: skip
    sample = one(tmp_path / "file.jsonl", row)
    assert sample == Sample("qasper", 0, "A paper.", (Question("Who wrote it?", ("Ann Lee", "A. Lee"), "", "f1", 128),))
    assert score(sample.questions[0], "It was written by Ann Lee.") == pytest.approx(2 * 2 / (6 + 2))
    assert one(tmp_path / "hotpotqa_e.jsonl", {**row, "dataset": None}).questions[0].metric == "f1"
    summary = one(tmp_path / "file.jsonl", {**row, "dataset": "gov_report", "input": ""})
    assert (summary.questions[0].text, summary.questions[0].metric) == ("", "none")  # ROUGE is not ours


def test_ruler_as_its_scripts_write_it(tmp_path: Path) -> None:
    text = (
        "Some special numbers are hidden in the text.\nThe grass is green.\nOne is 12.\nWhat are the special numbers?"
    )
    row = {"index": 3, "input": text, "outputs": ["12", "17"], "length": 40, "answer_prefix": " The numbers are"}
    sample = one(tmp_path / "niah_multivalue.jsonl", row)
    (question,) = sample.questions
    assert sample.context + "\n" + question.text == text
    assert (question.lead, question.answers, question.metric) == ("The numbers are", ("12", "17"), "all")
    assert score(question, "17 and 12") == 1 > score(question, "17 and 120")


def test_ruler_as_a_dataset_of_all_its_tasks(tmp_path: Path) -> None:
    row = {**ROW, "answer": ["a", "b"], "answer_prefix": "Answer:", "max_new_tokens": 9}
    path = write(tmp_path / "test.jsonl", {**row, "task": "qa_1"}, {**row, "task": "vt"}, row)
    samples = list(read_samples(path))
    assert [(s.task, s.index) for s in samples] == [("qa_1", 0), ("vt", 1), ("test", 2)]
    assert [s.questions[0].metric for s in samples] == ["contains", "all", "contains"]
    assert {s.questions[0].max_tokens for s in samples} == {9}
    assert [score(s.questions[0], "It is b.") for s in samples][::2] == [1, 1]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("this", ("this",)),
        (["this", " that", "this"], ("this", "that")),
        (42, ("42",)),
        ({"text": ["this", "that"], "answer_start": [3, 9]}, ("this", "that")),
    ],
)
def test_answers_in_any_of_their_forms(tmp_path: Path, answers: Any, expected: tuple[str, ...]) -> None:
    for field in ("answers", "answer", "outputs"):
        row = {"context": ROW["context"], "question": ROW["question"], field: answers}
        assert one(tmp_path / "a.jsonl", row).questions[0].answers == expected


def test_a_file_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "squad.jsonl"
    first = json.dumps({**ROW, "context": "caf\u00e9"}, ensure_ascii=False).encode("utf-8-sig")
    path.write_bytes(b"\n".join([first, b"\r", json.dumps(ROW).encode(), b"this is not JSON\n"]))
    samples = list(read_samples(path, limit=2))
    assert [(s.task, s.index, s.context) for s in samples] == [("squad", 0, "caf\u00e9"), ("squad", 2, "Some text.")]
    with pytest.raises(ValueError, match=r"squad.jsonl, line 4: is not JSON"):
        list(read_samples(path))
    reading = read_samples(path)
    assert [next(reading).index, next(reading).index] == [0, 2]  # the damaged line is not reached yet


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" + json.dumps(ROW).encode() + b"]", r"is a list, not an object"),
        (b"\xff\xfe", r"is not UTF-8 text \(byte 0"),
        (b'{"context": "a', r"is not JSON \(.*a sample is one line"),
        (b'{"question": "a", "answer": "b"}', r"field 'input': is missing; a sample has a context and a question"),
        (b'{"context": 7, "question": "a", "answer": "b"}', r"field 'context': is a number, not a text"),
        (b'{"context": " ", "question": "a", "answer": "b"}', r"field 'context': is empty"),
        (b'{"context": "a", "question": null, "answer": "b"}', r"field 'question': is null, not a text"),
        (b'{"context": "a", "answer": "b"}', r"field 'input': is missing"),
        (b'{"context": "a", "question": "b"}', r"field 'answers': is missing"),
        (b'{"context": "a", "question": "b", "answers": []}', r"field 'answers': \[\] is not a text or a list"),
        (b'{"context": "a", "question": "b", "answers": {"start": 3}}', r"field 'answers': None is not"),
        (b'{"context": "a", "question": "b", "answers": ["c", ""]}', r"field 'answers': '' is not a text, or is empty"),
        (b'{"context": "a", "question": "b", "answers": [true]}', r"field 'answers': True is not a text"),
        (b'{"input": "one line", "outputs": ["b"]}', r"field 'input': has one line"),
        (b'{"context": "a", "question": "b", "answer": "c", "max_new_tokens": 0}', r"field 'max_new_tokens': 0 is not"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad.jsonl, line 2: {message}"):
        list(read_samples(path))


def test_a_file_without_samples_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.jsonl: has no line with a sample"):
        read_samples(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"missing.jsonl: cannot be read \(No such file"):
        read_samples(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"limit: 0 is not"):
        read_samples(write(tmp_path / "a.jsonl", ROW), limit=0)
