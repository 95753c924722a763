# SPDX-License-Identifier: Apache-2.0
"""Observations as figures (needs matplotlib, of the extra ``eval``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..config import Importance
from . import Observations
from .collapse import Collapse
from .measures import QUANTILES

STYLES = {"base": "o-", "refined": "s-", "placebo": "x--", "random": ".--", "greedy": "^:"}


def check_plots() -> None:
    """Raises ImportError with what to do where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot: needs matplotlib: pip install 'hubkv-trt[eval]'") from None


def plot(found: Observations, path: Path) -> None:
    """Three panels: segments covered, autocorrelation, selectivity of heads.

    Args:
        found: of a text.
        path: of the file; its suffix, .svg, .png or .pdf, names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    segments, lags, heads = figure.subplots(1, 3)
    for method in dict.fromkeys(k.method for k in found.kept):
        points = [(k.pairs, k.segments) for k in found.kept if k.method == method]
        segments.plot(*zip(*points, strict=True), STYLES[method], label=method)
    segments.set(xlabel="KV pairs kept beyond the protected", ylabel="segments covered", xscale="log")
    for shape in found.shapes:
        name = f"refined, r = {shape.ratio:g}" if shape.ratio else "base"
        values = shape.autocorrelation
        lags.plot(range(1, len(values) + 1), values, label=name)
        heads.plot([100 * q for q in QUANTILES], shape.selectivity, "o-", label=name)
    lags.set(xlabel="lag, tokens", ylabel="autocorrelation, mean over heads")
    heads.set(xlabel="percentile of heads", ylabel="selectivity, std / mean")
    for axes in (segments, lags, heads):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def plot_collapse(found: Collapse, path: Path) -> None:
    """Rows of each head, heads in the order of n*: a row of panels for each p, a panel for each measure.

    Args:
        found: of a text.
        path: of the file; its suffix, .svg, .png or .pdf, names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
    """
    check_plots()
    import matplotlib
    from matplotlib.figure import Figure

    masses = list(dict.fromkeys(s.p for s in found.selections))
    figure = Figure(figsize=(12, 3.6 * len(masses)), layout="constrained")
    panels = figure.subplots(len(masses), len(Importance), sharex=True, sharey=True, squeeze=False)
    for line, p in zip(panels, masses, strict=True):
        wanted = np.concatenate(found.find(Importance.VANILLA, p, False).rows)
        order = np.argsort(wanted, kind="stable")
        for axes, importance in zip(line, Importance, strict=True):
            axes.plot(wanted[order], color="black", linewidth=1, label="n*")
            for calibrated, marker, label in ((False, "x", "as it is"), (True, ".", "calibrated")):
                rows = np.concatenate(found.find(importance, p, calibrated).rows)
                axes.plot(rows[order], marker, markersize=4, label=label)
            axes.axhline(found.candidates, color="gray", linestyle=":", label="all")
            axes.set(title=f"{importance.value}, p = {p:g}", yscale="log")
            axes.grid(alpha=0.3)
        line[0].set(ylabel="rows kept")
    for axes in panels[-1]:
        axes.set(xlabel="heads, by n*")
    panels[0, -1].legend(fontsize="small", loc="lower right")
    with matplotlib.rc_context({"svg.hashsalt": "hubkv", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
