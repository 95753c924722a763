# SPDX-License-Identifier: Apache-2.0
"""The figures of benchmarks/stages.py and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass

import common
from ragged import SHAPES

COLD_BYTES = 64 * common.MIB
"""More than a cache of the machine holds: rows below this may be read from one."""


@dataclass
class Cell:
    """Figures of one (shape, T); seconds, and bytes of one call."""

    tokens: int
    score_layers: int
    row_layers: int
    batch: int
    kept_bytes: int
    padding: float  # rows that torch attends to, over the rows kept
    ours: dict[str, common.Timing]
    torch: dict[str, common.Timing]
    num_bytes: dict[str, int]


def report(name: str, cells: list[Cell], copy: common.Bandwidth) -> str:
    """The tables of one shape."""
    scores, rows = [], []
    for c in cells:
        pairs = c.num_bytes["refine"] // 8
        both = c.ours["refine"].best + c.ours["select"].best
        peer = c.torch["refine"].best + c.torch["select"].best if c.torch else 0.0
        scores.append(
            [
                f"{c.tokens}",
                c.score_layers,
                *(common.human_seconds(c.ours[x].best) for x in ("refine", "select")),
                *(share(c, x, copy) for x in ("refine", "select")),
                f"{both / pairs * 1e9:.2f}",
                *(common.human_seconds(c.torch[x].best) if c.torch else "-" for x in ("refine", "select")),
                f"{peer / both:.1f}x" if c.torch else "-",
            ]
        )
        rows.append(
            [
                f"{c.tokens}",
                c.row_layers,
                f"{c.kept_bytes / common.MIB:.0f}" + "*" * (c.kept_bytes < COLD_BYTES),
                common.human_seconds(c.ours["compact"].best),
                share(c, "compact", copy),
                ratio(c, "compact"),
                c.batch,
                common.human_seconds(c.ours["attend"].best),
                share(c, "attend", copy),
                ratio(c, "attend"),
                f"{c.padding:.2f}" if c.torch else "-",
            ]
        )
    return "\n\n".join(
        [
            f"### {name}: {SHAPES[name].text}",
            common.table(
                [
                    "T",
                    "layers",
                    "refine",
                    "select",
                    "refine % of copy",
                    "select % of copy",
                    "ns/pair",
                    "torch refine",
                    "torch select",
                    "torch / ours",
                ],
                scores,
            ),
            common.table(
                [
                    "T",
                    "layers",
                    "kept MiB",
                    "compact",
                    "% of copy",
                    "torch / ours",
                    "B",
                    "attend, all layers",
                    "% of copy",
                    "torch / ours",
                    "padded rows",
                ],
                rows,
            ),
        ]
    )


def share(c: Cell, stage: str, copy: common.Bandwidth) -> str:
    return f"{100 * c.num_bytes[stage] / c.ours[stage].best / copy.best:.0f}"


def ratio(c: Cell, stage: str) -> str:
    return f"{c.torch[stage].best / c.ours[stage].best:.1f}x" if c.torch else "-"


def targets(cells: list[Cell], copy: common.Bandwidth) -> str:
    """Reached or not, over all cells of the run."""
    rows = []
    if all(c.torch for c in cells):
        faster = [
            sum(c.torch[x].best for x in ("refine", "select")) / sum(c.ours[x].best for x in ("refine", "select"))
            for c in cells
        ]
        rows.append(["refine + select over torch", ">= 10x", f"{min(faster):.1f}x .. {max(faster):.1f}x"])
    for stage in ("compact", "attend"):
        cold = [c for c in cells if stage == "attend" or c.kept_bytes >= COLD_BYTES]
        found = [100 * c.num_bytes[stage] / c.ours[stage].best / copy.best for c in cold]
        if found:
            rows.append([f"{stage}, bytes/s over copy", ">= 60 %", f"{min(found):.0f} .. {max(found):.0f} %"])
    costs = [sum(c.ours[x].best for x in ("refine", "select")) / (c.num_bytes["refine"] // 8) * 1e9 for c in cells]
    rows.append(["refine + select per KV pair", "constant", f"{min(costs):.2f} .. {max(costs):.2f} ns"])
    return common.table(["what", "target", "found (all cells)"], rows)
