# SPDX-License-Identifier: Apache-2.0
"""Layers that move values and compute with shapes. Semantics: the operators' reference of TensorRT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .values import torch_type


def shape(layer: Any, x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int64)


def shuffle(layer: Any, x: Tensor, dims: Tensor | None = None) -> Tensor:
    """Transpose, reshape where it is asked for (0 copies the axis of that index, -1 is what is left), transpose."""
    x = x.permute(tuple(layer.first_transpose)[: x.ndim])
    asked = layer.reshape_dims if dims is None else dims.tolist()
    if asked is not None:
        copy = layer.zero_is_placeholder
        x = x.reshape(tuple(x.shape[i] if n == 0 and copy else n for i, n in enumerate(asked)))
    return x.permute(tuple(layer.second_transpose)[: x.ndim])


def slice_(layer: Any, x: Tensor, start: Tensor | None = None, size: Tensor | None = None, *others: Tensor) -> Tensor:
    """x[start], x[start + stride], ... on every axis; nothing out of bounds is read. Start and size may be inputs."""
    if any(other is not None for other in others) or layer.axes is not None or layer.mode.name != "STRICT_BOUNDS":
        raise NotImplementedError(f"{layer.name}: a slice with a dynamic stride, a fill value, axes or another mode")
    first = tuple(layer.start) if start is None else tuple(start.tolist())
    count = tuple(layer.shape) if size is None else tuple(size.tolist())
    for axis, (begin, number, step) in enumerate(zip(first, count, tuple(layer.stride), strict=True)):
        last = begin + (number - 1) * step
        if number > 0 and not (0 <= begin < x.shape[axis] and 0 <= last < x.shape[axis]):
            raise ValueError(f"{layer.name}: {begin}..{last} of axis {axis} is outside of {list(x.shape)}")
        x = x.index_select(axis, begin + step * torch.arange(number))
    return x


def gather(layer: Any, data: Tensor, indices: Tensor) -> Tensor:
    """data[:, indices, :] at the axis; the axes of the indices stand in its place."""
    if layer.mode.name != "DEFAULT" or layer.num_elementwise_dims != 0:
        raise NotImplementedError(f"{layer.name}: a gather by elements")
    axis = layer.axis
    found = data.index_select(axis, indices.flatten().long())
    return found.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


def concatenation(layer: Any, *xs: Tensor) -> Tensor:
    if any(x.dtype != xs[0].dtype for x in xs):
        raise ValueError(f"{layer.name}: {[x.dtype for x in xs]}")
    return torch.cat(xs, layer.axis)


def squeeze(layer: Any, x: Tensor, axes: Tensor) -> Tensor:
    return x.squeeze(tuple(axes.tolist()))


def unsqueeze(layer: Any, x: Tensor, axes: Tensor) -> Tensor:
    """The axes are those of the result."""
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def fill(layer: Any, size: Tensor | None = None, first: Tensor | None = None, step: Tensor | None = None) -> Tensor:
    """alpha + the sum over axes of beta * index; alpha and beta may be inputs, beta then has a value for each axis."""
    if layer.operation.name != "LINSPACE":
        raise NotImplementedError(f"{layer.name}: a fill by {layer.operation.name}")
    dims = tuple(layer.shape) if size is None else tuple(size.tolist())
    alpha = layer.alpha if first is None else first.item()
    betas = [layer.beta] * len(dims) if step is None else step.flatten().tolist()
    result = torch.full(dims, alpha, dtype=torch_type(layer.to_type, exact=False))
    for axis, (number, beta) in enumerate(zip(dims, betas, strict=True)):
        ramp = (beta * torch.arange(number)).to(result.dtype)
        result += ramp.view([-1 if i == axis else 1 for i in range(len(dims))])
    return result


def cumulative(layer: Any, x: Tensor, axis: Tensor) -> Tensor:
    """Running sums; exclusive ones begin with 0."""
    if layer.op.name != "SUM" or layer.reverse:
        raise NotImplementedError(f"{layer.name}: running {layer.op.name}, reverse {layer.reverse}")
    sums = x.cumsum(int(axis), dtype=x.dtype)
    return sums - x if layer.exclusive else sums


LAYERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "SHAPE": ("IShapeLayer", shape),
    "SHUFFLE": ("IShuffleLayer", shuffle),
    "SLICE": ("ISliceLayer", slice_),
    "GATHER": ("IGatherLayer", gather),
    "CONCATENATION": ("IConcatenationLayer", concatenation),
    "SQUEEZE": ("ISqueezeLayer", squeeze),
    "UNSQUEEZE": ("IUnsqueezeLayer", unsqueeze),
    "FILL": ("IFillLayer", fill),
    "CUMULATIVE": ("ICumulativeLayer", cumulative),
}
