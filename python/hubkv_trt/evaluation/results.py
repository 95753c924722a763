# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: a file of lines, one for each sample, method and ratio, that only grows."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FILE = "results.jsonl"
SCHEMA = 1

Key = tuple[str, int, str, str, float]
"""Task, index, method, scope, ratio."""


@dataclass(frozen=True)
class Answer:
    """What one question gave.

    Attributes:
        nll: nats of the right answer's tokens, summed.
        tokens: how many of them were counted.
        kl: KL(full || compressed) of the next token in nats, mean over the tokens of the full cache's own answer (of
            the right answer where nothing is generated).
        agreement: share of these tokens that are the compressed cache's first choice, too.
        right: 0..1; None where nothing is generated.
        text: what was generated.
    """

    nll: float
    tokens: int
    kl: float
    agreement: float
    right: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class Cell:
    """One sample, compressed one way.

    Attributes:
        task, index: of the sample.
        method: name of ``methods.Method``, or ``full``.
        scope: of the budget.
        ratio: r asked for.
        effective_ratio: r that protection left, and rows for evicted pairs and their bias: 1 - stored rows / pairs.
        tokens: T of the context.
        protected: share of the stored rows that protection takes.
        rows: stored rows of each layer and head, L lists of Hkv.
        answers: to the sample's questions, in order.
    """

    task: str
    index: int
    method: str
    scope: str
    ratio: float
    effective_ratio: float
    tokens: int
    protected: float
    rows: list[list[int]]
    answers: list[Answer]

    @property
    def key(self) -> Key:
        return self.task, self.index, self.method, self.scope, self.ratio

    @property
    def nll(self) -> float:
        """Nats a token of the right answer, mean over questions."""
        return float(np.mean([a.nll / a.tokens for a in self.answers]))

    @property
    def kl(self) -> float:
        """Mean over questions."""
        return float(np.mean([a.kl for a in self.answers]))

    @property
    def agreement(self) -> float:
        """Mean over questions."""
        return float(np.mean([a.agreement for a in self.answers]))

    @property
    def accuracy(self) -> float | None:
        """Mean over the questions that were answered; None where none was."""
        right = [a.right for a in self.answers if a.right is not None]
        return float(np.mean(right)) if right else None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Cell:
        """From the JSON of a line."""
        return cls(**{**data, "answers": [Answer(**answer) for answer in data["answers"]]})


@dataclass
class Results:
    """The file of an evaluation, read.

    Attributes:
        headers: of each run that wrote to it: settings, versions, command.
        cells: by key, in the order they were written.
    """

    headers: list[dict[str, Any]] = field(default_factory=list)
    cells: dict[Key, Cell] = field(default_factory=dict)

    def half(self, which: str) -> Results:
        """The samples of even (``first``) or odd (``second``) index; ``all`` of them."""
        if which == "all":
            return self
        odd = {"first": 0, "second": 1}[which]
        return Results(self.headers, {key: cell for key, cell in self.cells.items() if cell.index % 2 == odd})


def load_results(directory: str | os.PathLike[str]) -> Results:
    """Reads what is there. A last line that a kill tore is left out.

    Raises:
        FileNotFoundError: there are no results.
        ValueError: another line is damaged, or of another version.
    """
    return _read(Path(directory) / FILE)[0]


class ResultsFile:
    """Appends to the results in a directory; one process at a time.

    Args:
        directory: made where it is missing.
        header: settings that all lines of the file share under ``settings``, and what describes this run.

    Attributes:
        results: what was there.

    Raises:
        ValueError: the results that are there were made with other settings.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE
        self.results, size = _read(self.path) if self.path.exists() else (Results(), 0)
        for old in self.results.headers:
            for name, value in header["settings"].items():
                if old["settings"].get(name) != value:
                    raise ValueError(
                        f"output: {self.path} was made with {name} {old['settings'].get(name)!r}, not {value!r}: "
                        "name another directory"
                    )
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, size)
        self._write([{"kind": "header", "schema": SCHEMA, **header}])

    def add(self, cells: Iterable[Cell]) -> None:
        """Writes lines, in one piece."""
        cells = list(cells)
        self._write([{"kind": "cell", **dataclasses.asdict(cell)} for cell in cells])
        self.results.cells.update({cell.key: cell for cell in cells})

    def close(self) -> None:
        os.close(self._file)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def _read(path: Path) -> tuple[Results, int]:
    """The results, and the bytes of the lines that are whole."""
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    results = Results()
    for number, line in enumerate(data[:size].splitlines(), 1):
        try:
            item = json.loads(line)
            kind = item.pop("kind")
            if kind == "header":
                if item["schema"] != SCHEMA:
                    raise ValueError(f"schema {item['schema']} is not {SCHEMA}")
                results.headers.append(item)
            else:
                cell = Cell.of(item)
                results.cells[cell.key] = cell
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"results: {path}, line {number}: not a line of an evaluation ({error})") from None
    return results, size
