# SPDX-License-Identifier: Apache-2.0
"""select_ragged: exactly the first ranked of each head, equal to a stable sort whatever the values are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import ops, reference
from test_select import VALUES


def offsets_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def check(scores: np.ndarray, places: np.ndarray, sizes: list[int], counts: list[int], rows: int, sinks: int) -> None:
    """Equal to the oracle; then the statement of the stage, without a sort."""
    arguments = (scores.astype(np.float32), places.astype(np.int32), offsets_of(sizes), np.array(counts, np.int32))
    got, offsets = ops.select_ragged(*map(torch.from_numpy, arguments), rows, sinks)
    want, want_offsets = reference.select_ragged(*arguments, rows, sinks)
    assert np.array_equal(got.numpy(), want)
    assert np.array_equal(offsets.numpy(), want_offsets)
    for head, (first, size) in enumerate(zip(offsets_of(sizes), sizes, strict=False)):
        kept = got[offsets[head] : offsets[head + 1]].numpy()
        assert np.all(np.diff(kept) > 0)
        inside = np.isin(np.arange(size), kept)
        rank = np.where(np.isnan(scores), -np.inf, scores)[first : first + size].astype(np.float64)
        rank = np.where(places[first : first + size] < sinks, np.inf, np.minimum(rank, 1e300))
        if inside.any() and not inside.all():
            assert rank[inside].min() >= rank[~inside].max()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5), sinks=st.integers(0, 6))
def test_equals_oracle_on_anything(data: st.DataObject, sizes: list[int], sinks: int) -> None:
    total = sum(sizes)
    scores = np.array(data.draw(st.lists(VALUES, min_size=total, max_size=total)), np.float32)
    places = np.array(data.draw(st.lists(st.integers(0, 20), min_size=total, max_size=total)), np.int32)
    counts = [data.draw(st.integers(-1, size + 1)) for size in sizes]
    rows = data.draw(st.integers(0, total))
    check(scores, places, sizes, counts, rows, sinks)


@pytest.mark.parametrize("distinct", [1, 3, 100, 2**30])
def test_large_with_ties(distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    sizes = [0, 5000, 1, 0, 3000, 257, 256, 255]
    total = sum(sizes)
    scores = (rng.integers(0, distinct, total) / distinct - 0.5).astype(np.float32)
    scores[rng.random(total) < 0.01] = np.nan
    places = np.concatenate([np.arange(size) for size in sizes])
    for share in (0.0, 0.1, 0.5, 1.0):
        counts = [int(share * size) for size in sizes]
        check(scores, places, sizes, counts, sum(counts), 4)


def test_counts_past_the_rows_are_left_out() -> None:
    scores = torch.arange(6.0)
    arguments = (scores, torch.arange(6, dtype=torch.int32), torch.tensor([0, 3, 6]), torch.tensor([9, 9]).int())
    indices, offsets = ops.select_ragged(*arguments, 4, 0)
    assert indices.tolist() == [0, 1, 2, 2]
    assert offsets.tolist() == [0, 3, 4]
    indices, offsets = ops.select_ragged(*arguments[:3], torch.tensor([1, -7]).int(), 3, 0)
    assert indices.tolist() == [2, -1, -1]
    assert offsets.tolist() == [0, 1, 1]


@pytest.mark.parametrize("offsets", [[0, 9, 6], [-5, 3, 6], [2**62, -(2**62), 6], [6, 6, 6], [3, 0, 2**63 - 1]])
def test_wrong_offsets_stay_inside(offsets: list[int]) -> None:
    counts = torch.tensor([6, 6], dtype=torch.int32)
    places = torch.arange(6, dtype=torch.int32)
    indices, head_offsets = ops.select_ragged(torch.rand(6), places, torch.tensor(offsets), counts, 6, 2)
    assert bool((indices < 6).all())
    assert 0 <= head_offsets.min() <= head_offsets.max() <= 6


SCORES, PLACES = torch.rand(6), torch.arange(6, dtype=torch.int32)
OFFSETS, COUNTS = torch.tensor([0, 3, 6]), torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: SCORES.double()}, "scores: dtype torch.float64"),
        ({0: SCORES.view(2, 3)}, r"scores: shape \[2, 3\]"),
        ({1: PLACES[:5]}, r"candidate_positions: shape \[5\]"),
        ({2: OFFSETS.int()}, "candidate_offsets: dtype torch.int32"),
        ({2: OFFSETS[:1]}, r"candidate_offsets: shape \[1\]"),
        ({3: COUNTS[:1]}, r"counts: shape \[1\]"),
        ({4: 7}, "K: 7 is not in 0..6"),
        ({4: -1}, "K: -1"),
        ({5: -1}, "sinkTokens: -1"),
        ({5: 2**31}, "sink_tokens: 2147483648"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    arguments = [SCORES, PLACES, OFFSETS, COUNTS, 3, 0]
    for index, value in changes.items():
        arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.select_ragged(*arguments)
