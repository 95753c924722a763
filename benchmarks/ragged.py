# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/stages.py and device.py work on: scores, dense K and V, and compact segments of a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import torch_steps
from hubkv_trt import ops
from hubkv_trt.config import DType


@dataclass(frozen=True)
class Shape:
    """A model's cache."""

    num_layers: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: DType

    @property
    def text(self) -> str:
        sizes = f"L = {self.num_layers}, Hkv = {self.num_kv_heads}, G = {self.group_size}, D = {self.head_dim}"
        return f"{sizes}, {self.dtype.value}"

    @property
    def row_bytes(self) -> int:
        """Of one KV pair, K and V."""
        return 2 * self.head_dim * self.dtype.itemsize


SHAPES = {
    "qwen3-8b": Shape(36, 8, 4, 128, DType.BFLOAT16),
    "demo": Shape(30, 3, 3, 64, DType.FLOAT32),
}


def draw_scores(layers: int, heads: int, tokens: int, device: str = "cpu") -> torch.Tensor:
    """float32 [L, Hkv, T] in [0, 1]: u^a with an exponent of each head in 1..8, most pairs near 0 as a gate's are."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.rand(layers, heads, tokens, generator=generator, device=device)
    return scores.pow_(torch.rand(layers, heads, 1, generator=generator, device=device) * 7 + 1)


def make_rows(layers: int, shape: Shape, tokens: int, device: str = "cpu") -> list[torch.Tensor]:
    """Per layer [T, Hkv, D], token-major; one random block repeated."""
    block = torch.randn(min(tokens, 2048), shape.num_kv_heads, shape.head_dim, device=device)
    block = block.to(getattr(torch, shape.dtype.value))
    rows = [torch.empty(tokens, *block.shape[1:], dtype=block.dtype, device=device) for _ in range(layers)]
    for layer in rows:
        for piece in layer.split(len(block)):
            piece.copy_(block[: len(piece)])
    return rows


class RaggedCache:
    """B compact segments with the same rows, each in memory of its own, as the runtime lays them into its arena.

    Args:
        offsets: int64 [L*Hkv + 1], on the device of the cache.
    """

    def __init__(self, shape: Shape, layers: int, rows: int, batch: int, offsets: torch.Tensor) -> None:
        self.shape, self.layers, self.batch = shape, layers, batch
        self._dtype, self._rows = getattr(torch, shape.dtype.value), rows
        side = -(-rows * shape.row_bytes // 2 // 256) * 256
        table = -(-offsets.numel() * 8 // 256) * 256
        self._starts = [table + 2 * b * side for b in range(batch)]
        device = offsets.device
        self.arena = torch.zeros(table + 2 * batch * side + 256, dtype=torch.uint8, device=device)
        self.arena[: offsets.numel() * 8] = offsets.view(torch.uint8)
        self._side = side
        segments = [[start, start + side, 0, -1] for start in self._starts]
        self.segments = torch.tensor(segments, dtype=torch.int64, device=device)
        self.pages = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self.tails = torch.zeros(batch, dtype=torch.int32, device=device)
        self.plan(16 * ops.num_threads())

    def plan(self, items: int) -> None:
        """Makes the work list of attend; items: of a layer, beyond one a head."""
        heads = self.shape.num_kv_heads
        self.work = ops.plan(self.arena, self.segments, self.layers, heads, self.batch * heads + items, 256)

    def rows(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k_rows and v_rows [K, D] of sequence b."""
        size = self._rows * self.shape.row_bytes // 2
        views = (self.arena[start : start + size] for start in (self._starts[b], self._starts[b] + self._side))
        k, v = (view.view(self._dtype).view(self._rows, self.shape.head_dim) for view in views)
        return k, v

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B, 1, Hq, D]."""
        tables = (self.arena, self.segments, self.pages, self.tails, None, *self.work)
        return ops.attend(q, k, v, *tables, layer, self.layers, 16, 0, 0.0)

    def padded(
        self, offsets: torch.Tensor, new: list[torch.Tensor], group_size: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per layer what torch attends to: k, v [B, Hkv, 1 + longest, D], the new token first, mask [B, Hq, 1, ...]."""
        sides = []
        for rows, token in zip(self.rows(0), new, strict=True):
            layers = []
            for padded, mask in torch_steps.pad_rows(rows, offsets, self.layers):
                whole = torch.cat([token.transpose(1, 2), padded.expand(self.batch, *padded.shape)], 2)
                here = torch.cat([torch.ones(len(mask), 1, dtype=torch.bool, device=mask.device), mask], 1)
                here = here.repeat_interleave(group_size, 0)[None, :, None].expand(self.batch, -1, -1, -1)
                layers.append((whole, here))
            sides.append(layers)
        return [(k, v, mask) for (k, mask), (v, _) in zip(*sides, strict=True)]
