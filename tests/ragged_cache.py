# SPDX-License-Identifier: Apache-2.0
"""A KV cache with random ragged contents, for the tests of plan, attend and append."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hubkv_trt import ops, reference


def as_numpy(x: Tensor) -> np.ndarray:
    """What the oracles read: bfloat16 as its bits."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


@dataclass(frozen=True)
class RaggedCache:
    """Arena and tables of B sequences, and the sizes that go with them."""

    arena: Tensor
    segments: Tensor
    block_table: Tensor
    tail_lengths: Tensor
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_tokens: int
    page_base: int

    def plan(self, capacity: int | None = None, min_rows_per_item: int = 64) -> tuple[Tensor, Tensor]:
        batch = len(self.segments)
        return ops.plan(
            self.arena,
            self.segments,
            self.num_layers,
            self.num_kv_heads,
            capacity or batch * self.num_kv_heads + 16,
            min_rows_per_item,
        )

    def _arguments(self, q, k_new, v_new, layer, new_lengths, scale, capacity, min_rows_per_item) -> tuple:
        return (
            q,
            k_new,
            v_new,
            self.arena,
            self.segments,
            self.block_table,
            self.tail_lengths,
            new_lengths,
            *self.plan(capacity, min_rows_per_item),
            layer,
            self.num_layers,
            self.page_tokens,
            self.page_base,
            scale,
        )

    def attend(
        self, q, k_new, v_new, *, layer=0, new_lengths=None, scale=0.0, capacity=None, rows_per_item=64
    ) -> Tensor:
        return ops.attend(*self._arguments(q, k_new, v_new, layer, new_lengths, scale, capacity, rows_per_item))

    def oracle(self, q, k_new, v_new, *, layer=0, new_lengths=None, scale=0.0) -> np.ndarray:
        arguments = self._arguments(q, k_new, v_new, layer, new_lengths, scale, None, 64)
        return reference.attend(*[as_numpy(x) if isinstance(x, Tensor) else x for x in arguments])

    def append(self, k_new: Tensor, v_new: Tensor, new_lengths: Tensor | None = None) -> RaggedCache:
        """Appends in place; the result has the new tail lengths."""
        ops.append(
            k_new, v_new, self.arena, self.block_table, self.tail_lengths, new_lengths, self.page_tokens, self.page_base
        )
        new = new_lengths if new_lengths is not None else k_new.shape[2]
        return replace(self, tail_lengths=(self.tail_lengths + new).to(torch.int32))

    def take(self, order: list[int]) -> RaggedCache:
        """The same cache for a batch of these of its sequences."""
        return replace(
            self,
            segments=self.segments[order],
            block_table=self.block_table[order].contiguous(),
            tail_lengths=self.tail_lengths[order],
        )

    def clone(self) -> RaggedCache:
        return replace(self, arena=self.arena.clone(), segments=self.segments.clone())


def random_cache(
    *,
    sequences: list[tuple[int | None, int]],
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
    max_pages: int | None = None,
    row_bias: bool = False,
    seed: int = 0,
    key_scale: float = 1.0,
) -> RaggedCache:
    """A cache of sequences (mean compact rows of a head or None for no segment, tokens in the tail).

    Rows per head are random, some heads have none. Pages are in random order; what no row covers is NaN, so that a
    kernel that reads it shows.
    """
    rng = np.random.default_rng(seed)
    itemsize = dtype.itemsize
    page_bytes = num_layers * 2 * num_kv_heads * page_tokens * head_dim * itemsize
    pages_each = max_pages if max_pages is not None else max(-(-t // page_tokens) + 2 for _, t in sequences)
    num_pages = len(sequences) * pages_each
    segments = np.full((len(sequences), 4), -1, np.int64)
    parts: list[tuple[int, np.ndarray]] = []
    end = 0

    def place(array: np.ndarray) -> int:
        nonlocal end
        offset, end = end, -(-(end + array.nbytes) // 256) * 256
        parts.append((offset, array))
        return offset

    def values(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = torch.from_numpy((rng.standard_normal(shape) * scale).astype(np.float32)).to(dtype)
        return as_numpy(x)

    heads = num_layers * num_kv_heads
    for index, (mean, _) in enumerate(sequences):
        if mean is None:
            continue
        counts = rng.integers(0, 2 * mean + 1, heads)
        counts[rng.random(heads) < 0.2] = 0
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = int(offsets[-1])
        segments[index, 0] = place(values(rows, head_dim, scale=key_scale))
        segments[index, 1] = place(values(rows, head_dim))
        segments[index, 2] = place(offsets)
        if row_bias:
            segments[index, 3] = place(rng.uniform(-2, 2, rows).astype(np.float32))
    page_base = end + 256
    arena = np.full(page_base + num_pages * page_bytes + 64, 0xFF, np.uint8)  # NaN in every type
    for offset, array in parts:
        arena[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    block_table = rng.permutation(num_pages).astype(np.int32).reshape(len(sequences), pages_each)
    cache = RaggedCache(
        torch.from_numpy(arena),
        torch.from_numpy(segments),
        torch.from_numpy(block_table),
        torch.zeros(len(sequences), dtype=torch.int32),
        num_layers,
        num_kv_heads,
        head_dim,
        dtype,
        page_tokens,
        page_base,
    )
    tails = torch.tensor([t for _, t in sequences], dtype=torch.int32)
    longest = int(tails.max())
    if longest:
        shape = (num_layers, len(sequences), longest, num_kv_heads, head_dim)
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        reference.append(
            as_numpy(k),
            as_numpy(v),
            arena,
            block_table,
            np.zeros(len(sequences), np.int32),
            tails.numpy(),
            page_tokens,
            page_base,
        )
    return replace(cache, tail_lengths=tails)


def new_rows(
    cache: RaggedCache, num_new: int, group: int, seed: int = 1, layers: int | None = None
) -> tuple[Tensor, ...]:
    """q [B, Tq, Hq, D], k and v [B, Tq, Hkv, D]; with a leading axis where layers is given."""
    generator = torch.Generator().manual_seed(seed)
    lead = () if layers is None else (layers,)
    batch = len(cache.segments)

    def rows(heads: int) -> Tensor:
        return torch.randn(*lead, batch, num_new, heads, cache.head_dim, generator=generator).to(cache.dtype)

    return rows(cache.num_kv_heads * group), rows(cache.num_kv_heads), rows(cache.num_kv_heads)
