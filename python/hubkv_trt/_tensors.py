# SPDX-License-Identifier: Apache-2.0
"""Tensors as libhubkv takes them: checked for dtype, shape, strides and device, and turned into addresses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _abi

_DTYPES = {torch.float32: _abi.FLOAT32, torch.float16: _abi.FLOAT16, torch.bfloat16: _abi.BFLOAT16}
_NOTHING = (ctypes.c_char * 512)()
_NOWHERE = (ctypes.addressof(_NOTHING) + 255) // 256 * 256


class BoundedCache(dict[Hashable, Any]):
    """Remembers what follows from its key alone. Starts anew when full, so that ever new keys cannot fill memory."""

    def put(self, key: Hashable, value: Any, most: int = 8192) -> None:
        if len(self) >= most:
            self.clear()
        self[key] = value


# ---- checks ----------------------------------------------------------------------------------------------------------


def shape_text(x: Tensor) -> str:
    return f"shape [{', '.join(map(str, x.shape))}]"


def check_dims(x: Tensor, name: str, letters: str) -> None:
    """As many axes as there are letters."""
    if x.dim() != len(letters.split()):
        raise ValueError(f"{name}: {shape_text(x)} is not [{', '.join(letters.split())}]")


def check(x: Tensor, name: str, dtype: torch.dtype, shape: Sequence[int | None], device: torch.device) -> None:
    """A dense tensor of that dtype and shape (None: any size) on that device."""
    if x.dtype != dtype:
        raise ValueError(f"{name}: dtype {x.dtype} is not {dtype}")
    check_device(x, name, device)
    if x.dim() != len(shape) or any(n is not None and m != n for m, n in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name}: {shape_text(x)} is not [{', '.join('any' if n is None else str(n) for n in shape)}]")
    if not x.is_contiguous():
        raise ValueError(f"{name}: strides {x.stride()} are not dense; call contiguous() first")


def check_device(x: Tensor, name: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: it is on {x.device}, not on {device} with the other tensors")


def int32(value: int, name: str) -> int:
    """A Python int that fits in the struct's int32."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name}: {value} does not fit in 32 bits")
    return value


def dtype_code(x: Tensor, name: str) -> int:
    """hubkv_dtype of K and V."""
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise ValueError(f"{name}: dtype {x.dtype} is not float32, float16 or bfloat16")
    return code


def token_stride(x: Tensor, name: str) -> int:
    """Elements between the tokens of x [B, Tq, H, D], whose heads are dense and whose sequences are Tq tokens apart."""
    batch, tokens, heads, size = x.shape
    by_sequence, by_token, by_head, by_element = x.stride()
    # The stride of an axis of one element says nothing.
    dense = (size <= 1 or by_element == 1) and (heads <= 1 or by_head == size)
    stride = by_token if tokens > 1 else by_sequence if batch > 1 else heads * size
    if not dense or (tokens > 1 and batch > 1 and by_sequence != tokens * stride):
        raise ValueError(
            f"{name}: strides {x.stride()} of {shape_text(x)} do not keep heads dense and sequences Tq tokens apart; "
            "call contiguous() first"
        )
    return stride


def row_strides(layers: Sequence[Tensor], name: str, like: Tensor) -> tuple[int, int]:
    """Head and token stride that all of the layers [Hkv, T, D] share; each has shape, dtype and device of `like`."""
    strides = (0, 0)
    for index, x in enumerate(layers):
        label = f"{name}[{index}]"
        check_device(x, label, like.device)
        if x.dtype != like.dtype or x.shape != like.shape:
            raise ValueError(
                f"{label}: {shape_text(x)} {x.dtype} is not {shape_text(like)} {like.dtype}, as k[0] has them"
            )
        heads, tokens, size = x.shape
        here = (x.stride(0) if heads > 1 else tokens * size, x.stride(1) if tokens > 1 else size)
        if size > 1 and x.stride(2) != 1:
            raise ValueError(f"{label}: strides {x.stride()} do not keep the D values of a row dense")
        if index > 0 and here != strides:
            raise ValueError(f"{label}: strides {x.stride()} are not those of {name}[0], {layers[0].stride()}")
        strides = here
    return strides


# ---- addresses -------------------------------------------------------------------------------------------------------


def address(x: Tensor) -> int:
    """Address of the data; that of a tensor without elements is never read, but is not null either."""
    return x.data_ptr() or _NOWHERE


def place(x: Tensor) -> tuple[int, int | None]:
    """Device and stream of the call that x takes part in."""
    if x.is_cuda:
        return _abi.CUDA, torch.cuda.current_stream(x.device).cuda_stream
    return _abi.CPU, None


class _Local(threading.local):
    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)


_local = _Local()


def workspace(x: Tensor, size: int) -> Tensor:
    """Scratch memory [>= size] for one call on x's device.

    On the host a buffer per thread that grows to the largest size asked for; on CUDA the allocator's, which orders its
    reuse by stream.
    """
    if x.is_cuda:
        return torch.empty(size, dtype=torch.uint8, device=x.device)
    if _local.workspace.numel() < size:
        _local.workspace = torch.empty(size, dtype=torch.uint8)
    return _local.workspace


_arenas: dict[Hashable, Tensor] = {}  # never emptied: calls in flight read them, and a table is 16 bytes


def arena_table(x: Tensor) -> int:
    """Address of the int64 [2] that holds address and bytes of the arena, where the kernel can read it.

    Raises:
        RuntimeError: the table would have to be made while a CUDA graph is captured, which cannot hold that copy.
    """
    key = (x.data_ptr(), x.numel(), x.device)
    table = _arenas.get(key)
    if table is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("arena: a CUDA graph is its first use; call plan with it once before the capture")
        table = torch.tensor(key[:2], dtype=torch.int64, device=x.device)
        _arenas[key] = table
    return table.data_ptr()
