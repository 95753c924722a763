# SPDX-License-Identifier: Apache-2.0
"""plan and append over tables at fixed addresses, straight to the C ABI: what a graph records must not allocate."""

from __future__ import annotations

from collections.abc import Mapping

from ... import _abi, _library
from ...config import DType, ModelConfig
from ...engine.bindings import work_capacity
from ...engine.network import PAGE_BASE
from ..ledger import PAGE_TOKENS
from .eager import MIN_ROWS_PER_ITEM

_ROW_TYPES = {DType.FLOAT32: _abi.FLOAT32, DType.FLOAT16: _abi.FLOAT16, DType.BFLOAT16: _abi.BFLOAT16}


def plan_work(
    model: ModelConfig, batch_size: int, at: Mapping[str, int], stream: int | None, device: int = _abi.CUDA
) -> None:
    """Makes the work list of attend: ``work`` int32 [L, W, 4] and ``work_count`` int32 [L].

    Args:
        model: gives L and Hkv.
        batch_size: B.
        at: addresses of ``arena``, ``segments``, ``work`` and ``work_count``, on the device.
        stream: a handle.
        device: where the addresses are.
    """
    # Row size and pages play no part: a plan counts rows.
    params = _abi.CacheParams(
        batch_size, model.num_layers, model.num_kv_heads, 8, _abi.FLOAT16, 1, 0, 0, work_capacity(model, batch_size)
    )
    addresses = [at[name] for name in ("arena", "segments", "work", "work_count")]
    _library.call("hubkv_plan", device, stream, params, MIN_ROWS_PER_ITEM, *addresses)


def append_rows(
    model: ModelConfig,
    dtype: DType,
    batch_size: int,
    num_new: int,
    pages: int,
    at: Mapping[str, int],
    stream: int | None,
    device: int = _abi.CUDA,
) -> None:
    """Writes new rows [L, B, Tq, Hkv, D] into the tails.

    Args:
        model: gives L, Hkv and D.
        dtype: of the rows.
        batch_size: B.
        num_new: Tq.
        pages: columns of the block table.
        at: addresses of ``k_new``, ``v_new``, ``arena``, ``block_table``, ``tail_lengths`` and ``new_lengths``, on the
            device.
        stream: a handle.
        device: where the addresses are.
    """
    heads = model.num_kv_heads
    params = _abi.CacheParams(
        batch_size,
        model.num_layers,
        heads,
        model.head_dim,
        _ROW_TYPES[dtype],
        PAGE_TOKENS,
        pages,
        PAGE_BASE,
        batch_size * heads,
    )
    names = ("k_new", "v_new", "arena", "block_table", "tail_lengths", "new_lengths")
    _library.call("hubkv_append", device, stream, params, num_new, *(at[name] for name in names))
