# SPDX-License-Identifier: Apache-2.0
"""One sequence in the middle of decoding, for the tests of the stages that compress it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hubkv_trt import ops, reference
from ragged_cache import RaggedCache, as_numpy, random_cache

SINKS = 4
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of merged rows


@dataclass(frozen=True)
class DecodingCache:
    """A cache of one sequence, positions [K] of its compact rows, and which tail tokens are candidates."""

    cache: RaggedCache
    positions: Tensor
    tail_tokens: int
    tail_base: int

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.arena, self.cache.segments, self.cache.block_table

    @property
    def heads(self) -> int:
        return self.cache.num_layers * self.cache.num_kv_heads

    @property
    def num_candidates(self) -> int:
        return self.positions.numel() + self.heads * self.tail_tokens

    def queries(self, window: int, group: int, seed: int = 1) -> Tensor:
        """[L, W, Hq, D]"""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.cache.num_layers, window, self.cache.num_kv_heads * group, self.cache.head_dim)
        return torch.randn(shape, generator=generator).to(self.cache.dtype)

    def score_arguments(
        self,
        q: Tensor,
        score: str = "vanilla",
        pool_kernel: int = 7,
        mix: float = 0.1,
        sink_tokens: int = SINKS,
        scale: float = 0.0,
    ) -> tuple:
        cache = self.cache
        sizes = (self.tail_tokens, self.tail_base, cache.num_kv_heads, cache.page_tokens, cache.page_base)
        return (q, self.positions, *self.tables, *sizes, score, pool_kernel, mix, sink_tokens, scale)

    def rewrite(self, places: Tensor, indices: Tensor, head_offsets: Tensor, bias: bool = True) -> tuple[Tensor, ...]:
        """k_rows, v_rows, positions and row_bias of the new segment, after they were found equal to the oracle's."""
        cache, rows = self.cache, indices.numel()
        sizes = (self.positions.numel(), self.tail_tokens, self.tail_base, cache.num_layers)
        inputs = (places, indices, head_offsets, *self.tables, *sizes, cache.page_tokens, cache.page_base)
        results = []
        for stage in (ops.rewrite_into, reference.rewrite_into):
            outputs = [
                torch.full((rows, cache.head_dim), 7.0, dtype=cache.dtype),
                torch.full((rows, cache.head_dim), 7.0, dtype=cache.dtype),
                torch.full((rows,), 7, dtype=torch.int32),
                torch.full((rows,), 7.0) if bias else None,
            ]
            arguments = [*inputs, *outputs]
            if stage is reference.rewrite_into:
                arguments = [as_numpy(x) if isinstance(x, Tensor) else x for x in arguments]
            stage(*arguments)
            results.append([x for x in outputs if x is not None])
        for got, want in zip(*results, strict=True):
            assert np.array_equal(as_numpy(got).view(np.uint8), as_numpy(want).view(np.uint8))
        return tuple(results[0])

    def merge(self, logits: Tensor, places: Tensor, indices: Tensor, head_offsets: Tensor, merged: int) -> list[Tensor]:
        """What merge_into writes, after it was found equal to the oracle: kept rows and positions exactly."""
        cache, rows = self.cache, indices.numel() + self.heads * merged
        sizes = (self.positions.numel(), self.tail_tokens, self.tail_base, cache.num_layers)
        inputs = (
            logits,
            places,
            indices,
            head_offsets,
            *self.tables,
            *sizes,
            cache.page_tokens,
            cache.page_base,
            merged,
        )
        got = segment_of(rows, cache.head_dim, cache.dtype)
        ops.merge_into(*inputs, *got)
        want = [as_numpy(torch.full_like(x, 7)) for x in got]
        reference.merge_into(*[as_numpy(x) if isinstance(x, Tensor) else x for x in inputs], *want)
        kept = torch.ones(rows, dtype=torch.bool)
        for head, end in enumerate(head_offsets[1:].tolist()):
            kept[end + head * merged : end + (head + 1) * merged] = False
        tolerance = TOLERANCES[cache.dtype]
        for x, y in zip(got[:2], want[:2], strict=True):
            expected = torch.from_numpy(y).view(x.dtype)
            assert torch.equal(x[kept].view(torch.uint8), expected[kept].view(torch.uint8))
            torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)
        assert np.array_equal(got[2].numpy(), want[2])
        np.testing.assert_allclose(got[3].numpy(), want[3], rtol=1e-5, atol=1e-5)
        return got


def segment_of(rows: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """k_rows, v_rows, positions and row_bias to be written to."""
    k, v = (torch.full((rows, head_dim), 7.0, dtype=dtype) for _ in "kv")
    return [k, v, torch.full((rows,), 7, dtype=torch.int32), torch.full((rows,), 7.0)]


def decoding_cache(rows: int | None = 40, tail: int = 37, tail_tokens: int = 32, **options) -> DecodingCache:
    """A sequence with that many compact rows a head on average (None: no segment), and that many tokens in its tail,
    the first tail_tokens of which are candidates. Options as for ``random_cache``.
    """
    cache = random_cache(sequences=[(rows, tail)], **options)
    heads = cache.num_layers * cache.num_kv_heads
    offsets = np.zeros(heads + 1, np.int64)
    if rows is not None:
        at = int(cache.segments[0, 2])
        offsets = cache.arena[at : at + 8 * (heads + 1)].view(torch.int64).numpy()
    rng = np.random.default_rng(options.get("seed", 0))
    tail_base = 3 * max(int(np.diff(offsets).max()), 2)
    places = [np.sort(rng.choice(tail_base, n, replace=False)) for n in np.diff(offsets)]
    positions = torch.from_numpy(np.concatenate(places).astype(np.int32))
    return DecodingCache(cache, positions, tail_tokens, tail_base)
