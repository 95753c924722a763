# SPDX-License-Identifier: Apache-2.0
"""Every setting that outlives a call, as frozen dataclasses. Unknown keys, wrong types and bad values are errors.

Each class reads itself from plain JSON data with ``from_dict`` and gives it back with ``to_dict``.
"""

from .base import Config, require
from .engine import SCHEMA_VERSION, Backend, EngineConfig, TensorRTConfig, WeightsPlace, check_plans
from .hardkv import HARD_KV_PRESETS, Budgets, HardKVConfig, Importance
from .hubkv import (
    DEFAULT_PRESET,
    MOST_CENTROIDS,
    PRESETS,
    Budget,
    Evicted,
    HubKVConfig,
    Scope,
    Scorer,
    budget,
    check_ratio,
)
from .model import DType, ModelConfig, RopeConfig

__all__ = [
    "HARD_KV_PRESETS",
    "Budgets",
    "DEFAULT_PRESET",
    "MOST_CENTROIDS",
    "PRESETS",
    "SCHEMA_VERSION",
    "Backend",
    "Budget",
    "Config",
    "DType",
    "EngineConfig",
    "Evicted",
    "HardKVConfig",
    "HubKVConfig",
    "Importance",
    "ModelConfig",
    "RopeConfig",
    "Scope",
    "Scorer",
    "TensorRTConfig",
    "WeightsPlace",
    "budget",
    "check_plans",
    "check_ratio",
    "require",
]
