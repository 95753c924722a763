# SPDX-License-Identifier: Apache-2.0
"""refine: bit-equal to the oracle, and the properties that its formula promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt import HubKVConfig, ops, reference
from hubkv_trt.config import PRESETS

PARAMETERS = {
    "nms_kernel": 5,
    "penalty_factor": 0.5,
    "head_weight_temperature": 0.5,
    "min_head_weight": 0.8,
    "max_head_weight": 1.2,
    "sink_tokens": 4,
}


def both(scores: np.ndarray, alpha: float = 0.5, window: int = 0, **changes: float) -> np.ndarray:
    """What the library gives, after it was found equal to the oracle bit for bit."""
    arrays = (np.asarray(scores, np.float32), np.array([alpha], np.float32), np.array([window], np.int32))
    parameters = {**PARAMETERS, **changes}
    want, want_count = reference.refine(*arrays, **parameters)
    z, count = ops.refine(*map(torch.from_numpy, arrays), **parameters)
    assert z.shape == arrays[0].shape
    assert z.dtype == torch.float32
    different = np.flatnonzero(want.view(np.uint32).ravel() != z.numpy().view(np.uint32).ravel())
    assert len(different) == 0, f"{len(different)} of {want.size} differ, the first at {different[:4]}"
    assert count.tolist() == want_count.tolist()
    return z.numpy()


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 31, 127, 128, 129, 4095, 4096, 4097, 8192, 12345])
@pytest.mark.parametrize(
    "preset",
    [
        "fastkvzip",
        "fastkvzip_nms",
        "fastkvzip_head_nms_gated_k5_p0.5_mild",
        "fastkvzip_head_nms_gated_k5_p0.5_tiny",
        "fastkvzip_head_nms_gated_k7_p0.2_mild",
    ],
)
def test_equals_oracle(num_tokens: int, preset: str) -> None:
    config = HubKVConfig.from_preset(preset)
    parameters = {k: v for k, v in PRESETS[preset].items() if k in PARAMETERS}
    both(uniform(3, 2, num_tokens), config.alpha(0.75), config.window(num_tokens), **parameters)


@pytest.mark.parametrize(("layers", "heads", "num_tokens"), [(1, 1, 300), (40, 3, 257), (2, 1, 20_000), (1, 9, 5000)])
@pytest.mark.parametrize("kernel", [1, 3, 9, 11, 65, 127, 8191, 8193, 20_001, 2**31 - 1])
def test_equals_oracle_for_every_kernel(layers: int, heads: int, num_tokens: int, kernel: int) -> None:
    if kernel > 200 and layers * num_tokens > 6000:
        layers, num_tokens = 1, min(num_tokens, 9500)
    both(uniform(layers, heads, num_tokens), 1.0, 10, nms_kernel=kernel)


@pytest.mark.parametrize("temperature", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_equals_oracle_at_every_scale(temperature: float, scale: float) -> None:
    scores = uniform(2, 4, 700) * np.float32(scale) * uniform(2, 4, 1, seed=1)
    both(scores, 0.9, 20, head_weight_temperature=temperature)
    both(-scores, 0.9, 20, head_weight_temperature=temperature)
    both(scores - np.float32(scale / 2), 0.9, 20, head_weight_temperature=temperature)


def test_other_temperatures_are_close() -> None:
    scores = uniform(2, 4, 500) ** 3
    parameters = {**PARAMETERS, "head_weight_temperature": 1.3, "min_head_weight": 0.1, "max_head_weight": 9.0}
    arrays = (scores, np.array([0.7], np.float32), np.array([9], np.int32))
    z, _ = ops.refine(*map(torch.from_numpy, arrays), **parameters)
    np.testing.assert_allclose(z.numpy(), reference.refine(*arrays, **parameters)[0], rtol=3e-7)


def test_all_scores_equal() -> None:
    z = both(np.full((2, 3, 100), 0.25, np.float32), 0.5)
    # All are hubs, no head varies: every weight is 1 and nothing changes.
    assert np.all(z[:, :, 4:] == 0.25)


def test_alpha_0_changes_nothing_but_the_protected() -> None:
    scores = uniform(2, 2, 500)
    scores[0, 0, 100:110] = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 3e38, -3e38]
    z = both(scores, 0.0, 50)
    assert np.all(np.isposinf(z[:, :, :4]))
    assert np.all(np.isposinf(z[:, :, -50:]))
    assert np.array_equal(z[:, :, 4:-50].view(np.uint32), scores[:, :, 4:-50].view(np.uint32))


@pytest.mark.parametrize("alpha", [0.0, 1e-7, 0.3, np.nextafter(np.float32(1), np.float32(0)), 1.0])
def test_scores_that_are_not_finite(alpha: float) -> None:
    rng = np.random.default_rng(3)
    scores = uniform(3, 2, 5000)
    for value in (np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38, -3e38):
        scores.ravel()[rng.integers(0, scores.size, 500)] = value
    scores[1, 0] = np.nan
    scores[2, 1, 4:4900] = -np.inf
    z = both(scores, alpha, 100)
    inner, before = z[:, :, 4:-100], scores[:, :, 4:-100]
    broken = ~np.isfinite(before)
    assert np.array_equal(inner.view(np.uint32)[broken], before.view(np.uint32)[broken])


@pytest.mark.parametrize(
    ("sinks", "window"),
    [(0, 0), (1, 0), (0, 1), (4, 96), (50, 50), (60, 60), (100, 0), (0, 100), (500, 3), (2, 2**31 - 1), (2**31 - 1, 2)],
)
def test_protected_positions_are_infinite(sinks: int, window: int) -> None:
    z = both(uniform(2, 2, 100), 0.8, window, sink_tokens=sinks)
    expected = np.zeros(100, bool)
    expected[: min(sinks, 100)] = True
    expected[max(0, 100 - window) :] = True
    assert np.array_equal(np.isposinf(z), np.broadcast_to(expected, z.shape))


def test_hubs_keep_what_their_neighbours_lose() -> None:
    scores = np.full((1, 1, 20), 0.1, np.float32)
    scores[0, 0, 10] = 0.8
    z = both(scores, 1.0, 0, head_weight_temperature=0.0, sink_tokens=0)[0, 0]
    assert z[10] == np.float32(0.8)
    assert np.all(z[[8, 9, 11, 12]] == np.float32(0.1) * np.float32(0.5))
    assert np.all(z[[0, 5, 7, 13, 19]] == np.float32(0.1))


def test_heads_that_vary_more_weigh_more() -> None:
    rng = np.random.default_rng(0)
    flat, peaked = rng.uniform(0.49, 0.51, 1000), rng.uniform(0, 1, 1000)
    z = both(np.stack([flat, peaked])[None].astype(np.float32), 1.0, 0, nms_kernel=1, sink_tokens=0)
    ratio = z[0] / np.stack([flat, peaked]).astype(np.float32)
    assert np.allclose(ratio[0], 0.8)  # its weight meets the lower bound, the other the upper
    assert np.allclose(ratio[1], 1.2)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("kernel", [5, 77])
def test_any_alignment(offset: int, kernel: int) -> None:
    """Scores that begin between the boundaries of vectors; the result does not."""
    memory = torch.from_numpy(uniform(offset + 2 * 2 * 5001))
    scores = memory[offset:].view(2, 2, 5001)
    alpha, window = torch.tensor([0.4]), torch.tensor([33], dtype=torch.int32)
    z, _ = ops.refine(scores, alpha, window, **{**PARAMETERS, "nms_kernel": kernel})
    assert np.array_equal(z.numpy(), both(scores.numpy(), 0.4, 33, nms_kernel=kernel))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_thread_count_changes_nothing(threads: int) -> None:
    before = ops.num_threads()
    try:
        ops.set_num_threads(threads)
        both(uniform(5, 3, 9000), 0.6, 180)
        both(uniform(1, 1, 100_000), 0.6, 180)
    finally:
        ops.set_num_threads(before)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)),
    kernel=st.sampled_from([1, 3, 5, 7, 21]),
    alpha=st.floats(0, 1, width=32),
    gamma=st.floats(0, 1, width=32),
    tau=st.sampled_from([0.0, 0.25, 0.5]),
    sinks=st.integers(0, 6),
    window=st.integers(0, 45),
)
def test_equals_oracle_on_anything(data, shape, kernel, alpha, gamma, tau, sinks, window) -> None:
    size = math.prod(shape)
    values = data.draw(st.lists(st.floats(width=32), min_size=size, max_size=size))
    both(
        np.array(values, np.float32).reshape(shape),
        alpha,
        window,
        nms_kernel=kernel,
        penalty_factor=gamma,
        head_weight_temperature=tau,
        sink_tokens=sinks,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nms_kernel": 4}, "nmsKernel: 4"),
        ({"nms_kernel": -1}, "nmsKernel: -1"),
        ({"nms_kernel": 0}, "nmsKernel: 0"),
        ({"penalty_factor": 1.5}, "penaltyFactor: 1.5"),
        ({"penalty_factor": float("nan")}, "penaltyFactor: nan"),
        ({"head_weight_temperature": -0.5}, "headWeightTemperature: -0.5"),
        ({"min_head_weight": 0.0}, "minHeadWeight: 0"),
        ({"max_head_weight": 0.5}, "maxHeadWeight: 0.5"),
        ({"sink_tokens": -1}, "sinkTokens: -1"),
        ({"sink_tokens": 2**31}, "sink_tokens: 2147483648"),
        ({"nms_kernel": 2**32 + 5}, "nms_kernel: 4294967301"),
    ],
)
def test_refuses_parameters(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.refine(torch.rand(1, 1, 8), torch.ones(1), torch.zeros(1, dtype=torch.int32), **{**PARAMETERS, **changes})


@pytest.mark.parametrize(
    ("scores", "alpha", "window", "message"),
    [
        (torch.rand(2, 8), torch.ones(1), torch.zeros(1, dtype=torch.int32), r"scores: shape \[2, 8\]"),
        (torch.rand(1, 2, 8).half(), torch.ones(1), torch.zeros(1, dtype=torch.int32), "scores: dtype torch.float16"),
        (torch.rand(1, 8, 2).mT, torch.ones(1), torch.zeros(1, dtype=torch.int32), "scores: strides"),
        (torch.rand(1, 2, 0), torch.ones(1), torch.zeros(1, dtype=torch.int32), "T: 0"),
        (torch.rand(0, 2, 8), torch.ones(1), torch.zeros(1, dtype=torch.int32), "L: 0"),
        (torch.rand(1, 2, 8), torch.ones(1).double(), torch.zeros(1, dtype=torch.int32), "alpha: dtype torch.float64"),
        (torch.rand(1, 2, 8), torch.ones(2), torch.zeros(1, dtype=torch.int32), r"alpha: shape \[2\]"),
        (torch.rand(1, 2, 8), torch.full((1,), 1.5), torch.zeros(1, dtype=torch.int32), "alpha: 1.5"),
        (torch.rand(1, 2, 8), torch.full((1,), torch.nan), torch.zeros(1, dtype=torch.int32), "alpha: nan"),
        (torch.rand(1, 2, 8), torch.ones(1), torch.zeros(1), "window: dtype torch.float32"),
        (torch.rand(1, 2, 8), torch.ones(1), torch.full((1,), -3, dtype=torch.int32), "window: -3"),
    ],
)
def test_refuses_tensors(scores, alpha, window, message) -> None:
    with pytest.raises(ValueError, match=message):
        ops.refine(scores, alpha, window, **PARAMETERS)
