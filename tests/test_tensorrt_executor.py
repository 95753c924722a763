# SPDX-License-Identifier: Apache-2.0
"""What the executor of TensorRT engines computes on the host, without a GPU: uploads, tables, places and sizes."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import _abi, ops
from hubkv_trt.config import HubKVConfig, Scope
from hubkv_trt.cuda import memory, upload
from hubkv_trt.engine.bindings import extend_bindings, prefill_bindings, row_names, work_capacity
from hubkv_trt.runtime.batch import Tables
from hubkv_trt.runtime.executors import tables
from hubkv_trt.runtime.executors.rows import place_rows, staged_bytes
from hubkv_trt.runtime.executors.stage_calls import append_rows, plan_work
from hubkv_trt.runtime.ledger import PAGE_TOKENS
from ragged_cache import new_rows, random_cache
from tensorrt_config import make_config

# ---- uploading weights -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 6))
def test_pieces_cover_every_byte_once_in_order(sizes: list[int], blocks: int) -> None:
    named = {f"w{i}": size for i, size in enumerate(sizes)}
    offsets, total = upload.layout(named)
    assert total % 256 == 0
    assert total >= sum(sizes)
    covered = np.zeros(total, np.int64)
    for start, parts in upload.pieces(named, 256 * blocks):
        assert start % (256 * blocks) == 0
        end = 0
        for name, low, at, num_bytes in parts:
            assert at >= end
            assert offsets[name] + low == start + at
            assert num_bytes > 0
            end = at + num_bytes
            covered[start + at : start + end] += 1
        assert end <= 256 * blocks
    wanted = np.zeros(total, np.int64)
    for name, size in named.items():
        assert offsets[name] % 256 == 0
        wanted[offsets[name] : offsets[name] + size] = 1
    assert np.array_equal(covered, wanted)


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("piece", [256, 1024, 1 << 16])
def test_tensors_arrive_though_copies_are_late(num_buffers: int, piece: int) -> None:
    """A copy reads its buffer only when it is waited for: a buffer that is filled too early would spoil it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(33, 7, generator=generator).to(torch.bfloat16),
        "b": torch.randn(1, generator=generator),
        "empty": torch.empty(0, 4),
        "c": torch.randint(-9, 9, (5, 50), generator=generator),
        "not dense": torch.randn(20, 30, generator=generator).t(),
        "d": torch.randn(700, generator=generator).to(torch.float16),
    }
    offsets, total = upload.layout({n: t.numel() * t.element_size() for n, t in tensors.items()})
    target = np.zeros(total, np.uint8)
    buffers = [np.zeros(piece, np.uint8) for _ in range(num_buffers)]
    pending: dict[int, tuple[int, int]] = {}

    def wait(index: int) -> None:
        if index in pending:
            start, num_bytes = pending.pop(index)
            target[start : start + num_bytes] = buffers[index][:num_bytes]

    def send(index: int, start: int, num_bytes: int) -> None:
        assert index not in pending
        pending[index] = (start, num_bytes)

    upload.stream_through(tensors, buffers, wait, send)
    for index in list(pending):
        wait(index)
    for name, tensor in tensors.items():
        raw = upload.as_bytes(tensor).numpy()
        assert np.array_equal(target[offsets[name] : offsets[name] + raw.size], raw), name


# ---- the tables of a step --------------------------------------------------------------------------------------------


