# SPDX-License-Identifier: Apache-2.0
"""How large a cache becomes, from what the user asks for and what there is."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Budget, EngineConfig, budget, require
from .arena import Arena, align
from .cache import Cache
from .ledger import PAGE_TOKENS, Ledger
from .memory import available_bytes
from .requests import KEEP_ALL

_TAIL_TOKENS = 2048  # a sequence's share of the page pool where the user names no size


def create_cache(
    config: EngineConfig,
    cache_bytes: int | None = None,
    tail_tokens: int | None = None,
    *,
    lent_bytes: int = 0,
    available: int | None = None,
    arena: Callable[[int], Arena] = Arena,
) -> Cache:
    """A cache for an engine.

    Args:
        config: the engine.
        cache_bytes: the whole arena. Default: room for ``max_batch_size`` prompts of ``max_input_len`` tokens without
            any compression, what the largest of them borrows and their tails, but at most what is available. What is
            not used is not committed (on the host).
        tail_tokens: tokens of all tails together. Default: 2048 for each of ``max_batch_size`` sequences, but at most a
            quarter of the cache where it is too small for all of that.
        lent_bytes: what a prompt of ``max_input_len`` tokens borrows while it runs.
        available: bytes that may be taken; default: half of the host's memory that is available.
        arena: makes the memory.

    Raises:
        ValueError: the sizes leave no room for a single page, or for a segment of one token; or the system refuses.
    """
    for name, value in (("cache_bytes", cache_bytes), ("tail_tokens", tail_tokens)):
        require(value is None or type(value) is int, name, value, "an integer or None")
    model = config.model
    ledger = Ledger(model, config.dtype, row_bias=config.has_row_bias)
    pages = most_pages(config, tail_tokens)
    prompts = config.max_batch_size * ledger.segment_bytes(model.num_rows_per_token * config.max_input_len)
    prompts += align(lent_bytes)
    if cache_bytes is None:
        available = available_bytes() // 2 if available is None else available
        cache_bytes = min(prompts + pages * ledger.page_bytes, available)
    if tail_tokens is None:
        pages = max(1, min(pages, max(cache_bytes // 4, cache_bytes - prompts) // ledger.page_bytes))
    least = align(pages * ledger.page_bytes) + ledger.segment_bytes(model.num_rows_per_token)
    require(
        cache_bytes >= least,
        "cache_bytes",
        cache_bytes,
        f"at least {least}, {pages} tail pages of {ledger.page_bytes} bytes and a segment of one token",
    )
    try:
        return Cache(ledger, cache_bytes - align(pages * ledger.page_bytes), pages, arena)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cache_bytes: {cache_bytes} bytes cannot be had ({error})") from None


def most_pages(config: EngineConfig, tail_tokens: int | None = None) -> int:
    """The pages of the pool, at most; ``tail_tokens`` as ``create_cache`` has it."""
    share = min(_TAIL_TOKENS, config.model.max_position_embeddings)
    tokens = config.max_batch_size * share if tail_tokens is None else tail_tokens
    require(tokens >= 1, "tail_tokens", tail_tokens, "an integer >= 1")
    return -(-tokens // PAGE_TOKENS)


def largest_prompt(config: EngineConfig) -> tuple[int, Budget]:
    """T and the budget of a prompt of ``max_input_len`` tokens at the engine's own ratio."""
    hubkv = config.hubkv or KEEP_ALL
    ratio = max(hubkv.ratio, config.tensorrt.min_ratio if config.tensorrt else 0.0)
    return config.max_input_len, budget(config.model, hubkv, config.max_input_len, ratio)
