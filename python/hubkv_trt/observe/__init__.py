# SPDX-License-Identifier: Apache-2.0
"""What the scores of a text look like, before and after the refinement: the three observations of the HubKV paper.

engine = load_engine("demo/engine")
found = observe_scores(collect_scores(engine, token_ids), engine.config.model, engine.config.hubkv)
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

from ..ablations import Scored, refine_stage
from ..ablations.facility_location import greedy_gains, local_coverage
from ..ablations.placebo import placebo
from ..config import HubKVConfig, ModelConfig, budget, require
from ..ops import select
from ..reference.refine import hubs
from .collect import collect_scores
from .measures import QUANTILES, autocorrelation, random_segments_covered, segments_covered, selectivity

__all__ = ["Kept", "Observations", "Shape", "collect_scores", "observe_scores"]

RATIOS = (0.5, 0.75, 0.9, 0.95)


@dataclass(frozen=True)
class Shape:
    """How the scores of one kind are spread.

    Attributes:
        ratio: at which they were refined; 0 is the scorer's own.
        autocorrelation: at the lags 1, 2, ..., mean over heads.
        selectivity: minimum, quartiles and maximum over the heads of std / mean.
    """

    ratio: float
    autocorrelation: tuple[float, ...]
    selectivity: tuple[float, ...]


@dataclass(frozen=True)
class Kept:
    """What one method keeps beyond the protected tokens.

    Attributes:
        method: ``base``, ``refined``, ``placebo`` (refined with hubs at random places), ``greedy`` (the oracle), or
            ``random`` (as many at random in each head as ``base``).
        ratio: r that was asked for.
        pairs: KV pairs, all heads.
        segments: share of a head's segments that hold one, mean over heads.
        gain: segments that are new against the next smaller budget (the first: against none) for each pair more.
        coverage: F of ``ablations.facility_location`` over that of the greedy oracle; None where that did not run.
    """

    method: str
    ratio: float
    pairs: int
    segments: float
    gain: float
    coverage: float | None = None


@dataclass(frozen=True)
class Observations:
    """Of one text. ``hub_share`` is that of the unprotected KV pairs; ``kept`` goes from small budgets to large."""

    tokens: int
    protected: int
    segment_tokens: int
    hub_share: float
    kept: tuple[Kept, ...]
    shapes: tuple[Shape, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self)


def observe_scores(
    scores: Tensor,
    model: ModelConfig,
    hubkv: HubKVConfig,
    ratios: Sequence[float] = RATIOS,
    *,
    segment_tokens: int = 32,
    max_lag: int = 32,
    oracle: bool = False,
) -> Observations:
    """Measures base scores and refined ones, and what the product would keep by either.

    Args:
        scores: float32 [L, Hkv, T], from ``collect_scores``.
        model: gives L and Hkv.
        hubkv: refinement, scope and protection.
        ratios: r, each in (0, 1).
        segment_tokens: tokens of a segment; segments begin behind the protected first tokens.
        max_lag: of the autocorrelation.
        oracle: also run exact greedy: seconds for 3k tokens of a small model, a hundred times as long for 32k.

    Raises:
        ValueError: scores are not finite or of another model, a parameter is out of range, or all is protected.
    """
    num_tokens = scores.shape[-1]
    heads = model.num_rows_per_token
    require(scores.shape[:-1].numel() == heads, "scores", tuple(scores.shape), f"of the model's {heads} heads")
    require(bool(scores.isfinite().all()), "scores", "a score", "finite")
    require(segment_tokens >= 1, "segment_tokens", segment_tokens, "an integer >= 1")
    require(len(ratios) > 0 and all(0 < r < 1 for r in ratios), "ratios", list(ratios), "one or more numbers in (0, 1)")
    inner = slice(hubkv.sink_tokens, num_tokens - hubkv.window(num_tokens))
    scored = Scored.of(scores[..., inner].contiguous())
    length = scored.values.shape[-1]
    require(1 <= max_lag < length, "max_lag", max_lag, f"in 1..{length - 1}, below the unprotected tokens")

    base = scored.values.flatten(0, 1).double().numpy()
    gains = greedy_gains(scored, hubkv.nms_kernel, hubkv.penalty_factor) if oracle else None
    kept: list[Kept] = []
    shapes = [_shape(0.0, base, max_lag)]
    before: dict[str, tuple[int, float]] = {}
    for ratio in sorted(ratios, reverse=True):
        plan = budget(model, hubkv, num_tokens, ratio)
        refined = refine_stage(scores, hubkv, ratio)[..., inner].contiguous()
        shapes.append(_shape(ratio, refined.flatten(0, 1).double().numpy(), max_lag))
        groups = plan.num_groups
        rows = plan.rows_per_group - hubkv.num_protected(num_tokens) * heads // groups
        control = placebo(scores, hubkv, ratio)[..., inner].contiguous()
        scores_of = {"base": scored.values, "refined": refined, "placebo": control}
        sets = {name: _kept(each, groups, rows) for name, each in scores_of.items()}
        if gains is not None:
            sets["greedy"] = _kept(gains, groups, rows)
        covered = {name: segments_covered(found, segment_tokens) for name, found in sets.items()}
        covered["random"] = random_segments_covered(sets["base"].sum(1), length, segment_tokens)
        best = _coverage(scored, sets["greedy"], hubkv) if oracle else 0.0
        segments = heads * -(-length // segment_tokens)
        for name, share in covered.items():
            last_pairs, last_share = before.get(name, (0, 0.0))
            pairs = groups * rows
            gain = (share - last_share) * segments / (pairs - last_pairs) if pairs > last_pairs else 0.0
            known = oracle and name in sets
            coverage = _coverage(scored, sets[name], hubkv) / best if known and best > 0 else None
            kept.append(Kept(name, ratio, pairs, share, gain, coverage))
            before[name] = pairs, share
    hub_share = float(hubs(scores.numpy(), hubkv.nms_kernel)[..., inner].mean())
    protected = hubkv.num_protected(num_tokens)
    return Observations(num_tokens, protected, segment_tokens, hub_share, tuple(kept), tuple(shapes))


def _kept(scores: Tensor, groups: int, rows: int) -> NDArray[np.bool_]:
    """bool [heads, n] of what select keeps of [L, Hkv, n]."""
    positions, offsets = select(scores, groups, rows)
    kept = np.zeros((len(offsets) - 1, scores.shape[-1]), bool)
    kept[np.repeat(np.arange(len(kept)), offsets.diff().numpy()), positions.numpy()] = True
    return kept


def _coverage(scored: Scored, kept: NDArray[np.bool_], hubkv: HubKVConfig) -> float:
    values = scored.values.clamp_min(0)
    return local_coverage(values, torch.from_numpy(kept).view_as(values), hubkv.nms_kernel, hubkv.penalty_factor)


def _shape(ratio: float, scores: NDArray[np.float64], max_lag: int) -> Shape:
    quantiles = np.quantile(selectivity(scores), QUANTILES)
    return Shape(ratio, tuple(autocorrelation(scores, max_lag)), tuple(map(float, quantiles)))
