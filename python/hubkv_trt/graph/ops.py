# SPDX-License-Identifier: Apache-2.0
"""The interface between models and backends: a model is a function of ``ops`` and tensors, written once.

``eager.EagerOps`` runs each call with torch at once; ``tensorrt.TensorRTOps`` adds it to a network. A model never looks
inside a tensor: shapes that are known are passed as Python ints, token counts stay dynamic.

Layout: activations are token-major without a batch axis. N is the number of tokens that go through a layer together:
T at prefill, B*Tq at extend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ..config import HubKVConfig

X = TypeVar("X")


@dataclass(frozen=True)
class PrefillInputs(Generic[X]):
    """What a prefill graph reads beside the weights. One sequence."""

    input_ids: X  # int32 [T]
    positions: X  # int32 [T], 0..T-1
    alpha: X | None = None  # float32 [1], r^p; None in a dense graph
    window: X | None = None  # int32 [1]
    rows_per_group: Any = 0  # K of select: a Python int (eager) or a shape tensor (tensorrt)


@dataclass(frozen=True)
class PrefillOutputs(Generic[X]):
    """What a prefill graph gives. K rows of all layers, ragged per head."""

    logits: X  # float32 [V], of the last token
    k_rows: X  # [K, D]
    v_rows: X  # [K, D]
    positions: X  # int32 [K], ascending within a head
    head_offsets: X  # int64 [L*Hkv + 1]
    last_queries: X | None = None  # [L, M, Hq, D], rotated; on request


@dataclass(frozen=True)
class CacheInputs(Generic[X]):
    """The cache as attend reads it; fields and bounds as in ``include/hubkv/hubkv.h``."""

    arena: X  # eager: uint8 [bytes]; tensorrt: int64 [2], its address and size
    segments: X  # int64 [B, 4]
    block_table: X  # int32 [B, maxPages]
    tail_lengths: X  # int32 [B]
    new_lengths: X  # int32 [B]
    work: X  # int32 [L, capacity, 4]
    work_count: X  # int32 [L]
    page_tokens: int  # P
    page_base: int  # bytes


@dataclass(frozen=True)
class ExtendInputs(Generic[X]):
    """What an extend graph reads beside the weights: B sequences of Tq new tokens, B*Tq = N."""

    input_ids: X  # int32 [N], sequence-major
    positions: X  # int32 [N], the true position of each token in its text
    last_tokens: X  # int32 [B], which of the N rows gives each sequence's logits (eager: [M], any rows)
    cache: CacheInputs[X]
    batch_size: Any  # B: a Python int (eager) or a shape tensor (tensorrt)


@dataclass(frozen=True)
class ExtendOutputs(Generic[X]):
    logits: X  # float32 [B, V]
    k_new: X  # [L, B, Tq, Hkv, D]
    v_new: X  # [L, B, Tq, Hkv, D]
    q_new: X | None = None  # [L, B, Tq, Hq, D], rotated; on request


class Ops(Protocol[X]):
    """The operations that models are written in."""

    # -- sources
    def weight(self, name: str) -> X:
        """The weight of that name (``models/checkpoint.py`` lists the names)."""
        ...

    def has_weight(self, name: str) -> bool:
        """Whether the engine holds the weight (biases, an untied ``lm_head``)."""
        ...

    def constant(self, value: np.ndarray) -> X:
        """A small constant that belongs to the graph, in the array's dtype."""
        ...

    # -- control
    def by_tokens(self, f: Callable[..., tuple[X, ...]], *xs: X) -> tuple[X, ...]:
        """f(*xs), where f treats tokens alike and apart: the first axis of each x and of each result is N.

        A backend may run f on some tokens at a time. Each result can be freed by itself.
        """
        ...

    def stage(self, name: str) -> AbstractContextManager[None]:
        """What runs inside belongs to the stage of that name (``scorer``, ...): timed, or named in a network."""
        ...

    # -- dense layers
    def embedding(self, table: X, ids: X) -> X:
        """[V, E], int32 [N] -> [N, E]."""
        ...

    def linear(self, x: X, weight: X, bias: X | None = None) -> X:
        """[N, In], [Out, In], [Out] -> [N, Out]."""
        ...

    def gated_mlp(
        self, x: X, size: int, gate_up: X, down: X, gate_up_bias: X | None = None, down_bias: X | None = None
    ) -> X:
        """x [N, E], gate_up [2*size, E] (gate first), down [E, size] -> down(silu(gate(x)) * up(x)) [N, E]."""
        ...

    def add(self, a: X, b: X) -> X: ...

    def mul(self, a: X, b: X) -> X: ...

    def sub(self, a: X, b: X) -> X: ...

    def rms_norm(self, x: X, weight: X, eps: float) -> X:
        """x / sqrt(mean(x^2 over the last axis) + eps), computed in float32, rounded to x's dtype, times weight."""
        ...

    # -- shapes
    def slice_last(self, x: X, start: int, stop: int) -> X:
        """x[..., start:stop]."""
        ...

    def split_heads(self, x: X, *sizes: int) -> X:
        """[N, h*d...] -> [N, *sizes]; the product of sizes is the last axis."""
        ...

    def merge_heads(self, x: X, size: int) -> X:
        """[N, h, d] -> [N, size]."""
        ...

    def transpose(self, x: X, *axes: int) -> X: ...

    def gather(self, x: X, index: X) -> X:
        """x[index] along the first axis; index int32 [M]."""
        ...

    def last(self, x: X, count: int = 1) -> X:
        """[N, ...] -> [min(count, N), ...], the last rows."""
        ...

    def first(self, x: X) -> X:
        """[N, ...] -> [...], the first row without its axis."""
        ...

    def stack(self, xs: Sequence[X]) -> X:
        """New first axis."""
        ...

    def split_batch(self, x: X, batch_size: Any) -> X:
        """[L, N, ...] -> [L, B, N/B, ...]."""
        ...

    def concat(self, xs: Sequence[X]) -> X:
        """Along the first axis."""
        ...

    # -- element-wise and reductions, float32 (the gate)
    def to_float32(self, x: X) -> X: ...

    def to_dtype(self, x: X) -> X:
        """To the engine's dtype."""
        ...

    def exp(self, x: X) -> X: ...

    def reciprocal(self, x: X) -> X: ...

    def reduce_sum(self, x: X, axis: int) -> X:
        """The axis disappears."""
        ...

    def reduce_mean(self, x: X, axis: int) -> X:
        """The axis disappears."""
        ...

    def matmul_transposed(self, a: X, b: X) -> X:
        """[..., m, c], [..., n, c] -> [..., m, n]."""
        ...

    # -- attention
    def rope_tables(self, positions: X, inv_freq: np.ndarray, attention_factor: float) -> tuple[X, ...]:
        """What ``rotary_embedding`` reads, tensors with N as first axis that models only pass on: cos and sin, times
        the attention factor, in the engine's dtype, of positions int32 [N] times inv_freq float32 [D/2]."""
        ...

    def rotary_embedding(self, x: X, tables: Sequence[X]) -> X:
        """[N, H, D] rotated by halves: (x1*cos - x2*sin, x2*cos + x1*sin). A new tensor: x is not changed."""
        ...

    def causal_attention(self, q: X, k: X, v: X, scale: float) -> X:
        """[M, Hq, D], [T, Hkv, D], [T, Hkv, D] -> [M, Hq, D]. The queries are those of all T tokens, or of the last."""
        ...

    def attend(
        self, layer: int, num_layers: int, q: X, k: X, v: X, cache: CacheInputs[X], batch_size: Any, scale: float
    ) -> X:
        """q [N, Hq, D], new k and v [N, Hkv, D] -> [N, Hq, D], over compact segment, tail and new tokens.

        N is B*Tq, sequence-major; batch_size is B.
        """
        ...

    # -- HubKV
    def refine(self, scores: X, alpha: X, window: X, hubkv: HubKVConfig) -> X:
        """[L, Hkv, T] float32 -> refined [L, Hkv, T] float32. L is the layers that the call sees."""
        ...

    def select(self, refined: X, num_groups: int, rows_per_group: Any) -> tuple[X, X]:
        """[L, Hkv, T], S, K -> positions int32 [S*K], head_offsets int64 [L*Hkv + 1]."""
        ...

    def select_all(self, positions: X, num_heads: int) -> tuple[X, X]:
        """Every token of every head: positions int32 [T] -> positions int32 [H*T], head_offsets int64 [H + 1]."""
        ...

    def compact(self, k: Sequence[X], v: Sequence[X], positions: X, head_offsets: X) -> tuple[X, X]:
        """Per layer k, v [T, Hkv, D] (token-major, as the layers make them) -> k_rows, v_rows [K, D]."""
        ...

    def concat_rows(self, parts: Sequence[X]) -> X:
        """The k_rows (or v_rows) of successive ``compact`` calls, one below the other: [K, D].

        A backend whose outputs are bound one behind the other may leave them apart.
        """
        ...

    def concat_offsets(self, parts: Sequence[X]) -> X:
        """head_offsets [Hkv + 1] of successive layers -> [L*Hkv + 1], each shifted by the rows before it."""
        ...
