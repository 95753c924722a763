# SPDX-License-Identifier: Apache-2.0
"""Samples from dataset files as they are published on Hugging Face: JSON lines, one sample a line.

for sample in read_samples("qasper.jsonl", limit=50): ...

Fields that are read (others are passed over):

    context         with question, or input (LongBench), which is then the question
    input           without a context (RULER): its last line is the question, what stands before it the context
    answers         or answer, or outputs: a text or a list of texts (SQuAD: an object with such a list as text)
    task            or dataset: name of the task; that of the file where there is none
    answer_prefix   beginning of the answer (RULER)
    max_new_tokens  of the answer (RULER)

Metrics are simple readings of the dataset's own. LongBench (arXiv 2308.14508): F1 of words for its English question
answering, and the answer as a word for classification, retrieval and counting; where it takes ROUGE, edit similarity or
a segmentation of Chinese into words, nothing is generated and NLL alone is measured. RULER (arXiv 2404.06654): all of
the answers, one of them for its question answering, as words where RULER takes any substring. All else: one of the
answers, as a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from .sample import Question, Sample

# LongBench: metric, and tokens that are generated at most.
_LONGBENCH = {
    "narrativeqa": ("f1", 128),
    "qasper": ("f1", 128),
    "multifieldqa_en": ("f1", 64),
    "hotpotqa": ("f1", 32),
    "2wikimqa": ("f1", 32),
    "musique": ("f1", 32),
    "triviaqa": ("f1", 32),
    "trec": ("contains", 64),
    "passage_count": ("contains", 32),
    "passage_retrieval_en": ("contains", 32),
    "multifieldqa_zh": ("none", 64),
    "dureader": ("none", 128),
    "vcsum": ("none", 512),
    "lsht": ("none", 64),
    "passage_retrieval_zh": ("none", 32),
    "gov_report": ("none", 512),
    "qmsum": ("none", 512),
    "multi_news": ("none", 512),
    "samsum": ("none", 128),
    "lcc": ("none", 64),
    "repobench-p": ("none", 64),
}
# RULER: the same, by the beginning of a task's name.
_RULER = {
    "niah_": ("all", 128),
    "vt": ("all", 30),
    "cwe": ("all", 120),
    "fwe": ("all", 50),
    "qa_": ("contains", 32),
}
_OTHER = ("contains", 32)


def read_samples(path: str | Path, limit: int | None = None) -> Iterator[Sample]:
    """The samples of a file, read line by line; empty lines are passed over. A sample's index is that of its line.

    Args:
        path: of a UTF-8 file of JSON lines.
        limit: samples at most.

    Raises:
        ValueError: the file cannot be read or has no sample; while it is read, with the number of the line, that one is
            not a sample.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} is not an integer >= 1")
    samples = islice(_samples(path), limit)
    first = next(samples, None)
    if first is None:
        raise ValueError(f"{path}: has no line with a sample")
    return _chain(first, samples)


def _chain(first: Sample, others: Iterator[Sample]) -> Iterator[Sample]:
    yield first
    yield from others


def _samples(path: Path) -> Iterator[Sample]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        for number, raw in enumerate(file):
            where = f"{path}, line {number + 1}"
            try:
                line = raw.decode("utf-8-sig" if number == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: is not UTF-8 text (byte {error.start} of the line)") from error
            if line.strip():
                yield _sample(_row(line, where), path.stem, number, where)


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error.msg} at column {error.colno}); a sample is one line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: is {_kind(row)}, not an object of fields")
    return row


def _sample(row: Mapping[str, Any], name: str, index: int, where: str) -> Sample:
    task = next((row[field] for field in ("task", "dataset") if isinstance(row.get(field), str)), name)
    metric, max_tokens = _measured(task)
    if "context" in row:
        context = _text(row, "context", where)
        question = _text(row, "question" if "question" in row else "input", where, may_be_empty=True)
    else:
        whole = _text(row, "input", where, "; a sample has a context and a question, or an input").rstrip()
        context, _, question = whole.rpartition("\n")
        if not context.strip():
            raise ValueError(
                f"{where}: field 'input': has one line, and the last line is the question; give a 'context'"
            )
    lead = _text(row, "answer_prefix", where, may_be_empty=True).strip() if "answer_prefix" in row else ""
    if "max_new_tokens" in row:
        max_tokens = row["max_new_tokens"]
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ValueError(f"{where}: field 'max_new_tokens': {max_tokens!r} is not an integer >= 1")
    asked = Question(question.strip(), _answers(row, where), lead, metric, max_tokens)
    return Sample(task, index, context.rstrip(), (asked,))


def _measured(task: str) -> tuple[str, int]:
    """Metric, and tokens of an answer."""
    name = task.lower()
    if name.removesuffix("_e") in _LONGBENCH:
        return _LONGBENCH[name.removesuffix("_e")]
    return next((found for beginning, found in _RULER.items() if name.startswith(beginning)), _OTHER)


def _text(row: Mapping[str, Any], field: str, where: str, hint: str = "", may_be_empty: bool = False) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        what = f"is {_kind(value)}, not a text" if field in row else "is missing"
        raise ValueError(f"{where}: field '{field}': {what}{hint}")
    if not (may_be_empty or value.strip()):
        raise ValueError(f"{where}: field '{field}': is empty{hint}")
    return value


def _answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    field = next((f for f in ("answers", "answer", "outputs") if f in row), None)
    if field is None:
        raise ValueError(f"{where}: field 'answers': is missing; a sample has answers, an answer or outputs")
    value = row[field]
    if isinstance(value, dict):
        value = value.get("text")
    values = [value] if isinstance(value, (str, int, float)) and not isinstance(value, bool) else value
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}: field '{field}': {value!r} is not a text or a list of texts")
    for each in values:
        if not isinstance(each, (str, int, float)) or isinstance(each, bool) or not str(each).strip():
            raise ValueError(f"{where}: field '{field}': {each!r} is not a text, or is empty")
    return tuple(dict.fromkeys(str(each).strip() for each in values))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
