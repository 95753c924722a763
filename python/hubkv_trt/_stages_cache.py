# SPDX-License-Identifier: Apache-2.0
"""plan, attend and append as operators, in the way of ``_stages_prefill.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _abi
from ._library import call, fail, library, workspace_bytes
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


def plan(
    arena: Tensor, segments: Tensor, num_layers: int, num_kv_heads: int, capacity: int, min_rows_per_item: int
) -> tuple[Tensor, Tensor]:
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
        known = _attend_call(
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


def _attend_call(
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
) -> _AttendCall:
    """Checks everything that attend's key holds."""
    for x, name, heads in ((q, "q", "Hq"), (k_new, "k_new", "Hkv"), (v_new, "v_new", "Hkv")):
        check_dims(x, name, f"B Tq {heads} D")
        check_device(x, name, q.device)
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {x.dtype} is not {q.dtype}, that of q")
    batch, num_new, num_heads, head_dim = q.shape
    num_kv_heads = k_new.shape[2]
    for x, name in ((k_new, "k_new"), (v_new, "v_new")):
        expected = (batch, num_new, num_kv_heads, head_dim)
        if x.shape != expected:
            raise ValueError(f"{name}: {shape_text(x)} is not {list(expected)}, [B, Tq, Hkv, D] of q and k_new")
    check(work, "work", torch.int32, (num_layers, None, 4), q.device)
    check(work_count, "work_count", torch.int32, (num_layers,), q.device)
    cache = _cache_params(
        q,
        num_layers,
        num_kv_heads,
        head_dim,
        batch,
        arena,
        block_table,
        tail_lengths,
        new_lengths,
        page_tokens,
        page_base,
        work.shape[1],
    )
    check(segments, "segments", torch.int64, (batch, 4), q.device)
    params = _abi.AttendParams(
        cache,
        num_new,
        num_heads,
        layer,
        scale,
        token_stride(q, "q"),
        token_stride(k_new, "k_new"),
        token_stride(v_new, "v_new"),
    )
    return _AttendCall(params, workspace_bytes("hubkv_attend_workspace", place(q)[0], params), arena_table(arena))


def _cache_params(
    rows: Tensor,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    batch: int,
    arena: Tensor,
    block_table: Tensor,
    tail_lengths: Tensor,
    new_lengths: Tensor | None,
    page_tokens: int,
    page_base: int,
    capacity: int,
) -> _abi.CacheParams:
    """Checks the tables of the tails. rows: a tensor with dtype and device of the cache's rows."""
    check(arena, "arena", torch.uint8, (None,), rows.device)
    check(block_table, "block_table", torch.int32, (batch, None), rows.device)
    check(tail_lengths, "tail_lengths", torch.int32, (batch,), rows.device)
    if new_lengths is not None:
        check(new_lengths, "new_lengths", torch.int32, (batch,), rows.device)
    return _abi.CacheParams(
        batch,
        num_layers,
        num_kv_heads,
        head_dim,
        dtype_code(rows, "k_new"),
        page_tokens,
        block_table.shape[1],
        page_base,
        capacity,
    )


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
    check_dims(k_new, "k_new", "L B Tq Hkv D")
    num_layers, batch, num_new, num_kv_heads, head_dim = k_new.shape
    check(k_new, "k_new", k_new.dtype, k_new.shape, k_new.device)
    check(v_new, "v_new", k_new.dtype, k_new.shape, k_new.device)
    params = _cache_params(
        k_new,
        num_layers,
        num_kv_heads,
        head_dim,
        batch,
        arena,
        block_table,
        tail_lengths,
        new_lengths,
        page_tokens,
        page_base,
        batch * num_kv_heads,
    )
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
