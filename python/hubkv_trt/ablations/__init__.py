# SPDX-License-Identifier: Apache-2.0
"""What HubKV is measured against: its whole family, the attempts before it, own ideas, budget allocators, a placebo.

By name, in one call: ``refined_scores`` gives scores, ``kept_rows`` what a prompt keeps. Torch on the CPU, written to
be read; nothing here is on the serving path.

Names: those of ``PRESETS`` (parameters of the refine stage), of ``ATTEMPTS`` (functions of this folder), of
``HEAD_BUDGETS`` (rules that share rows out among heads) and ``placebo``; ``greedy_oracle`` and our own ideas
(``marginal_gain.py``) are among the attempts. The other formulas come from the walkthrough of the HubKV paper. It names
the attempts by their classes and gives no parameters of theirs: the defaults are ours, and where it leaves a formula
open the docstring says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import PRESETS, Budget, HubKVConfig, check_ratio, require
from ..refinement import refine
from .facility_location import greedy_gains, stochastic_greedy
from .head_budgets import HEAD_BUDGETS, allocate, select_rows
from .head_statistics import information_bottleneck, variance_calibration
from .marginal_gain import diminishing_returns, head_agreement, prominence
from .placebo import placebo
from .redundancy import adaptive_tau_cma, cma, streaming_submodular
from .scored import Scored
from .smoothing import community_smoothing
from .spectrum import bottleneck_svd, layerwise_residual_svd, low_rank_spectrum, residual_svd

__all__ = [
    "ATTEMPTS",
    "HEAD_BUDGETS",
    "NAMES",
    "Scored",
    "allocate",
    "attempt_parameters",
    "kept_rows",
    "refine_stage",
    "refined_scores",
    "select_rows",
]

ATTEMPTS: dict[str, Callable[..., Tensor]] = {
    "community_smoothing": community_smoothing,
    "variance_calibration": variance_calibration,
    "streaming_submodular": streaming_submodular,
    "low_rank_spectrum": low_rank_spectrum,
    "information_bottleneck": information_bottleneck,
    "residual_svd": residual_svd,
    "layerwise_residual_svd": layerwise_residual_svd,
    "bottleneck_svd": bottleneck_svd,
    "cma": cma,
    "stochastic_greedy": stochastic_greedy,
    "adaptive_tau_cma": adaptive_tau_cma,
    "greedy_oracle": greedy_gains,
    "prominence": prominence,
    "diminishing_returns": diminishing_returns,
    "head_agreement": head_agreement,
}
"""Scores -> float32 [L, Hkv, T], with the defaults of each. The plain and the head-aware NMS are presets:
``fastkvzip_nms`` and ``fastkvzip_head_nms_k5_p0.5_mild``."""

NAMES = (*PRESETS, *ATTEMPTS, *HEAD_BUDGETS, "placebo")
"""All that ``kept_rows`` knows."""


def attempt_parameters(name: str) -> dict[str, Any]:
    """The parameters of an attempt and their defaults, numbers all of them; without its seed."""
    parameters = list(inspect.signature(ATTEMPTS[name]).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.name != "seed"}


def refined_scores(
    name: str,
    scores: Tensor,
    hubkv: HubKVConfig,
    ratio: float,
    seed: int = 0,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """The scores that a method of this folder leaves to ``ops.select``.

    Args:
        name: a preset, an attempt, or ``placebo``.
        scores: float32 [L, Hkv, T], of the scorer; a score that is no number stays as it is.
        hubkv: protection; its parameters are those of the placebo. The others have their own.
        ratio: r in [0, 1), which gates presets and the placebo. At 0 nothing is refined, whatever the name.
        seed: of the placebo and of ``stochastic_greedy``.
        parameters: of an attempt (``attempt_parameters``), where they are not its defaults.

    Returns:
        float32 [L, Hkv, T], protected positions +inf.

    Raises:
        ValueError: there is no such name, the scores have another shape or type, or a parameter is out of range.
    """
    known = (*PRESETS, *ATTEMPTS, "placebo")
    require(name in known, "ablation", name, f"one of {', '.join(known)}")
    scored = Scored.of(scores, hubkv.sink_tokens, hubkv.window(scores.shape[-1]))
    if check_ratio(ratio) == 0:
        return scored.restore(scores, scores)
    if name == "placebo":
        return placebo(scores, hubkv, ratio, seed)
    if name in PRESETS:
        return refine_stage(scores, hubkv.replace(preset=name, **PRESETS[name]), ratio)
    drawn = {"seed": seed} if name == "stochastic_greedy" else {}
    values = ATTEMPTS[name](scored, **parameters, **drawn)
    return scored.restore(values, scores)


def kept_rows(
    name: str, scores: Tensor, hubkv: HubKVConfig, budget: Budget, ratio: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """What a prompt keeps under a method of this folder.

    Args:
        name: one of ``NAMES``. A rule of ``HEAD_BUDGETS`` reads scores refined with the parameters of ``hubkv``.
        scores, hubkv, ratio, seed: as in ``refined_scores``.
        budget: ``config.budget`` of the prompt.

    Returns:
        positions int32 [K], ascending within a head, and head_offsets int64 [L*Hkv + 1].

    Raises:
        ValueError: there is no such name, or scores or budget do not fit.
    """
    require(name in NAMES, "ablation", name, f"one of {', '.join(NAMES)}")
    if name in HEAD_BUDGETS:
        refined = refine_stage(scores, hubkv, ratio)
        return select_rows(refined, allocate(name, refined, budget.num_groups, budget.rows_per_group))
    return ops.select(refined_scores(name, scores, hubkv, ratio, seed), budget.num_groups, budget.rows_per_group)


def refine_stage(scores: Tensor, hubkv: HubKVConfig, ratio: float) -> Tensor:
    """HubKV with the parameters of ``hubkv``: ``refine`` of float32 [L, Hkv, T] as a prefill calls it."""
    alpha = torch.tensor([hubkv.alpha(ratio)], dtype=torch.float32)
    window = torch.tensor([hubkv.window(scores.shape[-1])], dtype=torch.int32)
    refined, _ = refine(scores, alpha, window, hubkv)
    return refined
