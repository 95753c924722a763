# SPDX-License-Identifier: Apache-2.0
"""The cache holds exactly what its ledger says, gives all of it back, and never puts two things in one place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.config import DType, EngineConfig, ModelConfig
from hubkv_trt.runtime.arena import FreeList, align
from hubkv_trt.runtime.cache import Cache, CacheFullError
from hubkv_trt.runtime.cache_size import create_cache
from hubkv_trt.runtime.ledger import Ledger
from hubkv_trt.runtime.memory import resident_bytes


def make_model(**changes: int) -> ModelConfig:
    sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 40, **changes}
    return ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=160,
        intermediate_size=64,
        max_position_embeddings=4096,
        **sizes,
    )


def make_cache(segment_bytes: int = 1 << 20, num_pages: int = 8, dtype: DType = DType.FLOAT32) -> Cache:
    return Cache(Ledger(make_model(), dtype), segment_bytes, num_pages)


# ---- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "itemsize"), [(DType.FLOAT32, 4), (DType.FLOAT16, 2), (DType.BFLOAT16, 2)])
def test_ledger_adds_up_slice_by_slice(dtype: DType, itemsize: int) -> None:
    ledger = Ledger(make_model(), dtype)
    rows, tail_tokens = 1001, 33
    padded = [-(-size // 256) * 256 for size in (rows * 40 * itemsize, rows * 40 * itemsize, (3 * 2 + 1) * 8, rows * 4)]
    assert list(ledger.slices(rows).values()) == padded
    page = 3 * 2 * 2 * 16 * 40 * itemsize
    assert ledger.page_bytes == page
    assert ledger.sequence_bytes(rows, tail_tokens) == sum(padded) + 3 * page
    assert ledger.dense_bytes(10) == 10 * 3 * 2 * 2 * 40 * itemsize


def test_a_segment_lies_as_the_ledger_says() -> None:
    cache = make_cache()
    segment = cache.allocate(77)
    base = cache.arena.data_ptr()
    k_offset, v_offset, table_offset, bias_offset = segment.entry
    slices = cache.ledger.slices(77)
    assert bias_offset == -1
    assert [k_offset, v_offset, table_offset] == [
        segment.offset,
        segment.offset + slices["k_rows"],
        segment.offset + slices["k_rows"] + slices["v_rows"],
    ]
    views = (segment.k_rows, k_offset), (segment.v_rows, v_offset), (segment.head_offsets, table_offset)
    for tensor, offset in views:
        assert tensor.data_ptr() == base + offset
        assert offset % 256 == 0
    assert segment.k_rows.shape == segment.v_rows.shape == (77, 40)
    assert segment.positions.shape == (77,)
    assert segment.head_offsets.shape == (7,)
    assert segment.positions.data_ptr() + 77 * 4 <= base + segment.offset + segment.num_bytes
    assert cache.held_bytes == segment.num_bytes == cache.ledger.sequence_bytes(77, 0)


# ---- what is held ----------------------------------------------------------------------------------------------------


def test_pages_are_taken_as_a_tail_grows_and_all_come_back() -> None:
    cache = make_cache(num_pages=4)
    tail = cache.open_tail(40)  # three pages
    assert cache.held_bytes == 0
    assert cache.grow(tail, 1)
    assert not cache.grow(tail, 16)
    assert cache.grow(tail, 17)
    assert tail.pages == [0, 1]
    assert cache.held_bytes == cache.ledger.tail_bytes(17) == 2 * cache.ledger.page_bytes
    assert cache.fits([], 16)
    assert not cache.fits([], 17)  # the third page is promised, not free
    with pytest.raises(CacheFullError, match="needs 2 pages, 1 of 4"):
        cache.open_tail(17)
    with pytest.raises(RuntimeError, match="longer than the 3 pages"):
        cache.grow(tail, 49)
    cache.audit()
    cache.close_tail(tail)
    assert cache.held_bytes == 0
    assert cache.fits([], 64)
    cache.audit()


def test_a_shared_segment_stays_until_its_last_holder_leaves() -> None:
    cache = make_cache()
    segment = cache.allocate(10)
    cache.share(segment)
    cache.release(segment)
    assert cache.held_bytes == segment.num_bytes
    cache.audit()
    cache.release(segment)
    assert cache.held_bytes == 0
    with pytest.raises(RuntimeError, match="released more often"):
        cache.release(segment)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        cache.share(segment)
    cache.audit()


def test_a_full_cache_says_what_is_missing_and_takes_nothing() -> None:
    cache = make_cache(segment_bytes=make_cache().ledger.segment_bytes(100))
    segment = cache.allocate(100)
    assert not cache.fits([1], 0)
    with pytest.raises(CacheFullError, match=r"a segment of 1 rows needs \d+ bytes .* largest free range has 0"):
        cache.allocate(1)
    cache.audit()
    cache.release(segment)
    cache.check_can_ever_fit([100], 8 * 16)
    with pytest.raises(ValueError, match=r"prompt: .*raise cache_bytes or the ratio"):
        cache.check_can_ever_fit([200], 0)
    with pytest.raises(ValueError, match="max_tokens: 'a tail of 129 tokens'"):
        cache.check_can_ever_fit([1], 129)


def test_freed_memory_goes_back_to_the_system() -> None:
    cache = make_cache(segment_bytes=256 << 20)
    before = resident_bytes()
    segment = cache.allocate(500_000)
    assert resident_bytes() - before < 8 << 20, "memory is committed before it is written"
    segment.k_rows.fill_(1.0)
    segment.v_rows.fill_(1.0)
    assert resident_bytes() - before > 150 << 20
    cache.release(segment)
    assert resident_bytes() - before < 8 << 20
    assert float(cache.allocate(10).k_rows.abs().sum()) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_operations_keeps_the_books_right(data: st.DataObject) -> None:
    """Random joins and leaves: counters equal the ledger of a list kept beside the cache, and nothing overlaps."""
    cache = make_cache(segment_bytes=200_000, num_pages=6, dtype=DType.BFLOAT16)
    segments: list[tuple] = []  # (segment, rows, mark)
    tails: list[list] = []  # [tail, tokens, limit]
    for step in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(["allocate", "release", "share", "open", "grow", "close"]))
        if action == "allocate":
            rows = data.draw(st.integers(0, 600))
            if cache.fits([rows], 0):
                segment = cache.allocate(rows)
                segment.k_rows.fill_(step)
                segment.positions.fill_(step)
                segments.append((segment, rows, step))
            else:
                with pytest.raises(CacheFullError):
                    cache.allocate(rows)
        elif action in ("release", "share") and segments:
            index = data.draw(st.integers(0, len(segments) - 1))
            if action == "share":
                cache.share(segments[index][0])
                segments.append(segments[index])
            else:
                cache.release(segments.pop(index)[0])
        elif action == "open":
            limit = data.draw(st.integers(0, 64))
            if cache.fits([], limit):
                tails.append([cache.open_tail(limit), 0, limit])
        elif action == "grow" and tails:
            tail = tails[data.draw(st.integers(0, len(tails) - 1))]
            tail[1] = data.draw(st.integers(tail[1], tail[2]))
            cache.grow(tail[0], tail[1])
        elif action == "close" and tails:
            cache.close_tail(tails.pop(data.draw(st.integers(0, len(tails) - 1)))[0])
        cache.audit()
        distinct = {id(s): rows for s, rows, _ in segments}
        expected = sum(cache.ledger.segment_bytes(rows) for rows in distinct.values())
        expected += sum(cache.ledger.tail_bytes(tokens) for _, tokens, _ in tails)
        assert cache.held_bytes == expected <= cache.peak_bytes
    for segment, _, mark in segments:
        assert bool((segment.k_rows == mark).all())
        assert bool((segment.positions == mark).all())


def test_best_fit_leaves_the_large_range_whole_and_neighbours_join() -> None:
    free = FreeList(0, 100 * 256)
    a, b, c, d = (free.take(n * 256) for n in (10, 20, 5, 65))
    assert (a, b, c, d) == (0, 10 * 256, 30 * 256, 35 * 256)
    assert free.take(1) is None
    free.put(b, 20 * 256)
    free.put(d, 65 * 256)
    assert free.take(20 * 256) == b
    free.put(b, 20 * 256)
    free.put(c, 5 * 256)
    free.put(a, 10 * 256)
    assert free.ranges() == [(0, 100 * 256)]
    with pytest.raises(RuntimeError, match="freed twice"):
        free.put(c, 5 * 256)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_the_default_cache_holds_a_whole_batch_without_compression() -> None:
    model = make_model()
    cache = create_cache(EngineConfig(model=model, dtype=DType.FLOAT32, max_input_len=256, max_batch_size=3))
    ledger = cache.ledger
    segments = [cache.allocate(model.num_rows_per_token * 256) for _ in range(3)]
    tails = [cache.open_tail(2048) for _ in range(3)]
    assert cache.num_bytes == 3 * ledger.sequence_bytes(model.num_rows_per_token * 256, 2048)
    assert len(segments) == len(tails)
    cache.audit()


def test_sizes_that_the_user_names_are_kept_or_refused() -> None:
    config = EngineConfig(model=make_model(), dtype=DType.FLOAT16, max_input_len=256, max_batch_size=2)
    cache = create_cache(config, cache_bytes=1_000_000, tail_tokens=50)
    assert cache.num_pages == 4
    assert 1_000_000 - 256 < cache.num_bytes <= 1_000_000
    with pytest.raises(ValueError, match="cache_bytes: 10000 is not at least"):
        create_cache(config, cache_bytes=10_000)
    with pytest.raises(ValueError, match="tail_tokens: 0"):
        create_cache(config, tail_tokens=0)


def test_the_arena_is_aligned() -> None:
    cache = make_cache()
    assert cache.arena.data_ptr() % 256 == 0
    assert cache.arena.dtype == torch.uint8
    assert align(1) == 256
    assert align(256) == 256
    assert align(0) == 0
