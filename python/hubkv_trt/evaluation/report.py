# SPDX-License-Identifier: Apache-2.0
"""The results as tables: what each method gives, and how it differs from base and placebo on the same contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .methods import FULL, Method
from .results import Cell, Results
from .statistics import Interval, bootstrap, holm, sign_flips

Group = tuple[str, str, float, str]
"""Scope, task, ratio, method."""


@dataclass(frozen=True)
class Comparison:
    """A method against another one: paired differences of NLL in nats a token, method - other.

    Attributes:
        other: name of the method that it is held against.
        nll: mean difference over the contexts that both have.
        p: of the difference being 0.
        adjusted: p for the number of comparisons in the report.
    """

    other: str
    nll: Interval
    p: float
    adjusted: float = 1.0


@dataclass
class Row:
    """A method on a task at a ratio. ``base`` and ``placebo`` are None where it has no such partner."""

    cells: dict[int, Cell]  # by index of the sample
    base: Comparison | None = None
    placebo: Comparison | None = None


def summarize(results: Results) -> dict[Group, Row]:
    """All rows, in the order of the results, with p adjusted by Holm over all of their comparisons."""
    rows: dict[Group, Row] = {}
    for cell in results.cells.values():
        rows.setdefault((cell.scope, cell.task, cell.ratio, cell.method), Row({})).cells[cell.index] = cell
    for group, row in rows.items():
        if group[-1] == FULL:
            continue
        method = Method.parse(group[-1])
        if method == method.base:
            continue
        row.base = _against(rows, group, [method.base])
        if method.refinement != "placebo":
            row.placebo = _against(rows, group, [method.placebo, replace(method.placebo, allocator="", changes=())])
    compared = [(row, kind) for row in rows.values() for kind in ("base", "placebo") if getattr(row, kind) is not None]
    for (row, kind), adjusted in zip(compared, holm([getattr(r, k).p for r, k in compared]), strict=True):
        old = getattr(row, kind)
        setattr(row, kind, Comparison(old.other, old.nll, old.p, adjusted))
    return rows


def _against(rows: dict[Group, Row], group: Group, others: list[Method]) -> Comparison | None:
    """The method of a group against the first of others that was measured there, too."""
    scope, task, ratio, name = group
    for other in others:
        if other.name != name and (row := rows.get((scope, task, ratio, other.name))) is not None:
            return _compare(rows[group], row, other.name)
    return None


def _compare(row: Row, other: Row, name: str) -> Comparison | None:
    both = sorted(row.cells.keys() & other.cells.keys())
    if not both:
        return None
    differences = np.array([row.cells[i].nll - other.cells[i].nll for i in both])
    return Comparison(name, bootstrap(differences), sign_flips(differences))


def report(results: Results) -> str:
    """Markdown: what was run, and a table for each scope and task.

    Raises:
        ValueError: there is nothing to report.
    """
    rows = summarize(results)
    if not rows:
        raise ValueError("results: the file holds no measurement yet")
    parts = ["# Evaluation", _head(results, rows)]
    scopes = list(dict.fromkeys(scope for scope, _, _, name in rows if name != FULL)) or ["model"]
    tasks = list(dict.fromkeys(task for _, task, _, _ in rows))
    for scope in scopes:
        for task in tasks:
            of_task = {key: row for key, row in rows.items() if key[1] == task and (key[0] == scope or key[3] == FULL)}
            if of_task:
                parts += [f"## {task}, scope {scope}", _table(of_task)]
    return "\n\n".join(parts) + "\n"


def _head(results: Results, rows: dict[Group, Row]) -> str:
    header = results.headers[-1]
    settings, versions = header["settings"], header["versions"]
    compared = sum((row.base is not None) + (row.placebo is not None) for row in rows.values())
    protection = ", ".join(f"{name} {value}" for name, value in settings["protection"].items())
    return f"""\
- model {settings["model"]} ({settings["dtype"]}), weights {settings["weights"][:12]}, gate {settings["gate"][:12]};
  {", ".join(f"{name} {value}" for name, value in versions.items())}
- contexts of about {settings["tokens"]} tokens, seed {settings["seed"]}; protected: {protection}
- `{" ".join(["hubkv", *header["command"][1:]])}`, started {header["started"]}
- right: share of the questions; NLL: nats a token of the right answer; KL: nats, next token, full cache to compressed;
  same: first choices that are the full cache's; protected: share of the stored rows. All are means over contexts.
- dNLL: paired difference on the same contexts [95 % interval, bootstrap over contexts]; below 0 is better.
  The base is the scorer alone; that of `+merge` and `+summarize` the same method that drops, in the same bytes.
  p: sign flips, adjusted by Holm over the {compared} comparisons here."""


def _table(rows: dict[Group, Row]) -> str:
    header = [
        "r", "method", "contexts", "right %", "NLL", "dNLL to base", "p", "dNLL to placebo", "p", "KL", "same %",
        "protected %",
    ]  # fmt: skip
    lines = []
    for (_, _, ratio, name), row in sorted(rows.items(), key=lambda item: item[0][2]):
        cells = list(row.cells.values())
        lines.append(
            [
                f"{ratio:g}",
                name,
                str(len(cells)),
                _mean(cells, lambda c: c.accuracy, "{:.1f}", 100),
                _mean(cells, lambda c: c.nll, "{:.3f}"),
                *_difference(row.base),
                *_difference(row.placebo),
                _mean(cells, lambda c: c.kl, "{:.4f}"),
                _mean(cells, lambda c: c.agreement, "{:.1f}", 100),
                _mean(cells, lambda c: c.protected, "{:.0f}", 100),
            ]
        )
    return _markdown(header, lines)


def _mean(cells: Sequence[Cell], of: Callable[[Cell], float | None], form: str, scale: float = 1.0) -> str:
    values = [value for value in map(of, cells) if value is not None]
    return form.format(scale * float(np.mean(values))) if values else "-"


def _difference(found: Comparison | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    return [f"{found.nll.mean:+.3f} [{found.nll.low:+.3f}, {found.nll.high:+.3f}]", f"{found.adjusted:.2g}"]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * (w - 1) + ":" for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
