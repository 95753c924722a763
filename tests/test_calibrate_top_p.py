# SPDX-License-Identifier: Apache-2.0
"""calibrate_top_p: the counts, temperatures and probabilities of the oracle, bit for bit, and what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import ops, reference
from hubkv_trt.reference.calibrate_top_p import exp
from test_select import VALUES
from test_select_ragged import offsets_of

DEFAULTS = {"num_layers": 1, "p": 0.9, "sink_tokens": 0, "min_rows": 0, "max_rows": 0, "layer_rows": 0, "fill": False}


def both(raw, transformed, sizes, places=None, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the library gives, after it was found equal to the oracle."""
    places = np.concatenate([np.arange(size) for size in sizes]) if places is None else places
    arrays = (*(np.asarray(x, np.float32) for x in (raw, transformed)), places.astype(np.int32), offsets_of(sizes))
    parameters = tuple((DEFAULTS | options).values())
    got = [x.numpy() for x in ops.calibrate_top_p(*map(torch.from_numpy, arrays), *parameters)]
    want = reference.calibrate_top_p(*arrays, *parameters)
    for name, x, y in zip(("counts", "temperature", "calibrated"), got, want, strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(x, y), (name, x, y)
    return tuple(got)


def logits(sizes: list[int], seed: int = 0, spread: float = 2.0) -> np.ndarray:
    """Normalised as score_window gives them."""
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(size) * spread for size in sizes]
    return np.concatenate([x - np.log(np.exp(x).sum()) if len(x) else x for x in parts]).astype(np.float32)


def pooled(raw: np.ndarray, sizes: list[int], kernel: int) -> np.ndarray:
    parts = np.split(raw, np.cumsum(sizes)[:-1])
    none = np.zeros(0, bool)
    return np.concatenate([reference_pool(part, kernel) if len(part) else none for part in parts]).astype(np.float32)


def reference_pool(x: np.ndarray, kernel: int) -> np.ndarray:
    reach = kernel // 2
    return np.array([x[max(0, i - reach) : i + reach + 1].max() for i in range(len(x))])


SIZES = [700, 33, 1, 0, 257, 256, 1024, 5]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(lambda x: len(x) % 2 == 0))
def test_equals_oracle_on_anything(data: st.DataObject, sizes: list[int]) -> None:
    total = sum(sizes)
    raw, transformed = (data.draw(st.lists(VALUES, min_size=total, max_size=total)) for _ in range(2))
    places = np.array(data.draw(st.lists(st.integers(0, 20), min_size=total, max_size=total)), np.int32)
    layer_rows = data.draw(st.integers(0, total))
    both(
        raw,
        transformed,
        sizes,
        places,
        num_layers=2,
        p=data.draw(st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.999, 1.0])),
        sink_tokens=data.draw(st.integers(0, 5)),
        min_rows=data.draw(st.integers(0, 4)),
        max_rows=data.draw(st.integers(0, 9)),
        layer_rows=layer_rows,
        fill=layer_rows > 0 and data.draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0.01, 20),
    digits=st.sampled_from([1, 2, 7]),
    p=st.floats(0.05, 0.999),
    kernel=st.sampled_from([1, 5, 7]),
    layer_rows=st.sampled_from([0, 10, 300, 1500]),
    fill=st.booleans(),
)
def test_equals_oracle_on_logits(seed, spread, digits, p, kernel, layer_rows, fill) -> None:
    raw = logits(SIZES, seed, spread).round(digits)
    options = {"num_layers": 2, "p": p, "sink_tokens": 4, "min_rows": 3, "max_rows": 500, "layer_rows": layer_rows}
    both(raw, pooled(raw, SIZES, kernel), SIZES, **options, fill=fill and layer_rows > 0)


def test_exponential() -> None:
    """The function of weights is exp to a few units in the last place, which a weight of 31 bits does not see."""
    x = np.concatenate([-np.random.default_rng(0).uniform(0, 40, 10_000), [0.0, -40.0, -1e-300]])
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-15)


