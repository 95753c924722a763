# SPDX-License-Identifier: Apache-2.0
"""Intervals hold what they promise, p-values are uniform where nothing differs, and Holm is Holm."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from hubkv_trt.evaluation.statistics import bootstrap, holm, sign_flips

Draw = Callable[[np.random.Generator, int], np.ndarray]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(0.3, 1, n),
    "skewed": lambda rng, n: rng.exponential(1, n) - 0.7,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_coverage(draw: Draw) -> None:
    """95 % intervals of 50 contexts hold the true mean, 0.3, in about 95 % of 400 worlds (a little less: percentiles of
    few values are narrow)."""
    held = 0
    for world in range(400):
        found = bootstrap(draw(np.random.default_rng(world), 50), resamples=1000, seed=world)
        held += found.low <= 0.3 <= found.high
    assert 0.90 <= held / 400 <= 0.98


def test_width_is_that_of_the_normal_distribution() -> None:
    found = bootstrap(np.random.default_rng(1).normal(5, 2, 400))
    assert found.high - found.low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)
    assert found.contexts == 400


def test_questions_of_a_context_are_drawn_together() -> None:
    """Asking the same again tells nothing new; counting it as new would halve the width."""
    values = np.random.default_rng(2).normal(size=40)
    alone = bootstrap(values)
    repeated = bootstrap(np.repeat(values, 4), np.repeat(np.arange(40), 4))
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    naive = bootstrap(np.repeat(values, 4))
    assert naive.high - naive.low == pytest.approx((alone.high - alone.low) / 2, rel=0.1)
    assert sign_flips(np.repeat(values, 4), np.repeat(np.arange(40), 4)) == sign_flips(values)


def test_clusters_of_different_size_weigh_by_their_values() -> None:
    found = bootstrap([1.0, 2.0, 6.0], [7, 7, 9], resamples=2000)
    assert found.mean == 3
    assert (found.low, found.high, found.contexts) == (1.5, 6.0, 2)


def test_the_same_seed_gives_the_same() -> None:
    values = np.random.default_rng(3).normal(size=30)
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1) != bootstrap(values, seed=2)
    assert sign_flips(values, seed=1) == sign_flips(values, seed=1) != sign_flips(values, seed=2)


def test_sign_flips_count_as_all_signs_would() -> None:
    values = np.array([0.4, -0.1, 0.7, 0.3, 0.2, -0.05, 0.6, 0.1])
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
    exact = np.mean([s >= abs(values.sum()) - 1e-12 for s in sums])
    assert sign_flips(values, resamples=100_000) == pytest.approx(exact, abs=0.002)


def test_p_is_uniform_where_nothing_differs() -> None:
    p = [sign_flips(np.random.default_rng(w).standard_t(3, 30), resamples=999, seed=w) for w in range(400)]
    for level in (0.05, 0.2, 0.5, 0.8):
        assert np.mean(np.array(p) <= level) == pytest.approx(level, abs=3 * (level * (1 - level) / 400) ** 0.5)


def test_p_of_a_clear_difference_is_small_and_never_0() -> None:
    assert sign_flips(np.random.default_rng(0).normal(1, 0.1, 50), resamples=999) == 1 / 1000
    assert sign_flips(np.zeros(20), resamples=999) == 1.0


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_errs_in_one_family_of_twenty() -> None:
    """A family of 30 true hypotheses has a p below 0.05 in 5 % of the cases, and not in 79 %."""
    p = np.random.default_rng(4).uniform(size=(2000, 30))
    assert np.mean([min(holm(family)) < 0.05 for family in p]) == pytest.approx(0.05, abs=0.015)


def test_no_values() -> None:
    with pytest.raises(ValueError, match="values: there are none"):
        bootstrap([])
