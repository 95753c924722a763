# SPDX-License-Identifier: Apache-2.0
"""The evaluation of TensorRT networks: layers that move values, and attention, on networks of the real API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx_bindings as trt
import torch
import torch.nn.functional as F
from torch import Tensor

from trt_eval.builder import Builder, random, run
from trt_eval.evaluate import evaluate


def ints(network: Any, *values: int) -> Any:
    return network.add_constant((len(values),), np.array(values, np.int64)).get_output(0)


# ---- layers that move ------------------------------------------------------------------------------------------------


def test_shuffle() -> None:
    x = random(2, 3, 4)

    def add(network: Any, t: Any) -> Any:
        layer = network.add_shuffle(t)
        layer.first_transpose = (1, 0, 2)
        layer.reshape_dims = (0, 2, -1, 2)
        layer.second_transpose = (3, 0, 1, 2)
        return layer

    expected = x.permute(1, 0, 2).reshape(3, 2, 2, 2).permute(3, 0, 1, 2)
    assert run(add, x).equal(expected)
    assert run(add, x, shapes=[(-1, 3, 4)]).equal(expected)


def test_shuffle_without_a_shape() -> None:
    def add(network: Any, t: Any) -> Any:
        layer = network.add_shuffle(t)
        layer.first_transpose = (2, 0, 1)
        return layer

    x = random(2, 3, 4)
    assert run(add, x).equal(x.permute(2, 0, 1))


def test_shuffle_to_a_computed_shape() -> None:
    def add(network: Any, t: Any, like: Any) -> Any:
        layer = network.add_shuffle(t)
        layer.set_input(1, network.add_shape(like).get_output(0))
        return layer

    x, like = random(6, 4), random(3, 2, 4)
    assert run(add, x, like, shapes=[(-1, 4), (-1, 2, 4)]).equal(x.view(3, 2, 4))


def test_a_zero_in_a_shape_copies_an_axis_even_an_empty_one() -> None:
    def add(network: Any, t: Any) -> Any:
        layer = network.add_shuffle(t)
        layer.reshape_dims = (0, 8)
        return layer

    assert run(add, torch.empty(0, 2, 4), shapes=[(-1, 2, 4)]).shape == (0, 8)
    assert run(add, random(3, 2, 4), shapes=[(-1, 2, 4)]).shape == (3, 8)


def test_slice() -> None:
    x = random(5, 6)
    assert run(lambda n, t: n.add_slice(t, (1, 0), (2, 3), (2, 2)), x).equal(x[1:5:2, 0:6:2])
    assert run(lambda n, t: n.add_slice(t, (0, 2), (5, 3), (1, 0)), x).equal(x[:, 2:3].expand(5, 3))


def test_slice_with_computed_start_and_size() -> None:
    def last_row(network: Any, t: Any) -> Any:
        shape = network.add_shape(t).get_output(0)
        rows = network.add_gather(
            shape, network.add_constant((1,), np.array([0], np.int32)).get_output(0), 0
        ).get_output(0)
        start = network.add_elementwise(rows, ints(network, 1), trt.ElementWiseOperation.SUB).get_output(0)
        layer = network.add_slice(t, (0, 0), (0, 0), (1, 1))
        layer.set_input(1, network.add_concatenation([start, ints(network, 0)]).get_output(0))
        layer.set_input(2, network.add_concatenation([ints(network, 1), ints(network, 6)]).get_output(0))
        return layer

    for rows in (1, 5):
        x = random(rows, 6)
        assert run(last_row, x, shapes=[(-1, 6)]).equal(x[-1:])


def test_slice_out_of_bounds_fails() -> None:
    with pytest.raises(ValueError, match="axis 0 is outside of"):
        run(lambda n, t: n.add_slice(t, (1, 0), (3, 6), (1, 1)), random(3, 6))


def test_gather() -> None:
    x, rows = random(5, 3, 2), torch.tensor([[4, 0], [2, 2]], dtype=torch.int32)
    assert run(lambda n, t, i: n.add_gather(t, i, 0), x, rows).equal(x[rows.long()])
    rows = torch.tensor([2, 0, 2])
    assert run(lambda n, t, i: n.add_gather(t, i, 1), x, rows).equal(x[:, rows])
    with pytest.raises((IndexError, RuntimeError), match="bounds"):
        run(lambda n, t, i: n.add_gather(t, i, 1), x, torch.tensor([3]))


def test_concatenation_squeeze_unsqueeze_shape() -> None:
    def concat(network: Any, *tensors: Any) -> Any:
        layer = network.add_concatenation(list(tensors))
        layer.axis = 1
        return layer

    a, b = random(2, 3), random(2, 1, seed=1)
    assert run(concat, a, b).equal(torch.cat((a, b), 1))
    assert run(lambda n, t: n.add_unsqueeze(t, ints(n, 0, 2)), a).shape == (1, 2, 1, 3)
    assert run(lambda n, t: n.add_squeeze(t, ints(n, 1)), b, shapes=[(-1, 1)]).shape == (2,)
    assert run(lambda n, t: n.add_shape(t), a).tolist() == [2, 3]


def test_fill_and_running_sums() -> None:
    def ramp(network: Any, like: Any) -> Any:
        layer = network.add_fill((1,), trt.FillOperation.LINSPACE, trt.int32)
        layer.set_input(0, network.add_shape(like).get_output(0))
        layer.set_input(1, network.add_constant((), np.array(5, np.int32)).get_output(0))
        layer.set_input(2, network.add_constant((1,), np.array([3], np.int32)).get_output(0))
        return layer

    assert run(ramp, random(4)).tolist() == [5, 8, 11, 14]

    def sums(network: Any, x: Any, exclusive: bool) -> Any:
        axis = network.add_constant((), np.array(0, np.int32)).get_output(0)
        return network.add_cumulative(x, axis, trt.CumulativeOperation.SUM, exclusive, False)

    x = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert run(lambda n, t: sums(n, t, False), x).tolist() == [[1, 2], [4, 6], [9, 12]]
    assert run(lambda n, t: sums(n, t, True), x).tolist() == [[0, 0], [1, 2], [4, 6]]


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(kind: Any, mask_type: Any = None) -> Callable[..., Any]:
    def add(network: Any, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        layer = network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, kind)
        if mask:
            layer.mask = mask[0]
        return layer

    return add


def qkv(heads: int, kv_heads: int, queries: int, keys: int) -> tuple[tuple[Tensor, ...], list[tuple[int, ...]]]:
    """Values in float16, and shapes with dynamic lengths."""
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    values = tuple(random(2, h, s, 16, seed=i).half() for i, (h, s) in enumerate(sizes))
    return values, [(-1, h, -1, 16) for h, _ in sizes]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 7)])
@pytest.mark.parametrize("kind", ["NONE", "UPPER_LEFT", "LOWER_RIGHT"])
def test_attention(kind: str, queries: int, keys: int, heads: tuple[int, int]) -> None:
    """Grouped heads: neighbours share a KV head. UPPER_LEFT counts queries from the first token, LOWER_RIGHT from the
    last: over more keys than queries they differ, and a single query sees one key or all."""
    (q, k, v), shapes = qkv(*heads, queries, keys)
    got = run(attention(getattr(trt.CausalMaskKind, kind)), q, k, v, shapes=shapes)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if kind != "NONE":
        allowed = allowed.tril(keys - queries if kind == "LOWER_RIGHT" else 0)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), allowed, scale=1.0, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    if kind == "UPPER_LEFT" and queries == 1:
        torch.testing.assert_close(got[:, 0], v.float()[:, 0, :1])


def test_attention_with_a_mask() -> None:
    (q, k, v), shapes = qkv(4, 2, 3, 7)
    allowed = torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(2)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), allowed, scale=1.0, enable_gqa=True)
    bias = torch.zeros(1, 1, 3, 7).masked_fill(~allowed, -1e4).half()
    for mask in (allowed, bias):
        shapes_with_mask = [*shapes, (-1, 1, -1, -1)]
        got = run(attention(trt.CausalMaskKind.NONE), q, k, v, mask, shapes=shapes_with_mask)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_attention_of_the_older_interface_counts_from_the_first_token() -> None:
    (q, k, v), shapes = qkv(4, 2, 3, 7)
    norm = trt.AttentionNormalizationOp.SOFTMAX
    old = run(lambda n, *x: n.add_attention(*x, norm, True), q, k, v, shapes=shapes)
    assert old.equal(run(attention(trt.CausalMaskKind.UPPER_LEFT), q, k, v, shapes=shapes))


def test_a_mask_beside_causality_is_dropped() -> None:
    """TensorRT logs an error and goes on: what the network then means is causality alone, and the walk shows it."""
    (q, k, v), shapes = qkv(4, 2, 3, 7)
    builder = Builder()
    network = builder.network()
    inputs = [network.add_input(f"x{i}", trt.float16, s) for i, s in enumerate(shapes)]
    mask = network.add_input("mask", trt.bool, (-1, 1, -1, -1))
    kind = trt.CausalMaskKind.LOWER_RIGHT
    layer = network.add_attention_v2(*inputs, trt.AttentionNormalizationOp.SOFTMAX, kind)
    layer.mask = mask
    assert layer.mask is None
    assert "mask cannot be used together with CausalMaskKind" in builder.messages[0]
    layer.get_output(0).name = "y"
    network.mark_output(layer.get_output(0))
    values = {"x0": q.float(), "x1": k.float(), "x2": v.float(), "mask": torch.zeros(2, 1, 3, 7, dtype=torch.bool)}
    wanted = run(attention(kind), q, k, v, shapes=shapes)
    assert evaluate(trt, network, values)["y"].equal(wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by_position", [False, True])
def test_rotary_embedding(interleaved: bool, by_position: bool) -> None:
    """Halves are rotated against each other (Llama's way), or neighbours."""
    x, dim = random(2, 3, 5, 8), 8
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 9, 9, 0]], dtype=torch.int32)
    angles = torch.arange(10)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()
    if by_position:

        def add(network: Any, t: Any, c: Any, s: Any, p: Any) -> Any:
            layer = network.add_rotary_embedding(t, c, s, interleaved, 0)
            layer.set_input(3, p)
            return layer

        got = run(add, x, cos, sin, positions, shapes=[(-1, 3, -1, 8), (10, 4), (10, 4), (-1, -1)])
    else:
        tables = (cos[positions.long()], sin[positions.long()])
        shapes = [(-1, 3, -1, 8), (-1, -1, 4), (-1, -1, 4)]
        got = run(lambda n, *t: n.add_rotary_embedding(*t, interleaved, dim), x, *tables, shapes=shapes)
    turned = angles[positions.long()][:, None]
    pairs = x.view(2, 3, 5, 4, 2) if interleaved else x.view(2, 3, 5, 2, 4).transpose(3, 4)
    wanted = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(turned), turned)
    )
    wanted = wanted.flatten(3) if interleaved else wanted.transpose(3, 4).flatten(3)
    torch.testing.assert_close(got, wanted)