@pytest.mark.parametrize("p", [0.3, 0.9, 0.99])
def test_top_p_of_raw_logits(p: float) -> None:
    """transformed = raw: temperature 1, and the least number of candidates whose softmax sums to p."""
    raw = logits([2000, 500, 50], spread=3)
    counts, temperature, calibrated = both(raw, raw, [2000, 500, 50], p=p)
    assert temperature.tolist() == [1, 1, 1]
    for part, count, given_part in zip(
        np.split(raw, [2000, 2500]), counts, np.split(calibrated, [2000, 2500]), strict=True
    ):
        share = np.sort(np.exp(part.astype(np.float64)))[::-1]
        assert share[:count].sum() >= p - 1e-6
        assert share[: count - 1].sum() < p + 1e-6
        np.testing.assert_allclose(given_part, np.exp(part), atol=1e-6)


@pytest.mark.parametrize(("spread", "p"), [(1.0, 0.9), (3.0, 0.9), (8.0, 0.9), (3.0, 0.99)])
def test_calibration_undoes_the_collapse(spread: float, p: float) -> None:
    """Logits that are flattened, sharpened or shifted, and in the same order: uncalibrated top-p keeps another number
    of them; calibrated as many, a hundredth of the mass aside, or a tenth of what p drops where that is less.
    """
    raw = logits([3000], spread=spread)
    (count,), _, _ = both(raw, raw, [3000], p=p)
    slack = min(0.02, 0.2 * (1 - p))
    for transformed in (raw / 4, raw * 4, raw / 2 + 100):
        (collapsed,), _, _ = both(transformed, transformed, [3000], p=p)
        (calibrated,), (temperature,), _ = both(raw, transformed, [3000], p=p)
        share = np.sort(np.exp(raw.astype(np.float64)))[::-1].cumsum()
        assert abs(calibrated - count) <= np.count_nonzero(abs(share - p) <= slack) + 1
        assert abs(calibrated - count) < abs(collapsed - count)
        scale = (transformed[1] - transformed[0]) / (raw[1] - raw[0])
        assert 0.5 * scale < temperature < 2 * scale


def test_pooling_keeps_more_and_calibration_fewer() -> None:
    raw = logits([4000], spread=3)
    transformed = pooled(raw, [4000], 7)
    (wanted,), _, _ = both(raw, raw, [4000])
    (collapsed,), _, _ = both(transformed, transformed, [4000])
    (calibrated,), (temperature,), _ = both(raw, transformed, [4000])
    assert collapsed > 2 * wanted
    assert calibrated <= wanted
    assert temperature < 1


def test_mass_that_no_temperature_gives() -> None:
    """One candidate holds it all, but shares its pooled value with its neighbours: top-p of those."""
    raw = np.full(200, -30, np.float32)
    raw[100] = 0
    (count,), (temperature,), _ = both(raw, pooled(raw, [200], 7), [200])
    assert count == 7
    assert temperature == np.float32(2.0**-10)


def test_everything_is_kept_at_p_1() -> None:
    raw = logits(SIZES, spread=20)
    counts, temperature, _ = both(raw, pooled(raw, SIZES, 7), SIZES, p=1.0)
    assert counts.tolist() == SIZES
    assert set(temperature.tolist()) == {1.0}


def test_protected_candidates_come_first_with_their_mass() -> None:
    raw = np.log(np.array([0.5, 0.3, 0.15, 0.03, 0.02], np.float32))
    assert both(raw, raw, [5], p=0.9)[0].tolist() == [3]
    assert both(raw, raw, [5], np.array([9, 9, 9, 0, 1]), p=0.9, sink_tokens=4)[0].tolist() == [5]
    assert both(raw, raw, [5], np.array([0, 1, 9, 9, 9]), p=0.7, sink_tokens=4)[0].tolist() == [2]
    assert both(raw, raw, [5], np.array([0, 1, 2, 3, 9]), p=0.7, sink_tokens=4, max_rows=1)[0].tolist() == [4]


