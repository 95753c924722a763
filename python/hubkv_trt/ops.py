# SPDX-License-Identifier: Apache-2.0
"""The six stages as torch operators, ``torch.ops.hubkv.*``, and as typed functions of the same names.

Letters: B sequences, T prompt tokens, Tq new tokens, L layers, Hq query heads, Hkv KV heads, D head dim, K kept rows,
P tokens per tail page. Exact semantics: ``include/hubkv/hubkv.h``. Tensors are on the CPU or on one CUDA device and
dense unless said otherwise. All functions raise:

* ``ValueError`` naming the field and the value: a tensor or a parameter does not fit;
* ``NotImplementedError``: a CUDA tensor, and libhubkv was not built with CUDA;
* ``ImportError``: there is no libhubkv (the message says how to build it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _stages_cache, _stages_prefill
from ._library import cpu_isa, has_cuda, num_threads, set_num_threads, version

__all__ = [
    "refine",
    "select",
    "compact",
    "compact_into",
    "plan",
    "attend",
    "append",
    "cpu_isa",
    "has_cuda",
    "num_threads",
    "set_num_threads",
    "version",
]

_LIBRARY = torch.library.Library("hubkv", "DEF")
_SCHEMAS = """
refine(Tensor scores, Tensor alpha, Tensor window, int nms_kernel, float penalty_factor,
    float head_weight_temperature, float min_head_weight, float max_head_weight, int sink_tokens)
    -> (Tensor refined, Tensor non_finite)
select(Tensor refined, int num_groups, SymInt rows_per_group) -> (Tensor positions, Tensor head_offsets)
compact(Tensor[] k, Tensor[] v, Tensor positions, Tensor head_offsets) -> (Tensor k_rows, Tensor v_rows)
compact_into(Tensor[] k, Tensor[] v, Tensor positions, Tensor head_offsets, Tensor(a!) k_rows, Tensor(b!) v_rows) -> ()
plan(Tensor arena, Tensor segments, int num_layers, int num_kv_heads, SymInt capacity, int min_rows_per_item)
    -> (Tensor work, Tensor work_count)
attend(Tensor q, Tensor k_new, Tensor v_new, Tensor arena, Tensor segments, Tensor block_table, Tensor tail_lengths,
    Tensor? new_lengths, Tensor work, Tensor work_count, int layer, int num_layers, int page_tokens, int page_base,
    float scale) -> Tensor
append(Tensor k_new, Tensor v_new, Tensor(a!) arena, Tensor block_table, Tensor tail_lengths, Tensor? new_lengths,
    int page_tokens, int page_base) -> ()
