# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found, as figures (needs matplotlib, of the extra ``eval``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import HubKVConfig
from ..engine.directory import Engine
from ..observe.collect import collect_scores
from ..observe.plots import check_plots
from ..reference.refine import hubs
from .methods import FULL
from .results import Cell, Results
from .statistics import bootstrap

_STYLES = ("o-", "s-", "^-", "D-", "x--", "v--", "P:", ".:")
_RESAMPLES = 2000  # of the contexts
_MAX_COLUMNS = 4  # of tasks
_MAX_PANELS = 8  # of heat maps
_METRICS: tuple[tuple[str, Callable[[Cell], float | None]], ...] = (
    ("accuracy", lambda cell: cell.accuracy),
    ("NLL, nats a token", lambda cell: cell.nll),
)


def plot_report(results: Results, directory: str | Path) -> list[Path]:
    """Draws ``quality-SCOPE.svg`` and ``rows-SCOPE.svg`` for each scope that was evaluated.

    Args:
        results: with one cell or more of a compressed context.
        directory: is there.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing was compressed.
    """
    check_plots()
    cells = list(results.cells.values())
    compressed = [cell for cell in cells if cell.method != FULL]
    if not compressed:
        raise ValueError("results: no cell of a compressed context is among them; there is nothing to draw")
    written = []
    for scope in sorted({cell.scope for cell in compressed}):
        of_scope = [cell for cell in compressed if cell.scope == scope]
        for name, draw in (("quality", _quality), ("rows", _rows)):
            path = Path(directory) / f"{name}-{scope}.svg"
            _save(draw(of_scope, [cell for cell in cells if cell.method == FULL]), path)
            written.append(path)
    return written


def plot_scores(
    engine: Engine,
    token_ids: Sequence[int],
    path: str | Path,
    *,
    layer: int,
    head: int,
    first: int = 0,
    count: int = 160,
) -> None:
    """Draws the scores of one head for ``count`` tokens from ``first`` on, its hubs marked, protection shaded.

    Args:
        engine: one with HubKV.
        token_ids: T of them, all read.
        path: of the file; its suffix names the format.
        layer, head: of L and Hkv.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such head or token, or ``collect_scores`` refuses engine or text.
    """
    check_plots()
    scores = collect_scores(engine, token_ids)
    for name, value, size in (("layer", layer, scores.shape[0]), ("head", head, scores.shape[1]),
                              ("first", first, scores.shape[2])):  # fmt: skip
        if not 0 <= value < size:
            raise ValueError(f"{name}: {value} is not in 0..{size - 1}")
    if count < 1:
        raise ValueError(f"count: {count} is not an integer >= 1")
    assert engine.config.hubkv is not None
    _save(_scores(scores[layer, head].numpy(), engine.config.hubkv, f"layer {layer}, head {head}", first, count), path)


def _quality(cells: Sequence[Cell], full: Sequence[Cell]) -> Any:
    """For each task accuracy above (where answers were generated) and NLL below."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    columns, blocks = min(len(tasks), _MAX_COLUMNS), -(-len(tasks) // _MAX_COLUMNS)
    figure = _figure(3.4 * columns, 5.4 * blocks + 0.4)
    grid = figure.subplots(len(_METRICS) * blocks, columns, squeeze=False)
    for metric, (label, measure) in enumerate(_METRICS):
        for place in range(blocks * columns):
            axes = grid[len(_METRICS) * (place // columns) + metric, place % columns]
            task = tasks[place] if place < len(tasks) else ""
            for i, method in enumerate(methods):
                curve = _curve([c for c in cells if (c.task, c.method) == (task, method)], measure)
                if curve:
                    ratios, means, lows, highs = zip(*curve, strict=True)
                    (line,) = axes.plot(ratios, means, _STYLES[i % len(_STYLES)], label=method, markersize=4)
                    axes.fill_between(ratios, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
            reference = [v for v in (measure(c) for c in full if c.task == task) if v is not None]
            if reference:
                axes.axhline(float(np.mean(reference)), color="black", linewidth=0.8, linestyle=":", label="full cache")
            if axes.lines:
                axes.set(title=task, xlabel="compression ratio r", ylabel=label)
                axes.grid(alpha=0.3)
            else:
                axes.set_axis_off()
    handles = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def _curve(cells: Sequence[Cell], measure: Callable[[Cell], float | None]) -> list[tuple[float, float, float, float]]:
    """(ratio, mean over contexts, its 95 % interval) in the order of the ratios."""
    found = []
    for ratio in sorted({cell.ratio for cell in cells}):
        values = [value for value in (measure(cell) for cell in cells if cell.ratio == ratio) if value is not None]
        if values:
            band = bootstrap(values, resamples=_RESAMPLES)
            found.append((ratio, band.mean, band.low, band.high))
    return found


def _rows(cells: Sequence[Cell], full: Sequence[Cell]) -> Any:
    """A heat map for each method: rows kept of each layer and head, mean over the cells of the most common ratio."""
    counts = {ratio: sum(c.ratio == ratio for c in cells) for ratio in sorted({c.ratio for c in cells})}
    ratio = max(counts, key=lambda r: (counts[r], r))
    shares = {
        method: np.mean([np.array(c.rows) / c.tokens for c in cells if (c.method, c.ratio) == (method, ratio)], axis=0)
        for method in dict.fromkeys(c.method for c in cells if c.ratio == ratio)
    }
    shown = dict(list(shares.items())[:_MAX_PANELS])
    layers, heads = next(iter(shown.values())).shape
    figure = _figure(1.3 + len(shown) * max(1.5, 0.16 * heads), max(2.6, 0.13 * layers))
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    top = max(float(share.max()) for share in shown.values())
    for axes, (method, share) in zip(grid, shown.items(), strict=True):
        image = axes.imshow(100 * share, aspect="auto", vmin=0, vmax=100 * top, interpolation="nearest")
        axes.set_title(method, fontsize="small")
        axes.set(xlabel="KV head")
    grid[0].set(ylabel="layer")
    figure.colorbar(image, ax=list(grid), label=f"rows kept, % of the tokens, r = {ratio:g}")
    return figure


def _scores(scores: NDArray[np.float32], hubkv: HubKVConfig, title: str, first: int, count: int) -> Any:
    """One head: float32 [T]."""
    marked = hubs(scores[None, None], hubkv.nms_kernel)[0, 0]
    places = np.arange(first, min(first + count, len(scores)))
    figure = _figure(10, 3)
    axes = figure.subplots()
    axes.vlines(places, 0, scores[places], color="0.6", linewidth=1)
    chosen = places[marked[places]]
    axes.plot(chosen, scores[chosen], "o", markersize=3.5, label=f"hub ({len(chosen)} of {len(places)})")
    inner = hubkv.sink_tokens, len(scores) - hubkv.window(len(scores))
    for low, high in ((0, inner[0]), (inner[1], len(scores))):
        low, high = max(low, first), min(high, int(places[-1]) + 1)
        if low < high:
            axes.axvspan(low - 0.5, high - 0.5, alpha=0.12, label="protected")
    axes.set(title=title, xlabel="token", ylabel="score", xlim=(first - 1, places[-1] + 1))
    axes.margins(y=0.05)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize="small")
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(math.ceil(width * 10) / 10, height), layout="constrained")


def _save(figure: Any, path: str | Path) -> None:
    """Text stays text in SVG, and the same figure gives the same file: no date, no random names."""
    import matplotlib

    suffix = Path(path).suffix
    with matplotlib.rc_context({"svg.hashsalt": "hubkv", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if suffix == ".svg" else None)
