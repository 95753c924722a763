# SPDX-License-Identifier: Apache-2.0
"""Types and constants of a network as torch has them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
}
"""``trt.DataType`` by name."""


def torch_type(data_type: Any, exact: bool) -> torch.dtype:
    """The type that values of a ``trt.DataType`` have here; 16-bit floats are float32 unless ``exact``."""
    dtype = TYPES[data_type.name]
    return torch.float32 if dtype.is_floating_point and not exact else dtype


def weights_of(weights: Any, shape: tuple[int, ...]) -> Tensor:
    """A copy of a constant layer's weights: what lies at their address now, as the builder would read it."""
    if isinstance(weights, np.ndarray):
        return torch.from_numpy(weights.reshape(shape).copy())
    return torch.frombuffer(bytearray(_raw(weights)), dtype=TYPES[weights.dtype.name]).reshape(shape)


class _Weights(ctypes.Structure):
    """``nvinfer1::Weights``."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def _raw(weights: Any) -> bytes:
    """The bytes of a ``trt.Weights`` of a type that NumPy lacks.

    Python is given no way to them but the C++ object, whose address is the first word behind the header of its own.
    """
    address = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    assert address is not None
    found = _Weights.from_address(address)
    if (found.type, found.count) != (int(weights.dtype), weights.size):
        raise NotImplementedError("these bindings hold trt.Weights in another way")
    return ctypes.string_at(found.values, weights.nbytes)
