# SPDX-License-Identifier: Apache-2.0
"""One run of the published evaluation: its figures, as JSON data, CSV and tables of Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import require
from .entropy import token_statistics
from .heads import Heads, attend, logits
from .methods import Target, hae, top_k
from .protocol import BIN_TOKENS, KEEP_RATIOS, RANK, Cell, Protocol, evaluate
from .stream import stored_rows

SHOWN_KEEP = 0.3
"""Keep ratio of the error of each token and of the staircase, as the publication shows them."""


@dataclass(frozen=True)
class Report:
    """Of some heads over T tokens.

    Attributes:
        name: of the case.
        num_heads: H, all cases together.
        num_tokens: T.
        bin_tokens: bin_size.
        rank: k_rank.
        cells: every method at every keep ratio.
        token_error: by method, the root mean squared error of each token's output at ``SHOWN_KEEP``, first case.
        entropy: of each token, mean over the heads of the first case; T of them.
        staircase: rows that are stored after each token, of top-k and of the pipeline, at ``SHOWN_KEEP``.
        weights: attention of the first head, T lists of T.
    """

    name: str
    num_heads: int
    num_tokens: int
    bin_tokens: int
    rank: int
    cells: tuple[Cell, ...]
    token_error: dict[str, list[float]]
    entropy: list[float]
    staircase: dict[str, list[int]]
    weights: list[list[float]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, the heat map left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "weights"}

    def to_csv(self) -> str:
        """The cells, one a line."""
        text = io.StringIO()
        names = [f.name for f in dataclasses.fields(Cell)]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(cell, name) for name in names] for cell in self.cells)
        return text.getvalue()


def run(
    name: str,
    cases: Sequence[Heads],
    keep_ratios: Sequence[float] = KEEP_RATIOS,
    bin_tokens: int = BIN_TOKENS,
    rank: int = RANK,
) -> Report:
    """Evaluates heads; arguments as ``evaluate`` has them.

    Raises:
        ValueError: a parameter is out of range.
    """
    cells = evaluate(cases, keep_ratios, bin_tokens, rank)
    heads = cases[0]
    found = token_statistics(heads)
    budget = round(SHOWN_KEEP * heads.num_tokens)
    active = Protocol.FAIR.active(budget, bin_tokens, rank)
    true = attend(heads.queries, heads.keys, heads.values, heads.scale)[0]
    stored = {
        "top-k": top_k(heads, found, budget),
        "HAE + OLS": hae(heads, found, active, rank, Target.ATTENTION),
    }
    token_error = {
        method: (rows.read(heads.queries, heads.scale) - true).square().mean((0, 2)).sqrt().tolist()
        for method, rows in stored.items()
    }
    weights = logits(heads.queries[:1], heads.keys[:1], heads.scale, heads.causal).softmax(-1)[0]
    return Report(
        name=name,
        num_heads=sum(each.keys.shape[0] for each in cases),
        num_tokens=heads.num_tokens,
        bin_tokens=bin_tokens,
        rank=rank,
        cells=tuple(cells),
        token_error=token_error,
        entropy=found.entropy.mean(0).tolist(),
        staircase={
            "top-k": [min(t + 1, budget) for t in range(heads.num_tokens)],
            "HAE": list(stored_rows(heads.num_tokens, active, bin_tokens, rank)),
        },
        weights=weights.tolist(),
    )


def describe(report: Report) -> str:
    """Two tables of errors (own queries, later queries) and one of bytes."""
    head = (
        f"{report.name}: {report.num_heads} heads, {report.num_tokens} tokens, bin_size {report.bin_tokens}, "
        f"k_rank {report.rank}"
    )
    own = _table(report, "own queries", lambda cell: f"{cell.error:.3f}")
    later = _table(report, "later queries", lambda cell: f"{cell.later:.3f}")
    size = _table(report, "KiB a head", lambda cell: "-" if cell.num_bytes is None else f"{cell.num_bytes / 1024:.1f}")
    return "\n\n".join([head, own, later, size])


def _table(report: Report, corner: str, show: Any) -> str:
    keeps = list(dict.fromkeys(cell.keep for cell in report.cells))
    lines = dict.fromkeys((cell.method, cell.protocol) for cell in report.cells)
    rows = [
        [method, protocol.upper(), *(show(c) for c in report.cells if (c.method, c.protocol) == (method, protocol))]
        for method, protocol in lines
    ]
    return markdown([corner, "protocol", *(f"{keep:g}" for keep in keeps)], rows)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; the first two columns to the left."""
    require(all(len(row) == len(header) for row in rows), "rows", len(rows), f"of {len(header)} cells each")
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in [header, rule, *rows]
    )
