# SPDX-License-Identifier: Apache-2.0
"""What compresses a context: a scorer, what is done to its scores, how heads share rows, what becomes of the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ablations, ops
from ..config import DEFAULT_PRESET, PRESETS, Budget, Evicted, HubKVConfig, Scope, Scorer, require

FULL = "full"
"""The method that keeps everything, at r = 0: what the others are held against."""

_SCORERS = {"gate": Scorer.FASTKVZIP}
_REFINEMENTS = {"base": "fastkvzip", "nms": "fastkvzip_nms", "hubkv": DEFAULT_PRESET}
_ALLOCATORS = {name.removeprefix("head_budget_"): name for name in ablations.HEAD_BUDGETS}
_PLACEBO = "placebo"
_EVICTED = {e.value: e for e in Evicted}
_OF_ROWS: tuple[str, ...] = ("centroids", "evicted_mass")
_INTEGERS = {"nms_kernel", "centroids"}.union(
    *(
        {p for p, default in ablations.attempt_parameters(name).items() if isinstance(default, int)}
        for name in ablations.ATTEMPTS
    )
)


@dataclass(frozen=True)
class Method:
    """One way to compress.

    Attributes:
        scorer: gives the scores.
        refinement: a preset, an attempt of ``ablations`` or ``placebo``.
        allocator: one of ``ablations.HEAD_BUDGETS``; "" lets all pairs of a scope compete.
        changes: parameters of the attempt, or of ``HubKVConfig``, that differ from the refinement's own, by name.
        evicted: what becomes of pairs that are not kept. Their rows and every row's bias are paid for with kept pairs.
        centroids, evicted_mass: of ``HubKVConfig``, where pairs are not dropped.
    """

    scorer: Scorer
    refinement: str = "fastkvzip"
    allocator: str = ""
    changes: tuple[tuple[str, Any], ...] = ()
    evicted: Evicted = Evicted.DROP
    centroids: int = HubKVConfig.centroids
    evicted_mass: float = HubKVConfig.evicted_mass

    @classmethod
    def parse(cls, text: str) -> Method:
        """``SCORER[+REFINEMENT[:PARAMETER=VALUE...]][+ALLOCATOR][+EVICTED[:PARAMETER=VALUE...]]``: gate, kvzip+hubkv,
        gate+hubkv:gate_power=1, gate+hubkv+summarize:centroids=8.

        Scorers: those of ``config.Scorer``, ``gate`` is fastkvzip. Refinements: ``base`` (none), ``hubkv`` (the default
        preset), ``nms``, every preset, every attempt of ``ablations``, ``placebo``. Allocators: ``waterfill``,
        ``selectivity``, ``entropy``, ``hybrid``. Evicted: ``drop`` (the default), ``merge`` and ``summarize``, with the
        parameters ``centroids`` and ``evicted_mass``.

        Raises:
            ValueError: a part has no such name, or a parameter is refused.
        """
        first, *rest = text.strip().split("+")
        scorers = {**_SCORERS, **{s.value: s for s in Scorer}}
        expected = f"a scorer ({', '.join(scorers)}) with +REFINEMENT, +ALLOCATOR and +EVICTED"
        require(first in scorers, "method", text, expected)
        refinement, allocator, changes = "fastkvzip", "", {}
        evicted: dict[str, Any] = {}
        for part in rest:
            name, *parameters = part.split(":")
            if name in ablations.HEAD_BUDGETS or name in _ALLOCATORS:
                allocator = _ALLOCATORS.get(name, name)
                require(not parameters, "method", text, "without parameters of an allocator")
                continue
            if name in _EVICTED:
                own = () if name == Evicted.DROP.value else _OF_ROWS
                evicted = {"evicted": _EVICTED[name], **dict(_parameter(text, p, own) for p in parameters)}
                continue
            known = (*_REFINEMENTS, *PRESETS, *ablations.ATTEMPTS, _PLACEBO)
            others = f"allocators {', '.join(_ALLOCATORS)}, evicted {', '.join(_EVICTED)}"
            require(name in known, "method", text, f"of refinements {', '.join(known)}, {others}")
            refinement = _REFINEMENTS.get(name, name)
            changes = dict(_parameter(text, p, _of_refinement(refinement)) for p in parameters)
        method = cls(scorers[first], refinement, allocator, tuple(sorted(changes.items())), **evicted)
        hubkv = method.hubkv(HubKVConfig(), Scope.MODEL)  # refuses what a configuration refuses
        method._refined(torch.zeros(1, 1, 1), hubkv, 0.5, 0)  # and this what an attempt refuses
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
        if self.evicted is not Evicted.DROP:
            own = {name: getattr(self, name) for name in _OF_ROWS}
            changed = [f"{name}={value:g}" for name, value in own.items() if value != getattr(HubKVConfig, name)]
            parts.append(":".join([self.evicted.value, *changed]))
        return "+".join(parts)

    @property
    def base(self) -> Method:
        """The scorer alone; where evicted pairs leave rows behind, the same with all of them dropped."""
        if self.evicted is Evicted.DROP:
            return Method(self.scorer)
        return Method(self.scorer, self.refinement, self.allocator, self.changes)

    @property
    def placebo(self) -> Method:
        """The same with hubs at random places."""
        return replace(self, refinement=_PLACEBO)

    def hubkv(self, engine: HubKVConfig, scope: Scope) -> HubKVConfig:
        """The configuration of an engine that compresses this way; what is protected is as in ``engine``."""
        preset = self.refinement if self.refinement in PRESETS else DEFAULT_PRESET
        changes = {} if self.refinement in ablations.ATTEMPTS else dict(self.changes)
        values = {**PRESETS[preset], **changes, "evicted": self.evicted}
        values |= {"centroids": self.centroids, "evicted_mass": self.evicted_mass}
        return engine.replace(preset=preset, scorer=self.scorer, scope=scope, **values)

    def keep(
        self, scores: Tensor, hubkv: HubKVConfig, budget: Budget, ratio: float, seed: int
    ) -> tuple[Tensor, Tensor]:
        """What stays of a context.

        Args:
            scores: float32 [L, Hkv, T], of the scorer.
            hubkv: of ``hubkv()``.
            budget: ``config.budget`` of the context with it.
            ratio: r of the budget.
            seed: of the placebo and of attempts that draw.

        Returns:
            positions int32 [K] and head_offsets int64 [L*Hkv + 1].
        """
        refined = self._refined(scores, hubkv, ratio, seed)
        if self.allocator:
            rows = ablations.allocate(self.allocator, refined, budget.num_groups, budget.selected_per_group)
            return ablations.select_rows(refined, rows)
        return ops.select(refined, budget.num_groups, budget.selected_per_group)

    def _refined(self, scores: Tensor, hubkv: HubKVConfig, ratio: float, seed: int) -> Tensor:
        if self.refinement in PRESETS:
            return ablations.refine_stage(scores, hubkv, ratio)
        parameters = dict(self.changes) if self.refinement in ablations.ATTEMPTS else {}
        return ablations.refined_scores(self.refinement, scores, hubkv, ratio, seed, parameters)


def _of_refinement(name: str) -> tuple[str, ...]:
    """The names of its parameters."""
    if name in ablations.ATTEMPTS:
        return tuple(ablations.attempt_parameters(name))
    return (*PRESETS["fastkvzip_head_nms_k5_p0.5_mild"], "prominence")


def _parameter(text: str, parameter: str, known: tuple[str, ...]) -> tuple[str, Any]:
    name, _, value = parameter.partition("=")
    require(name in known, "method", text, f"with parameters of {', '.join(known)}" if known else "without parameters")
    try:
        return name, int(value) if name in _INTEGERS else float(value)
    except ValueError:
        raise ValueError(f"method: {text!r}: {name} = {value!r} is not a number") from None
