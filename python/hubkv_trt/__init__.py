# SPDX-License-Identifier: Apache-2.0
"""HubKV: a KV cache that keeps, of a prompt, only the rows that matter.

    from hubkv_trt import LLM, SamplingParams

    llm = LLM("demo/engine")
    context = llm.compress(document, ratio=0.75)
    for answer in llm.generate(questions, SamplingParams(max_tokens=64), context=context):
        print(answer.text)

The names below load on first use, so that ``import hubkv_trt`` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import _environment

__version__ = "0.1.0"  # the one place; pyproject.toml and CMakeLists.txt read it

if "torch" not in sys.modules:  # where it was imported before, set them in the environment
    _environment.set_defaults()

if TYPE_CHECKING:
    from .config import (
        PRESETS,
        Backend,
        DType,
        EngineConfig,
        HardKVConfig,
        HubKVConfig,
        ModelConfig,
        RopeConfig,
        Scope,
        Scorer,
    )
    from .engine.build import build_engine
    from .engine.directory import Engine, load_engine
    from .runtime.llm import LLM
    from .runtime.sampling_params import SamplingParams

_HOME = {
    "LLM": "runtime.llm",
    "SamplingParams": "runtime.sampling_params",
    "build_engine": "engine.build",
    "load_engine": "engine.directory",
    "Engine": "engine.directory",
    "HubKVConfig": "config",
    "HardKVConfig": "config",
    "ModelConfig": "config",
    "RopeConfig": "config",
    "EngineConfig": "config",
    "Scope": "config",
    "Scorer": "config",
    "DType": "config",
    "Backend": "config",
    "PRESETS": "config",
}

__all__ = [
    "LLM",
    "SamplingParams",
    "build_engine",
    "load_engine",
    "Engine",
    "HubKVConfig",
    "HardKVConfig",
    "ModelConfig",
    "RopeConfig",
    "EngineConfig",
    "Scope",
    "Scorer",
    "DType",
    "Backend",
    "PRESETS",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
