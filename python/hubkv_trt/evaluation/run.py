# SPDX-License-Identifier: Apache-2.0
"""An evaluation from its settings to its file: what is missing is measured, what is there is kept."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .. import __version__
from ..config import Evicted, Scope, require
from ..engine.directory import GATE_FILE, WEIGHTS_FILE, Engine
from .evaluate import Evaluator, Setting
from .methods import FULL, Method
from .results import Results, ResultsFile
from .sample import Sample

Source = Callable[[int], Sample]
"""Index -> sample of a task."""


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured.

    Attributes:
        methods, scopes, ratios: all combinations are settings.
        samples: of each task: the indices 0..samples-1 (of which ``half`` leaves every other one).
        tokens: of a context, as tasks have it.
        seed: of tasks, random scores and placebos.
        half: ``all``, ``first`` (even indices) or ``second``.
        generate: see ``Evaluator``.
    """

    methods: tuple[Method, ...]
    ratios: tuple[float, ...]
    samples: int
    tokens: int
    scopes: tuple[Scope, ...] = (Scope.MODEL,)
    seed: int = 0
    half: str = "all"
    generate: bool = True

    def __post_init__(self) -> None:
        require(
            all(0 < r < 1 for r in self.ratios), "ratios", self.ratios, "in (0, 1); the full cache is always measured"
        )
        require(self.samples >= 1, "samples", self.samples, "an integer >= 1")
        require(self.tokens >= 1, "tokens", self.tokens, "an integer >= 1")

    @property
    def settings(self) -> list[Setting]:
        """Every method in every scope at every ratio, each once."""
        found = [Setting(m, s, r) for s in self.scopes for m in self.methods for r in self.ratios]
        return list(dict.fromkeys(found))

    @property
    def indices(self) -> list[int]:
        """Of the samples of each task."""
        first = 1 if self.half == "second" else 0
        return list(range(first, self.samples, 1 if self.half == "all" else 2))


def run(
    engine: Engine,
    evaluation: Evaluation,
    sources: Mapping[str, Source],
    output: Path,
    show: bool = False,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Results:
    """Measures what the file in ``output`` does not have, task by task in turn, so that a run may stop at any time.

    Args:
        engine: see ``Evaluator``.
        evaluation: what to measure.
        sources: samples by task.
        output: directory.
        show: progress on stderr.
        limits: how many samples a task has, where that may be less than what is asked for.

    Returns:
        All that is in the file then.

    Raises:
        ValueError: a sample does not fit the engine, or the file was made with other settings.
    """
    file = ResultsFile(output, header(engine, evaluation))
    try:
        work = list(_missing(evaluation, sources, file.results, limits))
        if not work:
            return file.results
        rows = any(method.evicted is not Evicted.DROP for method in evaluation.methods)
        evaluator = Evaluator(engine, evaluation.generate, row_bias=rows)
        cells = sum(len(settings) + full for _, _, settings, full in work)
        interval = 0.1 if sys.stderr.isatty() else 60.0  # a log gets a line a minute
        with tqdm(
            total=cells, desc="hubkv eval", unit="cell", disable=not show, smoothing=0.05, mininterval=interval
        ) as bar:
            for task, index, settings, full in work:
                bar.set_postfix_str(f"{task} {index}", refresh=False)
                sample = sources[task](index)
                require(
                    (sample.task, sample.index) == (task, index),
                    "sample",
                    (sample.task, sample.index),
                    f"{task} {index}",
                )
                found = evaluator.evaluate(sample, settings, evaluation.seed, full)
                file.add(found)
                bar.update(len(found))
        return file.results
    finally:
        file.close()


def header(engine: Engine, evaluation: Evaluation) -> dict[str, Any]:
    """The line that a run begins with. All runs of a file have the same ``settings``.

    Raises:
        ValueError: the engine is dense.
    """
    config = engine.config
    if config.hubkv is None:
        raise ValueError("engine: it is dense; build one with --hubkv")
    protection = ("sink_tokens", "window_ratio", "window_tokens", "long_context")
    return {
        "settings": {
            "model": config.model_name,
            "weights": config.files.get(WEIGHTS_FILE, ""),
            "gate": config.files.get(GATE_FILE, ""),
            "dtype": config.dtype.value,
            "protection": {name: getattr(config.hubkv, name) for name in protection},
            "tokens": evaluation.tokens,
            "seed": evaluation.seed,
            "generate": evaluation.generate,
        },
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "threads": torch.get_num_threads(),
        "versions": {
            "hubkv-trt": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def _missing(
    evaluation: Evaluation, sources: Iterable[str], done: Results, limits: Mapping[str, int]
) -> Iterator[tuple[str, int, list[Setting], bool]]:
    """Task, index, settings, and whether the full cache's cell is missing, too; one sample of each task in turn."""
    for index in evaluation.indices:
        for task in sources:
            if index >= limits.get(task, index + 1):
                continue

            def has(method: str, scope: str, ratio: float, sample: tuple[str, int] = (task, index)) -> bool:
                return (*sample, method, scope, ratio) in done.cells

            settings = [s for s in evaluation.settings if not has(s.method.name, s.scope.value, s.ratio)]
            full = not has(FULL, Scope.MODEL.value, 0.0)
            if settings or full:
                yield task, index, settings, full
