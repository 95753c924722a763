# SPDX-License-Identifier: Apache-2.0
"""Layers of a TensorRT network by one call each: named, checked, constants and shape tensors made once.

No tensorrt module is imported: it is an argument, so that TensorRT and TensorRT-RTX serve alike. Tensors and layers are
``ITensor`` and ``ILayer`` of that module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Tensor = Any
"""An ``ITensor`` of the module in use."""


class NetworkLayers:
    """Adds layers to an ``INetworkDefinition``.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        network: strongly typed.

    Attributes:
        place: what the names of new layers begin with, for instance ``layers.3``.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt = trt
        self.network = network
        self.place = "model"
        self._kept: list[Any] = []  # memory of constants: the network points into it
        self._constants: dict[tuple[bytes, tuple[int, ...], str], Tensor] = {}
        self._names: dict[str, int] = {}
        self._row_counts: dict[str, Tensor] = {}
        self._common_rows: Tensor | None = None
        self._sizes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    # -- names and checks

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Layers made inside are named after ``place``; afterwards as before."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def named(self, layer: Any, what: str) -> Any:
        """The layer, under a name that no other has.

        Raises:
            RuntimeError: TensorRT gave none.
        """
        name = f"{self.place}.{what}"
        if layer is None:
            raise RuntimeError(f"TensorRT refused the layer {name}; its messages above say why")
        count = self._names[name] = self._names.get(name, 0) + 1
        layer.name = name if count == 1 else f"{name}#{count}"
        return layer

    def output(self, layer: Any, what: str) -> Tensor:
        """The only output of a layer, which gets a name."""
        return self.named(layer, what).get_output(0)

    # -- constants and shapes

    def constant(self, value: np.ndarray) -> Tensor:
        """A constant in the array's dtype, one layer for equal ones."""
        key = (value.tobytes(), value.shape, value.dtype.str)
        if key not in self._constants:
            value = np.array(value, order="C")
            self._kept.append(value)
            with self.at("constant"):
                layer = self.network.add_constant(value.shape, self.trt.Weights(value))
                self._constants[key] = self.output(layer, "x".join(map(str, value.shape)) or "scalar")
        return self._constants[key]

    def embedded(self, name: str, value: Any) -> Tensor:
        """A torch tensor as a constant; its memory is kept until this object goes."""
        value = value.detach().cpu().contiguous()
        self._kept.append(value)
        dtype = getattr(self.trt, str(value.dtype).removeprefix("torch."))
        weights = self.trt.Weights(dtype, value.data_ptr(), value.numel())
        layer = self.network.add_constant(tuple(value.shape), weights)
        self.network.set_weights_name(weights, name)
        with self.at("weights"):
            return self.output(layer, name)

    def num_rows(self, x: Tensor) -> Tensor:
        """int64 [1], the first dimension of x as a shape tensor."""
        if x.shape[0] >= 0:
            return self.constant(np.array([x.shape[0]], np.int64))
        if self._common_rows is not None:
            return self._common_rows
        if x.name not in self._row_counts:
            shape = self.output(self.network.add_shape(x), "shape")
            index = self.constant(np.array([0], np.int32))
            self._row_counts[x.name] = self.output(self.network.add_gather(shape, index, 0), "rows")
        return self._row_counts[x.name]

    @contextlib.contextmanager
    def alike(self, x: Tensor) -> Iterator[None]:
        """Inside, every dynamic first dimension is that of x: its size is asked for once."""
        before, self._common_rows = self._common_rows, self.num_rows(x) if x.shape[0] < 0 else None
        try:
            yield
        finally:
            self._common_rows = before

    def as_many_rows(self, xs: Iterable[Tensor], x: Tensor) -> None:
        """Says that the first dimension of each of xs is that of x."""
        if x.shape[0] < 0:
            self._row_counts.update((other.name, self.num_rows(x)) for other in xs)

    def sizes(self, rows: Tensor, *others: int) -> Tensor:
        """int64 [1 + n]: a shape that begins with a shape tensor of one value."""
        key = (rows.name, others)
        if key not in self._sizes:
            self._sizes[key] = self.concat([rows, self.constant(np.array(others, np.int64))], "sizes")
        return self._sizes[key]

    # -- layers

    def concat(self, xs: Sequence[Tensor], what: str = "concat") -> Tensor:
        """Along the first axis."""
        if len(xs) == 1:
            return xs[0]
        layer = self.network.add_concatenation(list(xs))
        layer.axis = 0
        return self.output(layer, what)

    def reshape(self, x: Tensor, *dims: int, sizes: Tensor | None = None, what: str = "reshape") -> Tensor:
        """Other dimensions, one of them -1 at most, 0 for the same one of x; or those of a shape tensor."""
        layer = self.network.add_shuffle(x)
        if sizes is None:
            layer.reshape_dims = dims
        else:
            layer.set_input(1, sizes)
        return self.output(layer, what)

    def permute(self, x: Tensor, *axes: int, then: Sequence[int] | None = None, what: str = "transpose") -> Tensor:
        """x with its axes in another order, and then reshaped."""
        layer = self.network.add_shuffle(x)
        layer.first_transpose = axes
        if then is not None:
            layer.reshape_dims = tuple(then)
        return self.output(layer, what)

    def reshape_permuted(self, x: Tensor, dims: Sequence[int], *axes: int, what: str = "transpose") -> Tensor:
        """x reshaped, and then with its axes in another order."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(dims)
        layer.second_transpose = axes
        return self.output(layer, what)

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x if x.dtype == dtype else self.output(self.network.add_cast(x, dtype), "cast")

    def elementwise(self, operation: str, a: Tensor, b: Tensor) -> Tensor:
        """``SUM``, ``PROD``, ... of two tensors of one rank and dtype."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.output(self.network.add_elementwise(a, b, kind), operation.lower())

    def unary(self, operation: str, x: Tensor) -> Tensor:
        kind = getattr(self.trt.UnaryOperation, operation)
        return self.output(self.network.add_unary(x, kind), operation.lower())

    def reduce(self, operation: str, x: Tensor, axis: int, keep: bool = False) -> Tensor:
        kind = getattr(self.trt.ReduceOperation, operation)
        return self.output(self.network.add_reduce(x, kind, 1 << axis, keep), operation.lower())

    def slice(self, x: Tensor, start: Sequence[int], size: Sequence[int], what: str = "slice") -> Tensor:
        """A part of x of static size."""
        return self.output(self.network.add_slice(x, tuple(start), tuple(size), (1,) * len(start)), what)

    def slice_rows(self, x: Tensor, start: Tensor, rows: Tensor, what: str) -> Tensor:
        """Rows of x: their first index and their number as shape tensors of one value."""
        others = tuple(x.shape)[1:]
        layer = self.network.add_slice(x, (0,) * len(x.shape), (0,) * len(x.shape), (1,) * len(x.shape))
        layer.set_input(1, self.sizes(start, *(0 for _ in others)))
        layer.set_input(2, self.sizes(rows, *others))
        return self.output(layer, what)

    def slice_last(self, x: Tensor, start: int, stop: int, what: str = "slice") -> Tensor:
        """x[..., start:stop], where only the first dimension may be dynamic."""
        shape = tuple(x.shape)
        begin, size = (*(0 for _ in shape[1:]), start), (*shape[:-1], stop - start)
        if shape[0] >= 0:
            return self.slice(x, begin, size, what)
        layer = self.network.add_slice(x, begin, (0,) * len(shape), (1,) * len(shape))
        layer.set_input(2, self.sizes(self.num_rows(x), *size[1:]))
        return self.output(layer, what)

    def product(self, a: Tensor, b: Tensor, what: str = "matmul") -> Tensor:
        """a times b transposed: [..., m, c], [..., n, c] -> [..., m, n]."""
        kind = self.trt.MatrixOperation
        return self.output(self.network.add_matrix_multiply(a, kind.NONE, b, kind.TRANSPOSE), what)

    def range(self, count: Tensor, dtype: Any, what: str = "range") -> Tensor:
        """0, 1, ... of int32 or int64: ``count`` (a shape tensor of one value) numbers."""
        number = np.int64 if dtype == self.trt.int64 else np.int32
        layer = self.network.add_fill((1,), self.trt.FillOperation.LINSPACE, dtype)
        layer.set_input(0, count)
        layer.set_input(1, self.constant(np.array(0, number)))
        layer.set_input(2, self.constant(np.array([1], number)))
        return self.output(layer, what)
