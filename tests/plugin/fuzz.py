# SPDX-License-Identifier: Apache-2.0
"""Random bytes in all that plugins read at run time give garbage numbers, never a fault.

    python tests/plugin/fuzz.py FIRST_SEED SEEDS

``plugin.harness.sanitized`` runs it: every tensor is memory of malloc's, of its exact size, and AddressSanitizer ends
the process at the first access beside one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from fuzz_tables import wild
from plugin.harness import Library, describe, emulated, log
from plugin.memory import Memory

ROWS = {"float32": np.float32, "float16": np.float16, "uint16": np.uint16}


class Tensors:
    """Arrays that each have a :class:`Memory` of their own."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.memories: list[Memory] = []

    def of(self, data: np.ndarray) -> np.ndarray:
        memory = Memory(data.nbytes)
        self.memories.append(memory)
        memory.bytes[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return memory.bytes.view(data.dtype).reshape(data.shape)

    def noise(self, dtype: Any, *shape: int) -> np.ndarray:
        data = np.frombuffer(self.random.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
        return self.of(data.reshape(shape))

    def table(self, dtype: Any, likely: int, *shape: int) -> np.ndarray:
        """Plausible numbers, edges of the type and random bits; at times nothing but random bits."""
        return self.noise(dtype, *shape) if self.random.random() < 0.2 else self.of(
            wild(self.random, shape, dtype, likely)
        )  # fmt: skip


def enqueue(
    plugins: Library,
    tensors: Tensors,
    name: str,
    fields: dict[str, Any],
    inputs: Sequence[np.ndarray],
    *values: int,
) -> None:
    plugin = plugins.make(name, **fields)
    found = plugin.outputs([describe(x) for x in inputs], *values)
    assert found is not None, log()
    outputs = [tensors.of(np.zeros(x.shape, x.dtype)) for x in found]
    described = [describe(x) for x in inputs], [describe(x) for x in outputs]
    context = plugin.reload().attach()
    assert context.shape_change(*described) == 0, log()
    assert context.enqueue(inputs, outputs, plugin.workspace(*described)) == 0, log()


def fuzz_prefill(plugins: Library, random: np.random.Generator) -> None:
    """refine, select and compact."""
    tensors = Tensors(random)
    L, Hkv = (int(random.integers(1, 4)) for _ in range(2))
    T, D = int(random.choice([1, 7, 40, 700])), 8 * int(random.integers(1, 33))
    rows = int(random.integers(0, min(L * Hkv * T, 300) + 1))
    scores = tensors.noise(np.float32, L, Hkv, T)
    enqueue(plugins, tensors, "HubKVRefine", {"nms_kernel": int(random.choice([1, 5, 2**31 - 1]))},
            [scores, tensors.noise(np.float32, 1), tensors.table(np.int32, T, 1)])  # fmt: skip
    groups = int(random.choice([1, L, L * Hkv]))
    enqueue(plugins, tensors, "HubKVSelect", {"num_groups": groups}, [scores], rows // groups)
    token_major = int(random.integers(0, 2))
    shape = (T, Hkv, D) if token_major else (Hkv, T, D)
    kv = [tensors.noise(ROWS[random.choice(list(ROWS))], *shape)]
    kv += [tensors.noise(kv[0].dtype, *shape) for _ in range(2 * L - 1)]
    offsets = tensors.table(np.int64, rows, L * Hkv + 1)
    if random.random() < 0.5:
        offsets.sort()
    enqueue(plugins, tensors, "HubKVCompact", {"token_major": token_major},
            [*kv, tensors.table(np.int32, T, rows), offsets])  # fmt: skip


def arena_of(tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """An arena of random bytes with ascending head offsets here and there, and its table.

    Of the table's own bytes no kernel can tell an address or a size too large from a right one; all else is tried:
    nothing there, no bytes, fewer bytes, a start that is aligned to nothing.
    """
    random = tensors.random
    size = int(random.choice([0, 16, 16 * random.integers(1, 4000)]))
    arena = tensors.noise(np.uint8, size)
    for _ in range(4):
        if size >= 4096:
            counts = np.cumsum(random.integers(0, 40, 10)).astype(np.int64)
            at = 8 * int(random.integers(0, (size - counts.nbytes) // 8))
            arena[at : at + counts.nbytes] = counts.view(np.uint8)
    start, skipped = arena.ctypes.data, int(random.integers(0, size + 1))
    tables = [
        (start, size), (start, size), (start, size), (start + skipped, size - skipped), (start, skipped),
        (0, size), (0, int(random.integers(2**63))), (int(random.integers(2**62)), 0),
        (int(random.integers(2**62)), -int(random.integers(2**63))), (-1, -(2**63)),
    ]  # fmt: skip
    return arena, tensors.of(np.array(tables[random.integers(len(tables))], np.int64))


def fuzz_cache(plugins: Library, random: np.random.Generator) -> None:
    """plan and attend."""
    tensors = Tensors(random)
    B, L, Hkv = (int(random.integers(1, 4)) for _ in range(3))
    G, Tq, P = int(random.integers(1, 17)), int(random.choice([1, 1, 2, 5])), int(random.integers(1, 20))
    D, max_pages, capacity = 8 * int(random.integers(1, 17)), int(random.integers(0, 5)), B * Hkv + 10
    arena, arena_table = arena_of(tensors)
    segments = tensors.table(np.int64, arena.size, B, 4)
    segments //= random.choice([1, 16])
    segments *= random.choice([1, 16])
    enqueue(plugins, tensors, "HubKVPlan", {"num_layers": L, "num_kv_heads": Hkv, "capacity": capacity,
                                   "min_rows_per_item": int(random.integers(1, 100))},
            [arena_table, segments])  # fmt: skip
    dtype = ROWS[random.choice(list(ROWS))]
    new = [tensors.noise(dtype, B, Tq, heads, D) for heads in (Hkv * G, Hkv, Hkv)]
    pages = arena.size // (L * 2 * Hkv * P * D * new[0].itemsize) + 1
    enqueue(
        plugins,
        tensors,
        "HubKVAttend",
        {"layer": int(random.integers(0, L)), "page_tokens": P, "page_base": 16 * int(random.choice([0, 3, 2**40]))},
        [
            *new,
            arena_table,
            segments,
            tensors.table(np.int32, pages, B, max_pages),
            tensors.table(np.int32, max_pages * P, B),
            tensors.table(np.int32, Tq, B),
            tensors.table(np.int32, 30, L, capacity, 4),
            tensors.table(np.int32, capacity, L),
        ],
    )


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    plugins = Library(emulated())
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)
        fuzz_prefill(plugins, np.random.default_rng(seed))
        fuzz_cache(plugins, np.random.default_rng(seed))
    print("done", flush=True)


if __name__ == "__main__":
    main()
