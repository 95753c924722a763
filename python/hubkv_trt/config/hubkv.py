# SPDX-License-Identifier: Apache-2.0
"""The compression at prefill: its parameters, the paper's presets, and the budget of a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .base import FLOAT32_MAX, FLOAT32_MIN, INT32_MAX, Config, require
from .model import ModelConfig


class Scope(str, Enum):
    """Which KV pairs compete for one budget: all of the model, those of a layer, or those of a head."""

    MODEL = "model"
    LAYER = "layer"
    HEAD = "head"


class Scorer(str, Enum):
    """What gives KV pairs their scores (docs/scorers.md). Engines of TensorRT have the first one in their graph."""

    FASTKVZIP = "fastkvzip"
    KVZIP = "kvzip"
    SNAPKV = "snapkv"
    EXPECTED_ATTENTION = "expected_attention"
    KNORM = "knorm"
    TOVA = "tova"
    RANDOM = "random"
    STREAMING_LLM = "streaming_llm"

    @property
    def observed(self) -> int:
        """The last tokens of a prompt whose attention it looks at; they are kept, for it says nothing about them."""
        return {Scorer.SNAPKV: 64, Scorer.TOVA: 1}.get(self, 0)


class Evicted(str, Enum):
    """What becomes of the KV pairs of a prompt that are not kept (docs/src.md)."""

    DROP = "drop"
    MERGE = "merge"  # clusters, each a row: weighted mean key and value, a bias for its mass
    SUMMARIZE = "summarize"  # the same with masses and values fitted to what queries of the prompt would read


MOST_CENTROIDS = 8

DEFAULT_PRESET = "fastkvzip_head_nms_gated_k5_p0.5_mild"


@dataclass(frozen=True)
class HubKVConfig(Config):
    """Parameters of the compression at prefill (the stages of ``include/hubkv/hubkv.h``).

    The defaults are the paper's final method, ``fastkvzip_head_nms_gated_k5_p0.5_mild``.
    """

    ratio: float = 0.75  # r, the fraction of KV pairs removed where a request names none
    scope: Scope = Scope.MODEL
    preset: str = DEFAULT_PRESET
    nms_kernel: int = 5  # k, odd
    penalty_factor: float = 0.5  # gamma
    head_weight_temperature: float = 0.5  # tau
    min_head_weight: float = 0.8
    max_head_weight: float = 1.2
    gate_power: float = 2.0  # p: alpha = r^p
    prominence: float = 0.0  # strength of the discount before this one (hubkv_trt/refinement.py, eager); 0: off
    sink_tokens: int = 4
    window_ratio: float = 0.02  # of the prompt, where it is shorter than long_context
    window_tokens: int = 4096  # for prompts of long_context tokens and more
    long_context: int = 32000
    scorer: Scorer = Scorer.FASTKVZIP
    evicted: Evicted = Evicted.DROP
    centroids: int = 4  # m: rows for the evicted pairs of each head, where they are not dropped
    evicted_mass: float = 0.5  # share of the evicted pairs' softmax mass that these rows carry

    def __post_init__(self) -> None:
        for name in ("nms_kernel", "sink_tokens", "window_tokens", "long_context"):  # the stages read int32
            value = getattr(self, name)
            require(type(value) is int and value <= INT32_MAX, name, value, "an integer below 2^31")
        require(self.scope in list(Scope), "scope", self.scope, f"one of {', '.join(Scope)}")
        require(isinstance(self.scorer, Scorer), "scorer", self.scorer, "a Scorer")
        require(isinstance(self.evicted, Evicted), "evicted", self.evicted, f"one of {', '.join(Evicted)}")
        ok = type(self.centroids) is int and 1 <= self.centroids <= MOST_CENTROIDS
        require(ok, "centroids", self.centroids, f"an integer in 1..{MOST_CENTROIDS}")
        require(0 < self.evicted_mass <= 1, "evicted_mass", self.evicted_mass, "in (0, 1]")
        require(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        check_ratio(self.ratio)
        require(self.nms_kernel >= 1 and self.nms_kernel % 2 == 1, "nms_kernel", self.nms_kernel, "an odd number >= 1")
        require(0 <= self.penalty_factor <= 1, "penalty_factor", self.penalty_factor, "in [0, 1]")
        require(self.head_weight_temperature >= 0, "head_weight_temperature", self.head_weight_temperature, ">= 0")
        require(
            FLOAT32_MIN <= self.min_head_weight <= self.max_head_weight,
            "min_head_weight",
            self.min_head_weight,
            f"a float32 in (0, max_head_weight = {self.max_head_weight}]",
        )
        require(self.gate_power >= 0, "gate_power", self.gate_power, ">= 0")
        require(self.prominence >= 0, "prominence", self.prominence, ">= 0")
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, ">= 0")
        require(0 <= self.window_ratio <= 1, "window_ratio", self.window_ratio, "in [0, 1]")
        require(self.window_tokens >= 0, "window_tokens", self.window_tokens, ">= 0")
        require(self.long_context >= 1, "long_context", self.long_context, ">= 1")
        for name in ("head_weight_temperature", "max_head_weight", "gate_power", "prominence"):  # they read float32
            require(getattr(self, name) <= FLOAT32_MAX, name, getattr(self, name), "a finite float32")

    @classmethod
    def from_preset(cls, preset: str = DEFAULT_PRESET, **changes: Any) -> HubKVConfig:
        """The parameters that the paper's name stands for, with some changed.

        Raises:
            ValueError: there is no such preset.
        """
        if preset not in PRESETS:
            raise ValueError(f"preset: {preset!r} is not one of {', '.join(PRESETS)}")
        return cls(**{"preset": preset, **PRESETS[preset], **changes})

    def alpha(self, ratio: float) -> float:
        """Strength of the refinement, r^p; 0 at r = 0 for every p: where nothing is removed, nothing is refined."""
        return 0.0 if ratio == 0 else float(ratio) ** self.gate_power

    def window(self, num_tokens: int) -> int:
        """The last w positions of a prompt of T tokens that are always kept (FastKVzip's rule, or what the scorer has
        to look at)."""
        w = int(self.window_ratio * num_tokens) if num_tokens < self.long_context else self.window_tokens
        return min(max(w, self.scorer.observed), num_tokens)

    def num_protected(self, num_tokens: int) -> int:
        """Positions of a prompt of T tokens that every head keeps: sinks and window, counted once."""
        return min(num_tokens, min(self.sink_tokens, num_tokens) + self.window(num_tokens))


def check_ratio(ratio: float) -> float:
    """The compression ratio as a float in [0, 1).

    Raises:
        ValueError: it is not a number in [0, 1).
    """
    ok = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 <= ratio < 1  # NaN fails too
    require(ok, "ratio", ratio, "a compression ratio in [0, 1), the fraction of KV pairs removed")
    return float(ratio)


_MILD = {"head_weight_temperature": 0.5, "min_head_weight": 0.8, "max_head_weight": 1.2}
_TINY = {"head_weight_temperature": 0.25, "min_head_weight": 0.9, "max_head_weight": 1.1}
_OFF = {"head_weight_temperature": 0.0, "gate_power": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "fastkvzip": {"nms_kernel": 1, "penalty_factor": 1.0, **_OFF},
    "fastkvzip_nms": {"nms_kernel": 5, "penalty_factor": 0.5, **_OFF},
    "fastkvzip_head_nms_k5_p0.5_mild": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 0.0, **_MILD},
    "fastkvzip_head_nms_k5_p0.5_tiny": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 0.0, **_TINY},
    DEFAULT_PRESET: {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 2.0, **_MILD},
    "fastkvzip_head_nms_gated_k5_p0.5_tiny": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 2.0, **_TINY},
    "fastkvzip_head_nms_gated_k7_p0.2_mild": {"nms_kernel": 7, "penalty_factor": 0.2, "gate_power": 2.0, **_MILD},
    "prominence_k5_s2": {"nms_kernel": 5, "penalty_factor": 1.0, "prominence": 2.0, **_OFF},
}
"""The paper's names (seed parameters of the one refine stage), and one of our own (docs/quality.md)."""


