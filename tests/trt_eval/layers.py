# SPDX-License-Identifier: Apache-2.0
"""Layers that compute values from values. Semantics: the operators' reference of TensorRT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .values import torch_type, weights_of

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "SUB": torch.sub,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "POW": torch.pow,
    "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "DIV": lambda a, b: torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc"),
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "EXP": torch.exp,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "NOT": torch.logical_not,
}
_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"RELU": torch.relu, "SIGMOID": torch.sigmoid}
_REDUCE: dict[str, Callable[..., Tensor]] = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}


def constant(layer: Any) -> Tensor:
    return weights_of(layer.weights, tuple(layer.shape))


def elementwise(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Broadcasts axes of size 1; ranks and types are equal."""
    if a.ndim != b.ndim or a.dtype != b.dtype:
        raise ValueError(f"{layer.name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    return _BINARY[layer.op.name](a, b)


def unary(layer: Any, x: Tensor) -> Tensor:
    return _UNARY[layer.op.name](x)


def activation(layer: Any, x: Tensor) -> Tensor:
    return _ACTIVATION[layer.type.name](x)


def cast(layer: Any, x: Tensor) -> Tensor:
    """To float32 where the target is any float: the walk rounds results to their type where it is asked to."""
    return x.to(torch_type(layer.to_type, exact=False))


def identity(layer: Any, x: Tensor) -> Tensor:
    return x


def select(layer: Any, condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
    return torch.where(condition, if_true, if_false)


def reduce(layer: Any, x: Tensor) -> Tensor:
    return _REDUCE[layer.op.name](x, dim=axes_of(layer.axes), keepdim=layer.keep_dims)


def softmax(layer: Any, x: Tensor) -> Tensor:
    (axis,) = axes_of(layer.axes)
    return x.softmax(axis)


def matrix_multiply(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    a, b = _operand(layer.op0.name, a), _operand(layer.op1.name, b)
    return a @ b


def _operand(op: str, x: Tensor) -> Tensor:
    if op == "VECTOR":
        raise NotImplementedError("a vector as an operand")
    return x.transpose(-1, -2) if op == "TRANSPOSE" else x


def axes_of(mask: int) -> tuple[int, ...]:
    """The axes of a bit mask."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


LAYERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "CONSTANT": ("IConstantLayer", constant),
    "ELEMENTWISE": ("IElementWiseLayer", elementwise),
    "UNARY": ("IUnaryLayer", unary),
    "ACTIVATION": ("IActivationLayer", activation),
    "CAST": ("ICastLayer", cast),
    "IDENTITY": ("IIdentityLayer", identity),
    "SELECT": ("ISelectLayer", select),
    "REDUCE": ("IReduceLayer", reduce),
    "SOFTMAX": ("ISoftMaxLayer", softmax),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", matrix_multiply),
}