"""


def _cuda_device(arguments: Sequence[Any]) -> torch.device:
    """Of the first tensor that is on one; tensors elsewhere are the stage's to refuse, by name."""
    for x in arguments:
        for tensor in x if isinstance(x, list | tuple) else (x,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                return tensor.device
    raise ValueError("no argument is a CUDA tensor")


def _on_device(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The stage with its tensors' CUDA device made the current one."""

    @functools.wraps(stage)
    def run(*arguments: Any) -> Any:
        with torch.cuda.device(_cuda_device(arguments)):
            return stage(*arguments)

    return run


for _schema in _SCHEMAS.strip().replace("\n    ", " ").splitlines():
    _name = _schema.partition("(")[0]
    _stage = getattr(_stages_prefill, _name, None) or getattr(_stages_cache, _name)
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _stage, "CPU")
    _LIBRARY.impl(_name, _on_device(_stage), "CUDA")


def _same_device(*arguments: object) -> None:
    """Fake kernels also run where one of several tensors is on the meta device: refuse, lest the result be no data."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors are on {', '.join(sorted(map(str, devices)))}, not on one device")


@torch.library.register_fake("hubkv::refine", lib=_LIBRARY)
def _(scores: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    _same_device(scores, *others)
    return torch.empty_like(scores), scores.new_empty((1,), dtype=torch.int64)


@torch.library.register_fake("hubkv::select", lib=_LIBRARY)
def _(refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
    return (
        refined.new_empty((num_groups * rows_per_group,), dtype=torch.int32),
        refined.new_empty((refined.shape[0] * refined.shape[1] + 1,), dtype=torch.int64),
    )


@torch.library.register_fake("hubkv::compact", lib=_LIBRARY)
def _(k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor) -> tuple[Tensor, Tensor]:
    _same_device(*k, *v, positions, head_offsets)
    shape = (positions.shape[0], k[0].shape[2])
    return k[0].new_empty(shape), v[0].new_empty(shape)


@torch.library.register_fake("hubkv::compact_into", lib=_LIBRARY)
def _(k: Sequence[Tensor], v: Sequence[Tensor], *others: Tensor) -> None:
    _same_device(*k, *v, *others)


@torch.library.register_fake("hubkv::plan", lib=_LIBRARY)
def _(
    arena: Tensor, segments: Tensor, num_layers: int, num_kv_heads: int, capacity: int, min_rows_per_item: int
) -> tuple[Tensor, Tensor]:
    _same_device(arena, segments)
    return (
        segments.new_empty((num_layers, capacity, 4), dtype=torch.int32),
        segments.new_empty((num_layers,), dtype=torch.int32),
    )


@torch.library.register_fake("hubkv::attend", lib=_LIBRARY)
def _(q: Tensor, *tables: object) -> Tensor:
    _same_device(q, *tables)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.register_fake("hubkv::append", lib=_LIBRARY)
def _(*tensors: object) -> None:
    _same_device(*tensors)


_ops = torch.ops.hubkv
_refine, _select, _compact, _compact_into = (
    _ops.refine.default,
    _ops.select.default,
    _ops.compact.default,
    _ops.compact_into.default,
)
_plan, _attend, _append = _ops.plan.default, _ops.attend.default, _ops.append.default


def refine(
    scores: Tensor,
    alpha: Tensor,
    window: Tensor,
    nms_kernel: int,
    penalty_factor: float,
    head_weight_temperature: float,
    min_head_weight: float,
    max_head_weight: float,
    sink_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Score refinement: hubs keep their score, their neighbours are discounted, heads are calibrated, protected tokens
    get +inf.

    Args:
        scores: float32 [L, Hkv, T]. L is the layers of this call.
        alpha: float32 [1] in [0, 1], compression ratio ^ gate power; 0 leaves the scores as they are.
        window: int32 [1], how many of the last tokens are protected.
        nms_kernel: tokens of the window in which a hub is the largest; odd.
        penalty_factor: gamma in [0, 1], what a token that is no hub keeps of its score.
        head_weight_temperature: tau >= 0; 0 weighs all heads alike.
        min_head_weight: lower bound of a head's weight, > 0.
        max_head_weight: upper bound of a head's weight.
        sink_tokens: how many of the first tokens are protected.

    Returns:
        refined float32 [L, Hkv, T], and int64 [1]: how many scores were NaN or infinite.
    """
    refined: tuple[Tensor, Tensor] = _refine(
        scores,
        alpha,
        window,
        nms_kernel,
        penalty_factor,
        head_weight_temperature,
        min_head_weight,
        max_head_weight,
        sink_tokens,
    )
    return refined


def select(refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
    """Exactly the K largest of each group of heads. Equal values: the lower flat index (head, token) wins.

    Args:
        refined: float32 [L, Hkv, T].
        num_groups: S, groups that L*Hkv heads are cut into: 1 (model scope), L (layer) or L*Hkv (head).
        rows_per_group: K of each group, 0..L*Hkv*T/S.

    Returns:
        positions int32 [S*K], ascending within a head, and head_offsets int64 [L*Hkv + 1], the rows before each head.
    """
    selected: tuple[Tensor, Tensor] = _select(refined, num_groups, rows_per_group)
    return selected


def compact(k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Copies the kept rows of any number of layers together, unchanged.

    Args:
        k: per layer [Hkv, T, D], float32, float16 or bfloat16; any head and token strides that all layers share, the D
            values of a row dense.
        v: as k, with strides of its own.
        positions: int32 [K], from :func:`select`.
        head_offsets: int64 [L*Hkv + 1], from :func:`select`.

    Returns:
        k_rows and v_rows [K, D].
    """
    rows: tuple[Tensor, Tensor] = _compact(k, v, positions, head_offsets)
    return rows


def compact_into(
    k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor, k_rows: Tensor, v_rows: Tensor
) -> None:
    """:func:`compact` that writes to k_rows and v_rows [K, D], for example a segment in the arena."""
    _compact_into(k, v, positions, head_offsets, k_rows, v_rows)


def plan(
    arena: Tensor, segments: Tensor, num_layers: int, num_kv_heads: int, capacity: int, min_rows_per_item: int
) -> tuple[Tensor, Tensor]:
    """The work list of :func:`attend`: compact rows cut into items of near equal size. Holds until a segment changes.

    Args:
        arena: uint8 [bytes], the one block that holds all cache memory.
        segments: int64 [B, 4], byte offsets of each sequence's k_rows, v_rows, head_offsets and row_bias (-1: none).
        num_layers: L.
        num_kv_heads: Hkv.
        capacity: items that a layer may have, >= B*Hkv.
        min_rows_per_item: items are no smaller than this as long as the rows last, >= 1.

    Returns:
        work int32 [L, capacity, 4]: sequence, KV head, first row within the head, rows; and work_count int32 [L].
    """
    planned: tuple[Tensor, Tensor] = _plan(arena, segments, num_layers, num_kv_heads, capacity, min_rows_per_item)
    return planned


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    tail_lengths: Tensor,
    new_lengths: Tensor | None,
    work: Tensor,
    work_count: Tensor,
    layer: int,
    num_layers: int,
    page_tokens: int,
    page_base: int,
    scale: float,
) -> Tensor:
    """Attention of new tokens over compact segment, tail and new tokens (causal among the new), float32 accumulation.

    Args:
        q: [B, Tq, Hq, D], float32, float16 or bfloat16, Hq/Hkv in 1..16. Of q, k_new and v_new heads are dense and
            sequences Tq tokens apart; the token stride is free, so that slices of a fused projection pass uncopied.
        k_new: [B, Tq, Hkv, D], dtype of q, RoPE applied.
        v_new: [B, Tq, Hkv, D].
        arena: uint8 [bytes].
        segments: int64 [B, 4], as for :func:`plan`.
        block_table: int32 [B, maxPages], pages of each tail.
        tail_lengths: int32 [B], tokens in each tail.
        new_lengths: int32 [B], how many of the Tq new tokens of each sequence are real; None: all. Others get zeros.
        work: int32 [L, capacity, 4], from :func:`plan`.
        work_count: int32 [L], from :func:`plan`.
        layer: which layer's rows, 0..L-1.
        num_layers: L.
        page_tokens: P.
        page_base: byte offset of page 0 in the arena.
        scale: of the logits; 0 means 1/sqrt(D).

    Returns:
        [B, Tq, Hq, D], dense, dtype of q.
    """
    out: Tensor = _attend(
        q,
        k_new,
        v_new,
        arena,
        segments,
        block_table,
        tail_lengths,
        new_lengths,
        work,
        work_count,
        layer,
        num_layers,
        page_tokens,
        page_base,
        scale,
    )
    return out


def append(
    k_new: Tensor,
    v_new: Tensor,
    arena: Tensor,
    block_table: Tensor,
    tail_lengths: Tensor,
    new_lengths: Tensor | None,
    page_tokens: int,
    page_base: int,
) -> None:
    """Writes the new rows of all layers to the tail pages in the arena. The caller then adds to tail_lengths.

    Args:
        k_new: [L, B, Tq, Hkv, D].
        v_new: [L, B, Tq, Hkv, D], dtype of k_new.
        arena: uint8 [bytes], written to.
        block_table: int32 [B, maxPages]. A slot that has no page is not written.
        tail_lengths: int32 [B], tokens in each tail before this call.
        new_lengths: int32 [B], how many of the Tq new tokens of each sequence are real; None: all.
        page_tokens: P.
        page_base: byte offset of page 0 in the arena.
    """
    _append(k_new, v_new, arena, block_table, tail_lengths, new_lengths, page_tokens, page_base)
