# SPDX-License-Identifier: Apache-2.0
"""Runs a model's graph at once with torch, on the CPU or a CUDA device: the embedded default, and the oracle of others.

Few torch calls per layer (a decode step of a small model is mostly call overhead), no T x T memory, no copy of K or V
beyond the rows that are kept.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops as stages
from ..config import DType, HubKVConfig
from ..refinement import refine
from .linear import linear, pack_weights
from .ops import CacheInputs

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}
"""torch's names of the engine dtypes."""

PIECE_TOKENS = 512
"""Tokens that go through the token-wise part of a layer together on the CPU: activations stay in its caches."""


class _Stage:
    """Adds the seconds of a ``with`` block to ``seconds[name]``."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._start


class EagerOps:
    """``graph.ops.Ops`` over torch tensors. Call it under ``torch.inference_mode()``.

    Args:
        weights: by the names of ``models/checkpoint.py`` (and ``models/gate.py``), in ``dtype``, on one device. On
            the CPU matrices are packed (``graph.linear.pack_weights``): let go of the mapping, or memory holds both.
        dtype: of activations and cache rows.
        rows_into: k_rows and v_rows [K, D] that ``compact`` fills from the top, for example views of the cache arena;
            None makes new tensors. Set anew for every prefill.

    Attributes:
        seconds: wall time by stage (``scorer``, ``refine``, ``select``, ``compact``, ``attend``) since it was last
            cleared; on CUDA the time to enqueue.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: DType, rows_into: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self._weights = pack_weights(dict(weights))
        self.dtype = TORCH_DTYPES[DType(dtype)]
        self.device = next(iter(weights.values())).device
        self.seconds: dict[str, float] = {}
        self._constants: dict[tuple[bytes, tuple[int, ...], str], Tensor] = {}
        self.rows_into = rows_into

    def with_rows_into(self, k_rows: Tensor, v_rows: Tensor) -> EagerOps:
        """The same weights for one prefill that others may interrupt: rows of its own to fill, seconds of its own."""
        ops = copy.copy(self)
        ops.rows_into, ops.seconds = (k_rows, v_rows), {}
        return ops

    @property
    def rows_into(self) -> tuple[Tensor, Tensor] | None:
        """Where ``compact`` writes."""
        return self._rows_into

    @rows_into.setter
    def rows_into(self, rows: tuple[Tensor, Tensor] | None) -> None:
        self._rows_into, self._rows_used = rows, 0

    # -- sources

    def weight(self, name: str) -> Tensor:
        return self._weights[name]

    def has_weight(self, name: str) -> bool:
        return name in self._weights

    def constant(self, value: np.ndarray) -> Tensor:
        key = (value.tobytes(), value.shape, value.dtype.str)
        if key not in self._constants:
            self._constants[key] = torch.from_numpy(value.copy()).to(self.device)
        return self._constants[key]

    # -- control

    def by_tokens(self, f: Callable[..., tuple[Tensor, ...]], *xs: Tensor) -> tuple[Tensor, ...]:
        num_tokens = xs[0].shape[0]
        if num_tokens <= PIECE_TOKENS or self.device.type != "cpu":
            return tuple(y.contiguous() for y in f(*xs))  # a slice would hold on to all of what it was cut from
        wholes: list[Tensor] = []
        for pieces in zip(*(x.split(PIECE_TOKENS) for x in xs), strict=True):
            parts = f(*pieces)
            if not wholes:
                wholes = [part.new_empty((num_tokens, *part.shape[1:])) for part in parts]
                targets = zip(*(whole.split(PIECE_TOKENS) for whole in wholes), strict=True)
            for target, part in zip(next(targets), parts, strict=True):
                target.copy_(part)
        return tuple(wholes)

    def stage(self, name: str) -> _Stage:
        return _Stage(self.seconds, name)

    # -- dense layers

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def gated_mlp(
        self,
        x: Tensor,
        size: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        inner = linear(x, gate_up, gate_up_bias)
        return linear(F.silu(inner[:, :size]).mul_(inner[:, size:]), down, down_bias)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

    # -- shapes

    def slice_last(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x[..., start:stop]

    def split_heads(self, x: Tensor, *sizes: int) -> Tensor:
        return x.view(*x.shape[:-1], *sizes)

    def merge_heads(self, x: Tensor, size: int) -> Tensor:
        return x.reshape(x.shape[0], size)

    def transpose(self, x: Tensor, *axes: int) -> Tensor:
        return x.permute(axes)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def last(self, x: Tensor, count: int = 1) -> Tensor:
        return x[-count:].clone()  # a slice would hold on to all of x

    def first(self, x: Tensor) -> Tensor:
        return x[0]

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(xs))

    def split_batch(self, x: Tensor, batch_size: int) -> Tensor:
        return x.view(x.shape[0], batch_size, -1, *x.shape[2:])

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return xs[0] if len(xs) == 1 else torch.cat(tuple(xs))

    # -- element-wise and reductions

    def to_float32(self, x: Tensor) -> Tensor:
        return x.float()

    def to_dtype(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def reciprocal(self, x: Tensor) -> Tensor:
        return x.reciprocal()

    def reduce_sum(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    def reduce_mean(self, x: Tensor, axis: int) -> Tensor:
        return x.mean(axis)

    def matmul_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.transpose(-1, -2)

    # -- attention

    def rope_tables(self, positions: Tensor, inv_freq: np.ndarray, attention_factor: float) -> tuple[Tensor, ...]:
        """cos twice, and -sin, sin: [N, 1, D] each, so that rotating is x*cos + swapped halves*sin."""
        angles = positions.float()[:, None] * self.constant(inv_freq)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        if attention_factor != 1.0:
            tables *= attention_factor
        cos, sin = tables.to(self.dtype).unsqueeze(2)
        return cos, sin

    def rotary_embedding(self, x: Tensor, tables: Sequence[Tensor]) -> Tensor:
        cos, sin = tables
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        num_queries, num_tokens = q.shape[0], k.shape[0]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mask = None
        if 1 < num_queries < num_tokens:
            mask = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=q.device)
            mask = mask.tril(num_tokens - num_queries)
        causal = num_queries == num_tokens
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def attend(
        self,
        layer: int,
        num_layers: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: CacheInputs[Tensor],
        batch_size: int,
        scale: float,
    ) -> Tensor:
        start = time.perf_counter()
        q, k, v = (x.view(batch_size, -1, *x.shape[1:]) for x in (q, k, v))
        out = stages.attend(
            q, k, v, cache.arena, cache.segments, cache.block_table, cache.tail_lengths, cache.new_lengths, cache.work,
            cache.work_count, layer, num_layers, cache.page_tokens, cache.page_base, scale,
        )  # fmt: skip
        self._took("attend", start)
        return out.flatten(0, 1)

    # -- HubKV

    def _took(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def refine(self, scores: Tensor, alpha: Tensor, window: Tensor, hubkv: HubKVConfig) -> Tensor:
        """As ``Ops.refine``.

        Raises:
            ValueError: scores that are not finite; says how many.
        """
        with self.stage("refine"):
            refined, non_finite = refine(scores, alpha, window, hubkv)
            count = int(non_finite)
        if count:
            raise ValueError(
                f"scores: {count} of {scores.numel()} values are NaN or infinite; "
                "check the gate's weights, or build the engine with dtype bfloat16 or float32"
            )
        return refined

    def select(self, refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
        with self.stage("select"):
            return stages.select(refined, num_groups, rows_per_group)

    def select_all(self, positions: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        num_tokens = positions.shape[0]
        offsets = torch.arange(num_heads + 1, dtype=torch.int64, device=positions.device) * num_tokens
        return positions.repeat(num_heads), offsets

    def compact(
        self, k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        with self.stage("compact"):
            k, v = ([x.transpose(0, 1) for x in xs] for xs in (k, v))
            if self._rows_into is None:
                return stages.compact(k, v, positions, head_offsets)
            first = self._rows_used
            self._rows_used += positions.shape[0]
            k_rows, v_rows = (rows[first : self._rows_used] for rows in self._rows_into)
            stages.compact_into(k, v, positions, head_offsets, k_rows, v_rows)
            return k_rows, v_rows

    def concat_rows(self, parts: Sequence[Tensor]) -> Tensor:
        if self._rows_into is not None:  # compact wrote them side by side
            k_rows, v_rows = self._rows_into
            whole = k_rows if parts[0].data_ptr() == k_rows.data_ptr() else v_rows
            return whole[: self._rows_used]
        return self.concat(parts)

    def concat_offsets(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        ends = torch.stack([p[-1] for p in parts]).cumsum(0)
        shifted = [parts[0], *(p[1:] + base for p, base in zip(parts[1:], ends[:-1], strict=True))]
        return torch.cat(shifted)
