# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles of the two plans, and whether TensorRT can hold their inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import EngineConfig, budget
from ..runtime.ledger import PAGE_TOKENS
from .bindings import Binding, extend_bindings, plans_of, prefill_bindings, work_capacity

MAX_ELEMENTS = 2**31 - 1
"""Of one input or output, in every version of TensorRT."""

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


def largest(config: EngineConfig) -> dict[str, int]:
    """Every dynamic letter of the bindings at its largest."""
    rows = max_rows(config)
    letters = {"K": rows, "K/L": rows // config.model.num_layers, "M": plans_of(config).last_queries}
    for ranges in (*prefill_profiles(config), *extend_profiles(config)):
        letters.update({letter: max(values[2], letters.get(letter, 0)) for letter, values in ranges.items()})
    return letters


def check_sizes(config: EngineConfig) -> None:
    """Refuses limits under which an input or output would have 2^31 elements or more.

    Raises:
        ValueError: names the limit, the tensor, and what to change the limit to.
    """
    letters = largest(config)
    bindings = [*prefill_bindings(config).values(), *extend_bindings(config).values()]
    binding = max((b for b in bindings if not b.is_weight), key=lambda b: math.prod(b.sized(letters)))
    elements = math.prod(binding.sized(letters))
    if elements <= MAX_ELEMENTS:
        return
    share = MAX_ELEMENTS / elements
    limits = {"Tq": plans_of(config).max_extend_len, "B": config.max_batch_size}
    letter = next((letter for letter in limits if letter in binding.dims), "T")
    limit = {"Tq": "max_extend_len", "B": "max_batch_size", "T": "max_input_len"}[letter]
    value = limits.get(letter, config.max_input_len)
    advice = f"--{limit.replace('_', '-')} {int(value * share)} at most"
    if letter == "Tq":
        advice += f", or a smaller --max-batch-size than {config.max_batch_size}"
    elif config.hubkv is not None and {"K", "K/L"} & set(binding.dims):
        least = 1 - (1 - plans_of(config).min_ratio) * share
        advice += f", or --min-ratio {math.ceil(least * 100) / 100:g}, below which full prompts are then refused"
    raise ValueError(
        f"{limit}: {value} makes {binding.name} [{', '.join(binding.dims)}] of {elements} elements, "
        f"more than TensorRT's {MAX_ELEMENTS} of a tensor: {advice}"
    )
