# SPDX-License-Identifier: Apache-2.0
"""The figures of the publication, of any case (needs matplotlib, of the extra ``eval``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..observe.plots import check_plots
from .protocol import Cell
from .report import SHOWN_KEEP

if TYPE_CHECKING:
    from .report import Report

FAIR = {
    ("top-k", ""): "o-",
    ("sliding window", ""): "x--",
    ("OLS rank k", ""): ".--",
    ("HAE, no OLS", ""): "s-",
    ("HAE + OLS, attention", "fair"): "^-",
    ("HAE + OLS, mass known", "fair"): "v:",
    ("top-k + summarize", "equal"): "*-",
}
REAL = {
    ("top-k", ""): "o-",
    ("HAE + OLS, attention", "fair"): "^-",
    ("HAE + OLS, attention", "real"): "^--",
    ("HAE, bin not yet compressed", "real"): "d:",
    ("top-k + summarize", "equal"): "*-",
}


def plot(report: Report, path: Path) -> None:
    """Six panels: errors, errors over bytes, staircase, error of each token, entropy, heat map.

    Args:
        report: of some heads.
        path: of the file; its suffix, .svg, .png or .pdf, names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    (fair, real, stairs), (tokens, entropy, heat) = figure.subplots(2, 3)
    _curves(fair, report, FAIR, lambda cell: cell.keep)
    fair.set(xlabel="keep ratio", ylabel="relative squared error", yscale="log", title="FAIR")
    _curves(real, report, REAL, lambda cell: (cell.num_bytes or 0) / 1024)
    real.set(xlabel="KiB of K and V a head", ylabel="relative squared error", yscale="log", title="REAL")
    for name, rows in report.staircase.items():
        stairs.plot(rows, label=name)
    stairs.set(xlabel="tokens seen", ylabel="rows stored", title=f"memory, keep ratio {SHOWN_KEEP:g}")
    for name, errors in report.token_error.items():
        tokens.plot(errors, label=name, linewidth=0.8)
    tokens.set(xlabel="token", ylabel="RMS error", title=f"error of each token, keep ratio {SHOWN_KEEP:g}")
    entropy.plot(report.entropy, ".", markersize=3)
    entropy.set(xlabel="token", ylabel="H(P), nats", title="entropy of each token")
    image = heat.imshow(report.weights, aspect="auto", interpolation="nearest", vmax=_bright(report.weights))
    heat.set(xlabel="key", ylabel="query", title="attention, first head")
    figure.colorbar(image, ax=heat)
    for axes in (fair, real, stairs, tokens):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _curves(axes: Any, report: Report, styles: dict[tuple[str, str], str], x: Callable[[Cell], float]) -> None:
    for (method, protocol), style in styles.items():
        cells = [c for c in report.cells if (c.method, c.protocol) == (method, protocol)]
        label = f"{method} ({protocol.upper()})" if protocol else method
        axes.plot([x(c) for c in cells], [max(c.error, 1e-6) for c in cells], style, label=label, markersize=4)


def _bright(weights: list[list[float]]) -> float:
    """The 99.5th percentile: a few weights near 1 leave the rest dark."""
    values = sorted(w for row in weights for w in row)
    return max(values[int(0.995 * (len(values) - 1))], 1e-6)
