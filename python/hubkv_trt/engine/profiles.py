# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles of the two plans, and what TensorRT cannot hold: a tensor of 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import EngineConfig, ModelConfig, budget
from ..runtime.cache import PAGE_TOKENS
from .bindings import Binding, plans_of, work_capacity

MAX_ELEMENTS = 2**31 - 1
"""Of one tensor, in every version of TensorRT."""

Range = tuple[int, int, int]
"""The least, the most likely and the largest value."""

DECODE, QUESTION = 0, 1
"""The profiles of ``extend.plan``: one new token a sequence, or up to ``max_extend_len``."""


def max_rows(config: EngineConfig) -> int:
    """K_max, the rows of the largest compact segment that the engine makes: of any prompt up to ``max_input_len`` at
    ``min_ratio``; of a dense engine all of them."""
    tokens = config.max_input_len
    if config.hubkv is None:
        return config.model.num_rows_per_token * tokens
    changes = {tokens, min(tokens, config.hubkv.long_context - 1) or 1}  # where the window's rule does
    return max(budget(config.model, config.hubkv, t, plans_of(config).min_ratio).num_rows for t in changes)


def prefill_profiles(config: EngineConfig) -> list[dict[str, Range]]:
    """By dynamic letter (``K/S``: the value of ``rows_per_group``) for each profile of ``prefill.plan``."""
    tokens = config.max_input_len
    ranges = {"T": (1, tokens, tokens)}
    if config.hubkv is not None:
        usual = budget(config.model, config.hubkv, tokens, max(config.hubkv.ratio, plans_of(config).min_ratio))
        most = max_rows(config) // usual.num_groups
        ranges["K/S"] = (1, min(usual.rows_per_group, most), most)
    return [ranges]


def extend_profiles(config: EngineConfig) -> list[dict[str, Range]]:
    """By dynamic letter for the profiles ``DECODE`` and ``QUESTION`` of ``extend.plan``."""
    model, batch, new = config.model, config.max_batch_size, plans_of(config).max_extend_len
    pages = -(-model.max_position_embeddings // PAGE_TOKENS)
    tables = {
        "pages": (1, min(pages, 128), pages),
        "W": (model.num_kv_heads, work_capacity(model, batch), work_capacity(model, batch)),
    }
    return [
        {"B": (1, batch, batch), "Tq": (1, 1, 1), **tables},
        {"B": (1, 1, batch), "Tq": (1, new, new), **tables},
    ]


def add_profiles(
    builder: Any, builder_config: Any, bindings: Mapping[str, Binding], profiles: list[dict[str, Range]]
) -> None:
    """Adds the profiles to an ``IBuilderConfig``.

    Raises:
        RuntimeError: TensorRT refuses one.
    """
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for binding in bindings.values():
            if not binding.is_input:
                continue
            if binding.is_shape:
                profile.set_shape_input(binding.name, *((value,) for value in ranges["K/S"]))
            elif -1 in binding.shape:
                profile.set_shape(
                    binding.name, *(binding.sized({d: r[i] for d, r in ranges.items()}) for i in range(3))
                )
        if builder_config.add_optimization_profile(profile) < 0:
            raise RuntimeError(f"TensorRT refused the optimization profile {ranges}; its messages above say why")


def check_sizes(config: EngineConfig) -> None:
    """Refuses limits under which some tensor of a plan would have 2^31 elements or more.

    Raises:
        ValueError: names the limit and what to change it to.
    """
    for limit, value, elements, what in _large_tensors(config):
        if elements > MAX_ELEMENTS:
            most = value * MAX_ELEMENTS // elements
            raise ValueError(
                f"{limit}: {value} makes {what} of {elements} elements, more than TensorRT's {MAX_ELEMENTS}: "
                f"--{limit.replace('_', '-')} {most} at most"
            )
    rows, dim = max_rows(config), config.model.head_dim
    parts = 1 if config.hubkv is not None and config.hubkv.scope.value == "model" else config.model.num_layers
    if rows // parts * dim > MAX_ELEMENTS:
        raise ValueError(_too_many_rows(config, rows // parts * dim))


def _large_tensors(config: EngineConfig) -> Iterator[tuple[str, int, int, str]]:
    """(limit, its value, elements at that value, what they are)."""
    model, tokens, batch = config.model, config.max_input_len, config.max_batch_size
    new = plans_of(config).max_extend_len
    wide = _widest(model)
    yield "max_input_len", tokens, tokens * wide, f"activations [T, {wide}]"
    if config.hubkv is not None:
        pairs = model.num_rows_per_token
        yield "max_input_len", tokens, tokens * pairs, f"scores [{model.num_layers}, {model.num_kv_heads}, T]"
    yield "max_extend_len", new, batch * new * wide, f"activations [{batch} * Tq, {wide}]"
    rows = model.num_rows_per_token * model.head_dim
    heads = model.num_layers * model.num_heads * model.head_dim if plans_of(config).new_queries else rows
    yield "max_extend_len", new, batch * new * max(rows, heads), f"new rows [L, {batch}, Tq, H, D]"


def _widest(model: ModelConfig) -> int:
    """Elements that a token has in the widest tensor of a layer."""
    return max(2 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)


def _too_many_rows(config: EngineConfig, elements: int) -> str:
    hint = ""
    if config.hubkv is not None:
        least = 1 - (1 - plans_of(config).min_ratio) * MAX_ELEMENTS / elements
        hint = f"--min-ratio {int(least * 100 + 1) / 100:g} (prompts of full length at less are then refused), or "
    most = config.max_input_len * MAX_ELEMENTS // elements
    return (
        f"max_input_len: {config.max_input_len} tokens at compression ratio {plans_of(config).min_ratio:g} keep "
        f"K * D = {elements} elements, more than TensorRT's {MAX_ELEMENTS} of a tensor: {hint}--max-input-len {most}"
    )
