# SPDX-License-Identifier: Apache-2.0
"""The evaluation of TensorRT networks: the walk, and layers that compute, on networks of the real API against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorrt_rtx_bindings as trt
import torch
from torch import Tensor

from trt_eval.builder import DATA_TYPES, Builder, random, run
from trt_eval.evaluate import LAYERS, UnknownLayer, evaluate

BINARY = {
    "SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "MAX": torch.maximum, "MIN": torch.minimum, "DIV": torch.div,
    "FLOOR_DIV": torch.floor_divide,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_elementwise(name: str) -> None:
    operation = getattr(trt.ElementWiseOperation, name)
    a, b = random(3, 1, 5), random(1, 4, 5, seed=1)
    torch.testing.assert_close(run(lambda n, x, y: n.add_elementwise(x, y, operation), a, b), BINARY[name](a, b))
    if name not in ("DIV", "FLOOR_DIV"):
        a, b = torch.tensor([7, -7, 3]), torch.tensor([2, 2, 9])
        assert run(lambda n, x, y: n.add_elementwise(x, y, operation), a, b).equal(BINARY[name](a, b))


def test_elementwise_of_integers_truncates_and_floors() -> None:
    a, b = torch.tensor([7, -7]), torch.tensor([2, 2])
    kinds = trt.ElementWiseOperation
    assert run(lambda n, x, y: n.add_elementwise(x, y, kinds.DIV), a, b).tolist() == [3, -3]
    assert run(lambda n, x, y: n.add_elementwise(x, y, kinds.FLOOR_DIV), a, b).tolist() == [3, -4]


@pytest.mark.parametrize(
    ("name", "function"),
    [("EXP", torch.exp), ("SQRT", torch.sqrt), ("RECIP", torch.reciprocal), ("ABS", torch.abs), ("NEG", torch.neg),
     ("SIN", torch.sin), ("COS", torch.cos)],
)  # fmt: skip
def test_unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = random(2, 3).abs()
    torch.testing.assert_close(run(lambda n, t: n.add_unary(t, getattr(trt.UnaryOperation, name)), x), function(x))


def test_activation_and_its_class_read_twice() -> None:
    """An activation layer has a ``type`` of its own, which must not be taken for the layer's."""
    builder = Builder()
    network = builder.network()
    x = network.add_input("x", trt.float16, (-1, 3))
    layer = network.add_activation(x, trt.ActivationType.SIGMOID)
    layer.get_output(0).name = "y"
    network.mark_output(layer.get_output(0))
    value = random(2, 3)
    for _ in range(2):
        torch.testing.assert_close(evaluate(trt, network, {"x": value})["y"], value.sigmoid())


def test_reduce_softmax_select() -> None:
    x = random(2, 3, 4)
    for name, function in (("SUM", torch.sum), ("AVG", torch.mean), ("MAX", torch.amax), ("MIN", torch.amin)):
        kind = getattr(trt.ReduceOperation, name)
        torch.testing.assert_close(
            run(lambda n, t, k=kind: n.add_reduce(t, k, 0b101, True), x), function(x, (0, 2), True)
        )
        torch.testing.assert_close(run(lambda n, t, k=kind: n.add_reduce(t, k, 0b010, False), x), function(x, 1))

    def softmax(network: Any, t: Any) -> Any:
        layer = network.add_softmax(t)
        layer.axes = 1 << 1
        return layer

    torch.testing.assert_close(run(softmax, x), x.softmax(1))
    condition = x > 0
    chosen = run(lambda n, c, a, b: n.add_select(c, a, b), condition, x, -2 * x)
    torch.testing.assert_close(chosen, torch.where(condition, x, -2 * x))


def test_matrix_multiply() -> None:
    kinds = trt.MatrixOperation
    a, b = random(2, 3, 4), random(1, 5, 4, seed=1)
    got = run(lambda n, x, y: n.add_matrix_multiply(x, kinds.NONE, y, kinds.TRANSPOSE), a, b)
    torch.testing.assert_close(got, a @ b.transpose(1, 2))
    got = run(
        lambda n, x, y: n.add_matrix_multiply(x, kinds.TRANSPOSE, y, kinds.NONE), a.transpose(1, 2), b.transpose(1, 2)
    )
    torch.testing.assert_close(got, a @ b.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
def test_constants_are_read_where_the_network_points(dtype: torch.dtype) -> None:
    value = (10 * random(3, 4)).to(dtype)
    kept = []

    def add(network: Any, x: Any) -> Any:
        weights = trt.Weights(DATA_TYPES[dtype], value.data_ptr(), value.numel())
        kept.append(weights)
        return network.add_elementwise(
            network.add_constant((3, 4), weights).get_output(0), x, trt.ElementWiseOperation.SUM
        )

    zero = torch.zeros(3, 4, dtype=dtype)
    assert run(add, zero, exact=True).equal(value)
    value.fill_(3)  # the network holds an address, not a copy
    assert run(add, zero, exact=True).equal(value)
    assert run(add, zero).dtype == (torch.float32 if dtype.is_floating_point else dtype)


def test_casts_keep_float32_unless_exact() -> None:
    x = torch.tensor([1.0009765625, 1.0001, -2.7])

    def narrow(network: Any, t: Any) -> Any:
        return network.add_cast(network.add_cast(t, trt.bfloat16).get_output(0), trt.float32)

    assert run(narrow, x).equal(x)
    assert run(narrow, x, exact=True).equal(x.bfloat16().float())
    assert run(lambda n, t: n.add_cast(t, trt.int32), x).tolist() == [1, 1, -2]
    assert run(lambda n, t: n.add_cast(t, trt.bfloat16), torch.tensor([257], dtype=torch.int32)).item() == 257
    assert run(lambda n, t: n.add_identity(t), x).equal(x)


# ---- the walk --------------------------------------------------------------------------------------------------------


def test_an_unknown_layer_fails() -> None:
    with pytest.raises(UnknownLayer, match="of type PADDING"):
        run(lambda n, t: n.add_padding_nd(t, (1, 1), (1, 1)), random(1, 1, 2, 2))


def test_an_unknown_operation_fails() -> None:
    with pytest.raises(KeyError, match="ERF"):
        run(lambda n, t: n.add_unary(t, trt.UnaryOperation.ERF), random(2))


def test_every_layer_type_has_its_class() -> None:
    for kind, (name, _) in LAYERS.items():
        assert kind in trt.LayerType.__members__
        assert issubclass(getattr(trt, name), trt.ILayer)


def test_values_must_be_what_the_network_says() -> None:
    builder = Builder()
    network = builder.network()
    x = network.add_input("x", trt.float16, (-1, 3))
    layer = network.add_identity(x)
    layer.get_output(0).name = "y"
    network.mark_output(layer.get_output(0))
    assert list(evaluate(trt, network, {"x": random(2, 3)})) == ["y"]
    assert evaluate(trt, network, {"x": random(2, 3).half()}, exact=True)["y"].dtype is torch.float16
    for bad in (random(2, 4), random(3), random(2, 3).half(), torch.ones(2, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="the network says HALF"):
            evaluate(trt, network, {"x": bad})
    for names in ({}, {"x": random(2, 3), "z": random(2, 3)}):
        with pytest.raises(ValueError, match="inputs"):
            evaluate(trt, network, names)
