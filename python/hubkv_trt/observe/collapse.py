# SPDX-License-Identifier: Apache-2.0
"""Selection collapse: how many rows of each head top-p keeps by different measures, and what calibration makes of it.

engine = load_engine("demo/engine")
found = observe_collapse(collect_decoding(engine, token_ids, HardKVConfig()))
print(json.dumps(found.to_dict()))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Importance, require
from ..ops import calibrate_top_p, select_ragged
from .decoding import Decoding

MASSES = (0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Selection:
    """What top-p keeps by one measure. Rows are candidates; protected ones are among them.

    Attributes:
        importance: the measure that orders the rows of a head.
        p: mass to be kept.
        calibrated: of the calibrated distribution; False: of the measure as it is.
        minimum, median, mean, maximum: rows of a head.
        share: of the candidates of all heads.
        near: share of the heads that keep between half and twice n*.
        mass: of a head's plain attention among its candidates that the rows hold, mean over heads.
        worst_mass: of the head with least.
        rows: of each head, [L][Hkv].
    """

    importance: str
    p: float
    calibrated: bool
    minimum: int
    median: float
    mean: float
    maximum: int
    share: float
    near: float
    mass: float
    worst_mass: float
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collapse:
    """Of one text.

    Attributes:
        tokens: T.
        candidates: of each head.
        protected: the first of them.
        query_window: queries of each query head that judge.
        selections: by p, then measure, then as it is and calibrated. n* are the rows of ``vanilla`` as it is.
    """

    tokens: int
    candidates: int
    protected: int
    query_window: int
    selections: tuple[Selection, ...]

    @property
    def heads(self) -> int:
        """L*Hkv."""
        return sum(map(len, self.selections[0].rows))

    def find(self, importance: Importance, p: float, calibrated: bool) -> Selection:
        """The selection of that name.

        Raises:
            StopIteration: there is none.
        """
        wanted = (importance.value, p, calibrated)
        return next(s for s in self.selections if (s.importance, s.p, s.calibrated) == wanted)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self)


def observe_collapse(state: Decoding, masses: Sequence[float] = MASSES) -> Collapse:
    """Selects by every measure, with and without calibration, without budgets or a least number of rows.

    Args:
        state: from ``collect_decoding``.
        masses: p, each in (0, 1].

    Raises:
        ValueError: ``masses`` is empty or has a value out of range.
    """
    require(len(masses) > 0 and all(0 < p <= 1 for p in masses), "masses", list(masses), "one or more in (0, 1]")
    scored = {importance: state.score(importance) for importance in Importance}
    selections: list[Selection] = []
    for p in masses:
        raw, *_ = scored[Importance.VANILLA]
        anchor = _counts(raw, scored[Importance.VANILLA], state, p)  # n*
        for importance, scores in scored.items():
            for calibrated in (False, True):
                counts = _counts(scores[0] if calibrated else scores[1], scores, state, p)
                selections.append(_selection(importance, p, calibrated, counts, anchor, scores, state))
    protected = min(state.config.sink_tokens, state.candidates)
    return Collapse(state.tokens, state.candidates, protected, state.queries.shape[1], tuple(selections))


def _counts(anchor: Tensor, scores: tuple[Tensor, Tensor, Tensor, Tensor], state: Decoding, p: float) -> Tensor:
    """int32 [L*Hkv]. ``calibrate_top_p`` leaves the temperature at 1 where the anchor is what it selects by."""
    _, transformed, positions, offsets = scores
    sinks, layers = state.config.sink_tokens, state.model.num_layers
    counts, _, _ = calibrate_top_p(anchor, transformed, positions, offsets, layers, p, sinks, 0, 0, 0, False)
    return counts


def _selection(
    importance: Importance,
    p: float,
    calibrated: bool,
    counts: Tensor,
    anchor: Tensor,
    scores: tuple[Tensor, Tensor, Tensor, Tensor],
    state: Decoding,
) -> Selection:
    raw, transformed, positions, offsets = scores
    indices, ends = select_ragged(transformed, positions, offsets, counts, int(counts.sum()), state.config.sink_tokens)
    heads = torch.repeat_interleave(ends.diff())
    attention = raw.double().exp()
    held = torch.zeros(counts.numel(), dtype=torch.float64)
    held.index_add_(0, heads, attention[offsets[heads] + indices])
    mass = (held / attention.view(counts.numel(), -1).sum(1)).numpy()
    rows: NDArray[np.int32] = counts.numpy()
    near = (2 * counts >= anchor) & (counts <= 2 * anchor)
    return Selection(
        importance=importance.value,
        p=p,
        calibrated=calibrated,
        minimum=int(rows.min()),
        median=float(np.median(rows)),
        mean=float(rows.mean()),
        maximum=int(rows.max()),
        share=float(rows.sum() / raw.numel()),
        near=float(near.double().mean()),
        mass=float(mass.mean()),
        worst_mass=float(mass.min()),
        rows=tuple(tuple(layer) for layer in rows.reshape(state.model.num_layers, -1).tolist()),
    )
