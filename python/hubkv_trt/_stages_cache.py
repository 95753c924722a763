# SPDX-License-Identifier: Apache-2.0
"""plan, attend and append, in the way of ``_stages_prefill.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _abi
from ._library import call, fail, library, workspace_bytes
from ._operators import operator
from ._tensors import (
    BoundedCache,
    address,
    arena_table,
    check,
    check_device,
    check_dims,
    dtype_code,
    int32,
    place,
    shape_text,
    token_stride,
    workspace,
)


@operator()
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
    check(arena, "arena", torch.uint8, (None,), arena.device)
    check(segments, "segments", torch.int64, (None, 4), arena.device)
    int32(num_layers, "num_layers")
    int32(capacity, "capacity")
    # A plan counts rows. How large a row is would only bound a wrong table, and attend bounds it again.
    params = _abi.CacheParams(segments.shape[0], num_layers, num_kv_heads, 8, _abi.FLOAT16, 1, 0, 0, capacity)
    work = torch.zeros((max(num_layers, 0), max(capacity, 0), 4), dtype=torch.int32, device=arena.device)
    work_count = torch.empty(max(num_layers, 0), dtype=torch.int32, device=arena.device)
    call(
        "hubkv_plan",
        *place(arena),
        params,
        min_rows_per_item,
        arena_table(arena),
        address(segments),
        address(work),
        address(work_count),
    )
    return work, work_count


class _AttendCall(NamedTuple):
    params: _abi.AttendParams
    num_bytes: int  # of the workspace
    arena: int  # address of its table


_attend_calls = BoundedCache()


@operator()
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
    # A decode step calls this once per layer, so the way through is kept short: everything that shapes, strides, dtypes
    # and devices decide is decided once, at the first call with them.
    # fmt: off
    key = (
        layer, num_layers, page_tokens, page_base, scale,
        q.shape, q.stride(), q.dtype, q.device,
        k_new.shape, k_new.stride(), k_new.dtype, k_new.device,
        v_new.shape, v_new.stride(), v_new.dtype, v_new.device,
        arena.data_ptr(), arena.shape, arena.dtype, arena.device, arena.is_contiguous(),
        segments.shape, segments.dtype, segments.device, segments.is_contiguous(),
        block_table.shape, block_table.dtype, block_table.device, block_table.is_contiguous(),
        tail_lengths.shape, tail_lengths.dtype, tail_lengths.device, tail_lengths.is_contiguous(),
        work.shape, work.dtype, work.device, work.is_contiguous(),
        work_count.shape, work_count.dtype, work_count.device, work_count.is_contiguous(),
        None if new_lengths is None else
        (new_lengths.shape, new_lengths.dtype, new_lengths.device, new_lengths.is_contiguous()),
    )
    # fmt: on
    known: _AttendCall | None = _attend_calls.get(key)
    if known is None:
        _check_rows(q, k_new, v_new)
        batch, num_new, num_heads, head_dim = q.shape
        num_kv_heads = k_new.shape[2]
        check(work, "work", torch.int32, (num_layers, None, 4), q.device)
        check(work_count, "work_count", torch.int32, (num_layers,), q.device)
        _check_tables(q.device, batch, arena, block_table, tail_lengths, new_lengths)
        check(segments, "segments", torch.int64, (batch, 4), q.device)
        pages = (page_tokens, block_table.shape[1], page_base)
        sizes = (batch, num_layers, num_kv_heads, head_dim, dtype_code(q, "q"))
        strides = (token_stride(q, "q"), token_stride(k_new, "k_new"), token_stride(v_new, "v_new"))
        params = _abi.AttendParams(
            _abi.CacheParams(*sizes, *pages, work.shape[1]), num_new, num_heads, layer, scale, *strides
        )
        num_bytes = workspace_bytes("hubkv_attend_workspace", place(q)[0], params)
        known = _AttendCall(params, num_bytes, arena_table(arena))
        _attend_calls.put(key, known)
    params, num_bytes, arena_address = known
    device, stream = place(q)
    scratch = workspace(q, num_bytes)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    status = library().hubkv_attend(
        device,
        stream,
        params,
        q.data_ptr(),
        k_new.data_ptr(),
        v_new.data_ptr(),
        arena_address,
        segments.data_ptr(),
        address(block_table),
        tail_lengths.data_ptr(),
        None if new_lengths is None else new_lengths.data_ptr(),
        work.data_ptr(),
        work_count.data_ptr(),
        out.data_ptr(),
        scratch.data_ptr(),
        scratch.numel(),
    )
    if status:
        fail(status)
    return out


def _check_rows(q: Tensor, k_new: Tensor, v_new: Tensor) -> None:
    for x, name, heads in ((q, "q", "Hq"), (k_new, "k_new", "Hkv"), (v_new, "v_new", "Hkv")):
        check_dims(x, name, f"B Tq {heads} D")
        check_device(x, name, q.device)
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {x.dtype} is not {q.dtype}, that of q")
    expected = (q.shape[0], q.shape[1], k_new.shape[2], q.shape[3])
    for x, name in ((k_new, "k_new"), (v_new, "v_new")):
        if x.shape != expected:
            raise ValueError(f"{name}: {shape_text(x)} is not {list(expected)}, [B, Tq, Hkv, D] of q and k_new")


def _check_tables(
    device: torch.device,
    batch: int,
    arena: Tensor,
    block_table: Tensor,
    tail_lengths: Tensor,
    new_lengths: Tensor | None,
) -> None:
    check(arena, "arena", torch.uint8, (None,), device)
    check(block_table, "block_table", torch.int32, (batch, None), device)
    check(tail_lengths, "tail_lengths", torch.int32, (batch,), device)
    if new_lengths is not None:
        check(new_lengths, "new_lengths", torch.int32, (batch,), device)


@operator("arena")
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
    check_dims(k_new, "k_new", "L B Tq Hkv D")
    num_layers, batch, num_new, num_kv_heads, head_dim = k_new.shape
    check(k_new, "k_new", k_new.dtype, k_new.shape, k_new.device)
    check(v_new, "v_new", k_new.dtype, k_new.shape, k_new.device)
    _check_tables(k_new.device, batch, arena, block_table, tail_lengths, new_lengths)
    pages = (page_tokens, block_table.shape[1], page_base)
    sizes = (batch, num_layers, num_kv_heads, head_dim, dtype_code(k_new, "k_new"))
    params = _abi.CacheParams(*sizes, *pages, batch * num_kv_heads)
    call(
        "hubkv_append",
        *place(k_new),
        params,
        num_new,
        address(k_new),
        address(v_new),
        arena_table(arena),
        address(block_table),
        address(tail_lengths),
        None if new_lengths is None else address(new_lengths),
    )
