# SPDX-License-Identifier: Apache-2.0
"""The executor that an engine was built for, and the cache it runs over."""

from __future__ import annotations

from ...config import Backend
from ...engine.directory import Engine
from ..cache import Cache
from ..cache_size import create_cache
from .executor import Executor


def create_executor(engine: Engine, cache_bytes: int | None, tail_tokens: int | None) -> tuple[Cache, Executor]:
    """Arguments as ``create_cache`` has them.

    Raises:
        ValueError: what the engine's backend needs is not here, or the cache sizes do not fit.
    """
    if engine.config.backend is Backend.TENSORRT:
        from .tensorrt import open_tensorrt

        return open_tensorrt(engine, cache_bytes, tail_tokens)
    from .eager import EagerExecutor

    cache = create_cache(engine.config, cache_bytes, tail_tokens)
    return cache, EagerExecutor(engine.config, {**engine.weights, **engine.gate}, cache, engine.load_tokenizer)
