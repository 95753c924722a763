# SPDX-License-Identifier: Apache-2.0
"""How heads share rows by what they lose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.runtime.executors.head_shares import rows_for_mass, share_rows


def curves(seed: int, heads: int, levels: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Losses that fall to 0, some in steps and some not convex, and the rows at which they do."""
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.integers(0, 4, (heads, 1)), rng.integers(0, 30, (heads, levels))], axis=1).cumsum(axis=1)
    falls = rng.random((heads, levels)) ** rng.integers(1, 9)
    falls[rng.random((heads, levels)) < 0.2] = 0
    falls[:, 1:][np.diff(rows[:, :-1]) == 0] = 0  # no loss falls without rows
    falls[:, 0][rows[:, 1] == rows[:, 0]] = 0
    loss = np.concatenate([falls[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((heads, 1))], axis=1)
    return (loss / max(loss.max(), 1e-9)).astype(np.float32), rows.astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(0, 1.2), st.integers(0, 9), st.integers(1, 300))
def test_all_rows_are_shared_within_the_bounds(seed: int, heads: int, part: float, least: int, most: int) -> None:
    loss, rows = curves(seed, heads)
    sizes = rows[:, -1].astype(np.int64)
    least_of, most_of = np.maximum(np.minimum(least, sizes), rows[:, 0]), np.minimum(most, sizes)
    total = int(part * sizes.sum())
    got = share_rows(loss, rows, total, least_of, most_of)
    most_of = np.maximum(least_of, most_of)
    assert (got >= least_of).all()
    assert (got <= most_of).all()
    assert got.sum() == np.clip(total, least_of.sum(), most_of.sum())


@pytest.mark.parametrize("bounds", [(0, 5), (1, 4), (2, 5), (0, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_of_levels_loses_less(seed: int, bounds: tuple[int, int]) -> None:
    """What one price takes is the best of all choices within the bounds that take no more rows together."""
    loss, rows = curves(seed, 3, levels=5)
    least, most = (rows[:, b].astype(np.int64) for b in bounds)
    within = [[b for b in range(6) if least[h] <= rows[h, b] <= most[h]] for h in range(3)]
    for price in (1e-4, 1e-3, 1e-2):
        level = [min(within[h], key=lambda b, h=h: float(loss[h, b]) + price * rows[h, b]) for h in range(3)]
        total = int(rows[range(3), level].sum())
        got = share_rows(loss, rows, total, least, most)
        best = min(
            loss[range(3), levels].astype(np.float64).sum()
            for levels in itertools.product(*within)
            if rows[range(3), levels].sum() <= total
        )
        reached = [(rows[h] <= got[h]).nonzero()[0].max() for h in range(3)]
        assert got.sum() == total
        assert loss[range(3), level].astype(np.float64).sum() == pytest.approx(best, abs=1e-9)
        assert loss[range(3), reached].astype(np.float64).sum() == pytest.approx(best, abs=1e-6)


def test_a_level_beyond_its_bound_draws_no_rows() -> None:
    loss = np.array([[0.5, 0.49, 0], [0.4, 0.2, 0]], np.float32)
    rows = np.array([[0, 50, 100], [0, 50, 100]], np.int32)
    assert share_rows(loss, rows, 50, np.array([0, 0]), np.array([50, 100])).tolist() == [0, 50]


def test_equal_heads_share_alike() -> None:
    loss, rows = np.array([[1, 0.5, 0]] * 4, np.float32), np.array([[0, 100, 1000]] * 4, np.int32)
    assert share_rows(loss, rows, 1201, np.zeros(4, np.int64), np.full(4, 1000)).tolist() == [301, 300, 300, 300]


def test_a_head_that_loses_nothing_gets_nothing_but_what_is_left() -> None:
    loss = np.array([[0, 0, 0], [0.5, 0.2, 0]], np.float32)
    rows = np.array([[2, 10, 20], [2, 10, 20]], np.int32)
    none, sizes = np.array([2, 2]), np.array([20, 20])
    assert share_rows(loss, rows, 22, none, sizes).tolist() == [2, 20]
    assert share_rows(loss, rows, 30, none, sizes).tolist() == [10, 20]
    assert share_rows(loss, rows, 99, none, sizes).tolist() == [20, 20]
    assert share_rows(loss, rows, 1, none, sizes).tolist() == [2, 2]


def test_rows_for_mass() -> None:
    loss = np.array([[0.25, 0.01, 0.0001, 0], [0, 0, 0, 0]], np.float32)
    rows = np.array([[1, 5, 9, 12], [3, 4, 5, 6]], np.int32)
    assert rows_for_mass(loss, rows, 0.5).tolist() == [1, 3]
    assert rows_for_mass(loss, rows, 0.6).tolist() == [5, 3]
    assert rows_for_mass(loss, rows, 0.98).tolist() == [9, 3]
    assert rows_for_mass(loss, rows, 1.0).tolist() == [12, 6]
