# SPDX-License-Identifier: Apache-2.0
"""The arenas of benchmarks/triton.sh: the same bytes at every ratio, with room for as many sequences as it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hubkv_trt.config import budget
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.cache_size import create_cache

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from triton_cell import Cell, make_plan

MOST = 48


@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_the_arena_is_the_same_and_has_the_room(kind: str, tiny_engine: Callable[..., Path]) -> None:
    engine = tiny_engine("llama")
    config = load_engine(engine).config
    sizes = set()
    for ratio in (0, 0.5, 0.75, 0.9):
        cell = Cell.parse(f"{kind}-r{ratio}-c8", prompt=512, output=128)
        found = make_plan(engine, cell, MOST)
        sizes.add(found.cache_bytes)
        rows = budget(config.model, config.hubkv, cell.prompt, cell.ratio).num_rows
        cache = create_cache(config, found.cache_bytes, found.tail_tokens)
        room = 0
        while room < MOST and cache.fits([rows], cell.output - 1):
            cache.allocate(rows)
            cache.open_tail(cell.output - 1)
            room += 1
        assert room == found.fitting
        assert ratio or room == cell.dense
    assert len(sizes) == 1


def test_names() -> None:
    cell = Cell.parse("tokens-r0.75-c8", 2048, 512)
    assert (cell.kind, cell.ratio, cell.concurrency, cell.output) == ("tokens", 0.75, 8, 512)
    for name in ("tokens", "tokens-r1-c8", "tokens-r0.5-c0", "others-r0.5-c1"):
        with pytest.raises(ValueError, match=f"cell: '{name}'"):
            Cell.parse(name, 2048, 512)