def in_image(image: tables.TableImage, buffer: np.ndarray, name: str, dtype: type, *shape: int) -> torch.Tensor:
    """A table as it lies in the image, dense and from its offset on."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    start = image.offsets[name]
    return torch.from_numpy(buffer[start : start + num_bytes].view(dtype).reshape(shape))


@pytest.mark.parametrize(("batch", "padded", "num_new"), [(1, 1, 1), (3, 4, 1), (5, 8, 1), (2, 2, 9), (3, 3, 4)])
def test_stages_read_from_the_image_what_the_tables_say(batch: int, padded: int, num_new: int) -> None:
    """With sequences behind that are not there, and rows of zeros for them, the batch gives the same bytes."""
    lengths = [(30, 17), (None, 40), (8, 0), (0, 3), (60, 31)][:batch]
    cache = random_cache(sequences=lengths, dtype=torch.bfloat16, seed=batch)
    q, k, v = new_rows(cache, num_new, group=2, layers=cache.num_layers)
    new_lengths = torch.tensor([max(1, num_new - 2 * b) for b in range(batch)], dtype=torch.int32)
    ids = torch.arange(100, 100 + batch * num_new, dtype=torch.int32).reshape(batch, num_new)
    positions = torch.arange(batch * num_new, dtype=torch.int32) + 7
    last = torch.arange(batch, dtype=torch.int32) * num_new + new_lengths - 1
    step = Tables(cache.segments, cache.block_table, cache.tail_lengths, new_lengths, positions, last)
    pages = cache.block_table.shape[1] + 3

    image = tables.TableImage(padded, padded * num_new + 5, pages)
    buffer = np.full(image.num_bytes, 0xAB, np.uint8)
    image.fill(buffer, step, ids.numpy(), padded, num_new)
    read = functools.partial(in_image, image, buffer)
    table = read("block_table", np.int32, padded, pages)
    assert torch.equal(table[:batch, : pages - 3], cache.block_table)
    assert bool((table[batch:] == -1).all())
    assert bool((table[:, pages - 3 :] == -1).all())
    assert torch.equal(read("input_ids", np.int32, padded, num_new)[:batch], ids)
    assert torch.equal(read("positions", np.int32, padded, num_new)[:batch].flatten(), positions)
    assert bool((read("input_ids", np.int32, padded, num_new)[batch:] == 0).all())
    last_tokens = read("last_tokens", np.int32, padded)
    assert torch.equal(last_tokens[:batch], last)
    assert bool(((last_tokens >= 0) & (last_tokens < padded * num_new)).all())

    other = replace(
        cache.clone(),
        segments=read("segments", np.int64, padded, 4),
        block_table=table,
        tail_lengths=read("tail_lengths", np.int32, padded),
    )
    more = read("new_lengths", np.int32, padded)
    assert bool((other.segments[batch:] == -1).all())
    assert not other.tail_lengths[batch:].any()
    assert not more[batch:].any()

    def with_rows_behind(x: torch.Tensor, axis: int) -> torch.Tensor:
        shape = list(x.shape)
        shape[axis] = padded - batch
        return torch.cat([x, torch.full(shape, torch.nan, dtype=x.dtype)], axis)

    for layer in range(cache.num_layers):
        arguments = [x[layer] for x in (q, k, v)]
        wanted = cache.attend(*arguments, layer=layer, new_lengths=new_lengths, capacity=64)
        found = other.attend(*(with_rows_behind(x, 0) for x in arguments), layer=layer, new_lengths=more, capacity=64)
        assert torch.equal(found[:batch].view(torch.int16), wanted.view(torch.int16))
        assert not found[batch:].any()
    cache.append(k, v, new_lengths)
    other.append(with_rows_behind(k, 1), with_rows_behind(v, 1), more)
    assert torch.equal(other.arena, cache.arena)


def test_a_step_changes_only_the_second_part_of_the_image() -> None:
    """What a step may copy alone: tokens, lengths and positions, but neither segments nor pages."""
    cache = random_cache(sequences=[(9, 5), (4, 20)])
    image = tables.TableImage(2, 2, cache.block_table.shape[1])
    buffers = []
    for step in range(2):
        one = torch.ones(2, dtype=torch.int32)
        positions = torch.tensor([14, 24], dtype=torch.int32) + step
        rows = torch.arange(2, dtype=torch.int32)
        buffer = np.zeros(image.num_bytes, np.uint8)
        step_tables = Tables(cache.segments, cache.block_table, cache.tail_lengths + step, one, positions, rows)
        image.fill(buffer, step_tables, np.array([[step], [3]], np.int32), 2, 1)
        buffers.append(buffer)
    different = np.flatnonzero(buffers[0] != buffers[1])
    assert different.min() >= image.step_start
    assert different.size == 5  # two lengths, two positions, one token


def test_without_tables_nothing_is_read_or_written() -> None:
    """What recording runs over: sequences without segment, tail and new tokens."""
    model = make_config().model
    image = tables.TableImage(4, 4, 9)
    buffer = np.full(image.num_bytes, 0xAB, np.uint8)
    image.fill(buffer, None, None, 4, 1)
    read = functools.partial(in_image, image, buffer)
    arena = torch.full((4096,), 0xCD, dtype=torch.uint8)
    _, count = ops.plan(arena, read("segments", np.int64, 4, 4), model.num_layers, model.num_kv_heads, 64, 256)
    assert not count.any()
    rows = torch.randn(3, 4, 1, 2, 64)
    lengths = read("new_lengths", np.int32, 4)
    ops.append(
        rows, rows, arena, read("block_table", np.int32, 4, 9), read("tail_lengths", np.int32, 4), lengths, 16, 0
    )
    assert bool((arena == 0xCD).all())
    assert read("input_ids", np.int32, 4).tolist() == [0] * 4
    assert read("last_tokens", np.int32, 4).tolist() == [0, 1, 2, 3]


def test_stages_are_called_as_their_operators_call_them() -> None:
    """``plan_work`` and ``append_rows``, which the executor calls with addresses on the GPU, with addresses here."""
    config = make_config()
    model, batch, new = config.model, 3, 2
    cache = random_cache(sequences=[(30, 17), (None, 40), (300, 2)], num_layers=3, dtype=torch.bfloat16)
    cache = replace(cache, page_base=0)  # where the executor's pages are; the segments stay where they were
    arena = torch.cat([torch.zeros_like(cache.arena[: 12 * 24576]), cache.arena])
    moved = cache.segments.where(cache.segments < 0, cache.segments + 12 * 24576)
    block_table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    new_lengths = torch.tensor([2, 1, 2], dtype=torch.int32)
    _, k, v = new_rows(cache, new, 2, layers=3)
    capacity = work_capacity(model, batch)
    work, work_count = ops.plan(arena, moved, 3, 2, capacity, 256)
    found, found_count = torch.zeros_like(work), torch.zeros_like(work_count)
    wanted = arena.clone()
    ops.append(k, v, wanted, block_table, cache.tail_lengths, new_lengths, PAGE_TOKENS, 0)

    table = torch.tensor([arena.data_ptr(), arena.numel()])
    tensors = {
        "arena": table, "segments": moved, "work": found, "work_count": found_count, "k_new": k, "v_new": v,
        "block_table": block_table, "tail_lengths": cache.tail_lengths, "new_lengths": new_lengths,
    }  # fmt: skip
    at = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    plan_work(model, batch, at, None, _abi.CPU)
    append_rows(model, config.dtype, batch, new, 4, at, None, _abi.CPU)
    assert torch.equal(found_count, work_count)
    assert int(work_count.sum()) > 0
    for layer, count in enumerate(work_count.tolist()):
        assert torch.equal(found[layer, :count], work[layer, :count])
    assert torch.equal(arena, wanted)
    assert not torch.equal(arena, torch.cat([torch.zeros_like(cache.arena[: 12 * 24576]), cache.arena]))


@pytest.mark.parametrize("most", [1, 2, 3, 6, 8, 100])
def test_batch_sizes_hold_every_batch_and_waste_less_than_half(most: int) -> None:
    sizes = tables.batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = tables.smallest_that_holds(count, sizes)
        assert count <= size < 2 * count or size == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 40))
def test_pieces_of_questions_take_every_token_once(lengths: list[int], width: int) -> None:
    pieces = tables.question_pieces(np.array(lengths, np.int32), width)
    assert sum(pieces).tolist() == lengths
    for index, piece in enumerate(pieces):
        assert piece.dtype == np.int32
        assert 1 <= piece.max() <= width
        for taken, length in zip(piece.tolist(), lengths, strict=True):
            assert taken == width or index * width + taken == length or (taken == 0 and length < index * width + 1)


# ---- rows into the segment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("row_bytes", [128, 256, 48])
def test_rows_come_to_lie_behind_each_other(scope: Scope, num_rows: int, row_bytes: int) -> None:
    """Each output is written to an aligned place; after the copies the segment holds them without holes."""
    model = make_config().model
    names = row_names("k", model, HubKVConfig(scope=scope))
    size = num_rows * row_bytes
    start, borrowed = 1024, 1 << 18
    outputs = list(place_rows(names, start, size, borrowed))
    assert [o.name for o in outputs] == names
    memory = np.zeros(1 << 19, np.uint8)
    taken = np.zeros(1 << 19, np.int64)
    values = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(len(names))]
    for output, value in zip(outputs, values, strict=True):
        place = output.offset if output.staged is None else output.staged
        assert place % 256 == 0
        memory[place : place + size] = value
        taken[place : place + size] += 1
    assert taken.max() == 1
    assert not taken[borrowed + staged_bytes(len(names), size) :].any()
    for output in outputs:
        if output.staged is not None:
            memory[output.offset : output.offset + size] = memory[output.staged : output.staged + size]
    assert np.array_equal(memory[start : start + size * len(names)], np.concatenate(values))
    if size % 256 == 0:
        assert all(o.staged is None for o in outputs)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_too_small_says_what_needs_how_much() -> None:
    needs = {"weights": 15 << 30, "context memory of questions": 100 << 20}
    memory.check_room(needs, 16 << 30, 24 << 30)
    with pytest.raises(memory.OutOfDeviceMemoryError) as raised:
        memory.check_room(needs, 8 << 30, 24 << 30)
    assert str(raised.value) == (
        "not enough GPU memory: 15.10 GiB are needed and 8.00 GiB of 24.00 GiB are free. Needed for\n"
        "  - weights: 15.00 GiB\n  - context memory of questions: 100.0 MiB"
    )


@pytest.mark.parametrize("scope", [*Scope, None])
def test_outputs_get_as_many_bytes_as_their_largest_shape(scope: Scope | None) -> None:
    config = make_config(hubkv=None if scope is None else HubKVConfig(scope=scope))
    found = {n: tables.binding_bytes(b, B=6, N=96, W=40) for n, b in extend_bindings(config).items() if not b.is_input}
    assert found == {"logits": 6 * 260 * 4, "k_new": 3 * 96 * 2 * 64 * 2, "v_new": 3 * 96 * 2 * 64 * 2}
    work = extend_bindings(config)["work"]
    assert tables.binding_bytes(work, W=40) == 3 * 40 * 16
    assert tables.binding_bytes(prefill_bindings(config)["logits"]) == 260 * 4
