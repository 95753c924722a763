# SPDX-License-Identifier: Apache-2.0
"""What a context is compressed with: a scorer, what is done to its scores, and how rows go to heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import ablations, ops
from ..config import DEFAULT_PRESET, PRESETS, Budget, HubKVConfig, Scope, Scorer, require

FULL = "full"
"""The method that keeps everything, at r = 0: what the others are held against."""

_SCORERS = {"gate": Scorer.FASTKVZIP}
_REFINEMENTS = {"base": "fastkvzip", "nms": "fastkvzip_nms", "hubkv": DEFAULT_PRESET}
_ALLOCATORS = {name.removeprefix("head_budget_"): name for name in ablations.HEAD_BUDGETS}
_PLACEBO = "placebo"


@dataclass(frozen=True)
class Method:
    """One way to compress.

    Attributes:
        scorer: gives the scores.
        refinement: a preset, an attempt of ``ablations`` or ``placebo``.
        allocator: one of ``ablations.HEAD_BUDGETS``; "" lets all pairs of a scope compete.
        changes: parameters of ``HubKVConfig`` that differ from the refinement's own, by name.
    """

    scorer: Scorer
    refinement: str = "fastkvzip"
    allocator: str = ""
    changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Method:
        """``SCORER[+REFINEMENT[:PARAMETER=VALUE...]][+ALLOCATOR]``: gate, kvzip+hubkv, gate+hubkv:gate_power=1.

        Scorers: those of ``config.Scorer``, ``gate`` is fastkvzip. Refinements: ``base`` (none), ``hubkv`` (the default
        preset), ``nms``, every preset, every attempt of ``ablations``, ``placebo``. Allocators: ``waterfill``,
        ``selectivity``, ``entropy``, ``hybrid``.

        Raises:
            ValueError: a part has no such name, or a parameter is refused.
        """
        first, *rest = text.strip().split("+")
        scorers = {**_SCORERS, **{s.value: s for s in Scorer}}
        require(first in scorers, "method", text, f"a scorer ({', '.join(scorers)}) with +REFINEMENT and +ALLOCATOR")
        refinement, allocator, changes = "fastkvzip", "", {}
        for part in rest:
            name, *parameters = part.split(":")
            if name in ablations.HEAD_BUDGETS or name in _ALLOCATORS:
                allocator = _ALLOCATORS.get(name, name)
                require(not parameters, "method", text, "without parameters of an allocator")
                continue
            known = (*_REFINEMENTS, *PRESETS, *ablations.ATTEMPTS, _PLACEBO)
            require(
                name in known, "method", text, f"of refinements {', '.join(known)}, allocators {', '.join(_ALLOCATORS)}"
            )
            refinement = _REFINEMENTS.get(name, name)
            changes = dict(_parameter(text, parameter) for parameter in parameters)
        require(
            not changes or refinement not in ablations.ATTEMPTS,
            "method",
            text,
            "an attempt without parameters of HubKV",
        )
        method = cls(scorers[first], refinement, allocator, tuple(sorted(changes.items())))
        method.hubkv(HubKVConfig(), Scope.MODEL)  # refuses what a configuration refuses
        return method

    @property
    def name(self) -> str:
        """The shortest text that ``parse`` reads as this method."""
        parts = ["gate" if self.scorer is Scorer.FASTKVZIP else self.scorer.value]
        short = {value: key for key, value in _REFINEMENTS.items()}.get(self.refinement, self.refinement)
        if short != "base" or self.changes:
            parts.append(":".join([short, *(f"{name}={value:g}" for name, value in self.changes)]))
        if self.allocator:
            parts.append(self.allocator.removeprefix("head_budget_"))
        return "+".join(parts)

    @property
    def base(self) -> Method:
        """The scorer alone."""
        return Method(self.scorer)

    @property
    def placebo(self) -> Method:
        """The same with hubs at random places."""
        return Method(self.scorer, _PLACEBO, self.allocator, self.changes)

    def hubkv(self, engine: HubKVConfig, scope: Scope) -> HubKVConfig:
        """The configuration of an engine that compresses this way; what is protected is as in ``engine``."""
        preset = self.refinement if self.refinement in PRESETS else DEFAULT_PRESET
        values = {**PRESETS[preset], **dict(self.changes)}
        return engine.replace(preset=preset, scorer=self.scorer, scope=scope, **values)

    def keep(
        self, scores: Tensor, hubkv: HubKVConfig, budget: Budget, ratio: float, seed: int
    ) -> tuple[Tensor, Tensor]:
        """What stays of a context.

        Args:
            scores: float32 [L, Hkv, T], of the scorer.
            hubkv: of ``hubkv()``.
            budget: ``config.budget`` of the context with it.
            ratio: r.
            seed: of the placebo and of attempts that draw.

        Returns:
            positions int32 [K] and head_offsets int64 [L*Hkv + 1].
        """
        refined = self._refined(scores, hubkv, ratio, seed)
        if self.allocator:
            rows = ablations.allocate(self.allocator, refined, budget.num_groups, budget.rows_per_group)
            return ablations.select_rows(refined, rows)
        return ops.select(refined, budget.num_groups, budget.rows_per_group)

    def _refined(self, scores: Tensor, hubkv: HubKVConfig, ratio: float, seed: int) -> Tensor:
        if self.refinement in PRESETS:
            return ablations.refine_stage(scores, hubkv, ratio)
        return ablations.refined_scores(self.refinement, scores, hubkv, ratio, seed)


def _parameter(text: str, parameter: str) -> tuple[str, Any]:
    name, _, value = parameter.partition("=")
    known = (*PRESETS["fastkvzip_head_nms_k5_p0.5_mild"],)
    require(name in known, "method", text, f"with parameters of {', '.join(known)}")
    try:
        return name, int(value) if name == "nms_kernel" else float(value)
    except ValueError:
        raise ValueError(f"method: {text!r}: {name} = {value!r} is not a number") from None
