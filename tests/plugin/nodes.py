# SPDX-License-Identifier: Apache-2.0
"""A node of each plugin: its fields, the tensors that it takes and gives, and nodes that an oracle can answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hubkv_trt import reference
from plugin.harness import Tensor, tensor
from ragged_cache import as_numpy, new_rows, random_cache

NAMES = ["HubKVRefine", "HubKVSelect", "HubKVCompact", "HubKVPlan", "HubKVAttend"]
ROW_TYPES = ["float32", "float16", "uint16"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# ---- described -------------------------------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "HubKVRefine": {},
    "HubKVSelect": {"num_groups": 3},
    "HubKVCompact": {},
    "HubKVPlan": {"num_layers": 3, "num_kv_heads": 2, "capacity": 20},
    "HubKVAttend": {"layer": 1, "page_tokens": 16},
}
SHAPE_VALUES = {"HubKVSelect": (17,)}


@dataclass(frozen=True)
class Sizes:
    L: int = 3
    Hkv: int = 2
    T: int = 40
    D: int = 16
    B: int = 2
    Tq: int = 3
    G: int = 4
    K: int = 50
    max_pages: int = 5
    capacity: int = 20


def node(name: str, rows: str = "float32", s: Sizes = Sizes()) -> list[Tensor]:
    """Inputs of a node."""

    def int32(*shape: int) -> Tensor:
        return tensor("int32", *shape)

    def int64(*shape: int) -> Tensor:
        return tensor("int64", *shape)

    if name == "HubKVRefine":
        return [tensor("float32", s.L, s.Hkv, s.T), tensor("float32", 1), int32(1)]
    if name == "HubKVSelect":
        return [tensor("float32", s.L, s.Hkv, s.T)]
    if name == "HubKVCompact":
        return [tensor(rows, s.T, s.Hkv, s.D)] * (2 * s.L) + [int32(s.K), int64(s.L * s.Hkv + 1)]
    if name == "HubKVPlan":
        return [int64(2), int64(s.B, 4)]
    q, k = tensor(rows, s.B * s.Tq, s.Hkv * s.G, s.D), tensor(rows, s.B * s.Tq, s.Hkv, s.D)
    tables = [int64(2), int64(s.B, 4), int32(s.B, s.max_pages), int32(s.B), int32(s.B)]
    return [q, k, k, *tables, int32(s.L, s.capacity, 4), int32(s.L)]


def outputs(name: str, rows: str = "float32", s: Sizes = Sizes()) -> list[tuple[str, tuple[int, ...]]]:
    """Types and shapes of what the node gives, with FIELDS and SHAPE_VALUES."""
    return {
        "HubKVRefine": [("float32", (s.L, s.Hkv, s.T)), ("int64", (1,))],
        "HubKVSelect": [("int32", (3 * 17,)), ("int64", (s.L * s.Hkv + 1,))],
        "HubKVCompact": [(rows, (s.K, s.D)), (rows, (s.K, s.D))],
        "HubKVPlan": [("int32", (3, 20, 4)), ("int32", (3,))],
        "HubKVAttend": [(rows, (s.B * s.Tq, s.Hkv * s.G, s.D))],
    }[name]


# ---- with numbers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Inputs of a node, and whether outputs are what its oracle gives for them."""

    inputs: list[np.ndarray]
    check: Callable[[list[np.ndarray]], None]
    values: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    memory: np.ndarray | None = None  # whose address is among the inputs


def _equal(*wanted: np.ndarray) -> Callable[[list[np.ndarray]], None]:
    def check(got: list[np.ndarray]) -> None:
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(x, y)

    return check


def refine_case(shape: tuple[int, ...], seed: int = 1) -> Case:
    scores = np.random.default_rng(seed).random(shape, np.float32)
    scores[0, 0, 0] = np.nan
    alpha, window = np.array([0.81], np.float32), np.array([7], np.int32)
    wanted = reference.refine(scores, alpha, window, 7, 0.5, 0.5, 0.8, 1.2, 2)
    return Case([scores, alpha, window], _equal(*wanted), fields={"nms_kernel": 7, "sink_tokens": 2})


def select_case(shape: tuple[int, ...], groups: int, rows: int, seed: int = 2) -> Case:
    refined = np.random.default_rng(seed).integers(0, 50, shape).astype(np.float32)
    return Case([refined], _equal(*reference.select(refined, groups, rows)), (rows,), {"num_groups": groups})


def compact_case(shape: tuple[int, ...], D: int, rows: int, dtype: str, token_major: int, seed: int = 3) -> Case:
    random = np.random.default_rng(seed)
    L, Hkv, T = shape
    positions, offsets = reference.select(random.random(shape, np.float32), 1, rows)
    layers = (T, Hkv, D) if token_major else (Hkv, T, D)
    kv = [(random.random(layers) * 1000).astype(dtype) for _ in range(2 * L)]
    heads = [x.swapaxes(0, 1) if token_major else x for x in kv]
    wanted = reference.compact(heads[:L], heads[L:], positions, offsets)
    return Case([*kv, positions, offsets], _equal(*wanted), fields={"token_major": token_major})


def cache_cases(
    dtype: torch.dtype, num_new: int, sequences: list[tuple[int | None, int]] | None = None, seed: int = 0
) -> Iterator[tuple[str, Case]]:
    """A plan of a ragged cache, and attention over it: every layer, with and without an axis of sequences."""
    sequences = sequences or [(70, 20), (None, 5), (33, 0)]
    cache = random_cache(sequences=sequences, head_dim=64, dtype=dtype, row_bias=True, seed=seed)
    memory = cache.arena.numpy()
    arena = np.array([memory.ctypes.data, memory.nbytes], np.int64)
    segments, block_table, tails = [as_numpy(x) for x in (cache.segments, cache.block_table, cache.tail_lengths)]
    L, Hkv, capacity = cache.num_layers, cache.num_kv_heads, 3 * cache.num_kv_heads + 16
    work, count = reference.plan(memory, segments, L, Hkv, capacity, 32)

    def check_plan(got: list[np.ndarray]) -> None:
        np.testing.assert_array_equal(got[1], count)
        for items, wanted, n in zip(got[0], work, count, strict=True):
            np.testing.assert_array_equal(items[:n], wanted[:n])

    sizes = {"num_layers": L, "num_kv_heads": Hkv, "capacity": capacity, "min_rows_per_item": 32}
    yield "HubKVPlan", Case([arena, segments], check_plan, fields=sizes, memory=memory)
    items = np.where(np.arange(capacity)[:, None] < count[:, None, None], work, -1).astype(np.int32)
    lengths = np.array([num_new, *[1] * (len(sequences) - 1)], np.int32)
    pages = {"page_tokens": cache.page_tokens, "page_base": cache.page_base, "scale": 0.2}
    for layer in range(L):
        rows = new_rows(cache, num_new, 3, seed=seed + layer)
        wanted = cache.oracle(*rows, layer=layer, new_lengths=torch.from_numpy(lengths), scale=0.2)

        def check_attend(got: list[np.ndarray], wanted: np.ndarray = wanted) -> None:
            out = torch.from_numpy(got[0].reshape(wanted.shape))
            out = out.view(torch.bfloat16) if dtype == torch.bfloat16 else out
            np.testing.assert_allclose(out.double().numpy(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

        for flat in (False, True):
            new = [as_numpy(x) for x in rows]
            new = [x.reshape(-1, *x.shape[2:]) for x in new] if flat else new
            inputs = [*new, arena, segments, block_table, tails, lengths, items, count]
            yield "HubKVAttend", Case(inputs, check_attend, fields={"layer": layer, **pages}, memory=memory)