def test_bounds_of_a_head() -> None:
    raw = logits([300, 300, 2], spread=3)
    counts, _, _ = both(raw, raw, [300, 300, 2], p=0.01, min_rows=20)
    assert counts.tolist() == [20, 20, 2]
    counts, _, _ = both(raw, raw, [300, 300, 2], p=0.999, max_rows=20)
    assert counts.tolist() == [20, 20, 2]


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("layer_rows", [1, 50, 300, 600])
def test_budget_of_a_layer(layer_rows: int, fill: bool) -> None:
    """Exactly met where there is more, and no other choice within the budget has more calibrated mass."""
    sizes = [400, 400, 400, 100]
    raw = np.concatenate([logits([size], seed, 1.0 + seed) for seed, size in enumerate(sizes)])
    free, _, _ = both(raw, raw, sizes, p=0.9)
    counts, _, calibrated = both(raw, raw, sizes, p=0.9, layer_rows=layer_rows, fill=fill)
    assert counts.sum() == min(layer_rows, 10**9 if fill else free.sum())
    if fill:
        best = np.sort(calibrated)[::-1][:layer_rows].astype(np.float64).sum()
        parts = np.split(calibrated, np.cumsum(sizes)[:-1])
        kept = sum(
            np.sort(part)[::-1][:count].astype(np.float64).sum() for part, count in zip(parts, counts, strict=True)
        )
        assert kept == pytest.approx(best, rel=1e-9)
    else:
        assert np.all(counts <= free)


def test_budget_of_each_layer_alone() -> None:
    raw = logits([200] * 6, spread=1)
    counts, _, _ = both(raw, raw, [200] * 6, num_layers=3, p=0.95, layer_rows=100, min_rows=20)
    assert counts.reshape(3, 2).sum(axis=1).tolist() == [100, 100, 100]
    counts, _, _ = both(raw, raw, [200] * 6, num_layers=3, p=0.95, layer_rows=10, min_rows=20)
    assert counts.tolist() == [20] * 6


def test_equal_shares_go_to_the_lower_head() -> None:
    raw = np.full(30, -math.log(10), np.float32)
    assert both(raw, raw, [10, 10, 10], layer_rows=13)[0].tolist() == [9, 4, 0]


@pytest.mark.parametrize("value", [0.5, np.inf, -np.inf, np.nan, 3e38])
def test_equal_values(value: float) -> None:
    counts, _, calibrated = both([value] * 50, [value] * 50, [50])
    assert counts.tolist() == [0 if np.isnan(value) or value == -np.inf else 45]
    assert np.all(np.isfinite(calibrated))


@pytest.mark.parametrize("offsets", [[0, 9, 6], [-5, 3, 6], [2**62, -(2**62), 6], [6, 6, 6], [3, 0, 2**63 - 1]])
def test_wrong_offsets_stay_inside(offsets: list[int]) -> None:
    raw = torch.rand(6)
    places = torch.arange(6, dtype=torch.int32)
    counts, _, _ = ops.calibrate_top_p(raw, raw, places, torch.tensor(offsets), 1, 0.9, 2, 1, 0, 4, False)
    assert bool(((counts >= 0) & (counts <= 6)).all())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(threads: int) -> None:
    raw = logits(SIZES)
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        both(raw, pooled(raw, SIZES, 5), SIZES, num_layers=4, layer_rows=100, sink_tokens=4)
    finally:
        ops.set_num_threads(before)


RAW, PLACES, OFFSETS = torch.rand(6), torch.arange(6, dtype=torch.int32), torch.tensor([0, 3, 6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: RAW.double()}, "raw: dtype torch.float64"),
        ({0: RAW.view(2, 3)}, r"raw: shape \[2, 3\]"),
        ({1: RAW[:5]}, r"transformed: shape \[5\]"),
        ({2: PLACES[:5]}, r"candidate_positions: shape \[5\]"),
        ({3: OFFSETS.int()}, "candidate_offsets: dtype torch.int32"),
        ({3: OFFSETS[:1]}, r"candidate_offsets: shape \[1\]"),
        ({4: 3}, "num_layers: 3 does not divide the 2 heads"),
        ({4: 0}, "num_layers: 0"),
        ({5: 0.0}, "p: 0 is not in"),
        ({5: 1.01}, "p: 1.01"),
        ({5: float("nan")}, "p: nan"),
        ({6: -1}, "sinkTokens: -1"),
        ({7: -1}, "minRows: -1"),
        ({8: -1}, "maxRows: -1"),
        ({9: -1}, "layerRows: -1"),
        ({9: 2**31}, "layerRows: 2147483648"),
        ({10: True}, "layerRows: 0, but fill"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    arguments = [RAW, RAW, PLACES, OFFSETS, 1, 0.9, 0, 0, 0, 0, False]
    for index, value in changes.items():
        arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.calibrate_top_p(*arguments)