@dataclass(frozen=True)
class Budget:
    """How many rows a prompt keeps; computed once, on the host, in double, before anything runs."""

    num_groups: int  # S of select: 1 (model), L (layer) or L*Hkv (head)
    rows_per_group: int  # kept pairs and summaries
    num_pairs: int  # N = L*Hkv*T
    summaries_per_group: int = 0  # rows among them that stand for evicted pairs

    @property
    def selected_per_group(self) -> int:
        """K of select."""
        return self.rows_per_group - self.summaries_per_group

    @property
    def num_rows(self) -> int:
        """K, the rows of the whole compact segment."""
        return self.num_groups * self.rows_per_group

    @property
    def effective_ratio(self) -> float:
        """The fraction of KV pairs really removed: below the one asked for where protection takes more."""
        return 1.0 - self.num_rows / self.num_pairs


def budget(model: ModelConfig, hubkv: HubKVConfig, num_tokens: int, ratio: float) -> Budget:
    """K = N - floor(r*N) for each group of heads that shares a budget, never fewer than the protected rows.

    Where the evicted are not dropped, m rows of each head are theirs: select keeps K - m*H pairs of the H heads of a
    group, so that K rows are stored all the same. K grows where m*H rows and the protected ones are more than it, and
    nothing is summarised where K is N already.

    Args:
        model: gives L and Hkv.
        hubkv: gives scope and protection.
        num_tokens: T, >= 1.
        ratio: r in [0, 1).
    """
    ratio = check_ratio(ratio)
    require(num_tokens >= 1, "num_tokens", num_tokens, "an integer >= 1")
    groups = {Scope.MODEL: 1, Scope.LAYER: model.num_layers, Scope.HEAD: model.num_rows_per_token}[hubkv.scope]
    heads = model.num_rows_per_token // groups
    pairs = heads * num_tokens
    kept = pairs - math.floor(ratio * pairs)
    protected = heads * hubkv.num_protected(num_tokens)
    kept = max(kept, protected)
    summaries = heads * hubkv.centroids
    if hubkv.evicted is Evicted.DROP or kept == pairs or protected + summaries >= pairs:
        return Budget(groups, kept, groups * pairs)
    return Budget(groups, max(kept, protected + summaries), groups * pairs, summaries)
