# SPDX-License-Identifier: Apache-2.0
"""refine, select, compact and append on the GPU: the tests of the stages' own files over the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import test_append
import test_compact
import test_refine
import test_select
from hubkv_trt import ops
from on_device import DEVICES_AND_RACES, on, taken_from

# Many examples, or large ones: test_cuda_prefill_large.py runs them without the race detector.
LARGE = ("test_equals_oracle_on_anything", "test_equals_oracle_with_ties", "test_large")
globals().update(taken_from(test_refine, test_select, test_compact, test_append, without=LARGE))
del test_refine, test_select, test_compact, test_append


@pytest.fixture(scope="module", params=DEVICES_AND_RACES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param


PARAMETERS = (5, 0.5, 0.5, 0.8, 1.2, 4)


@pytest.mark.parametrize(("window", "cut"), [(-1, 0), (-(2**31), 0), (101, 100), (2**31 - 1, 100)])
def test_a_window_outside_the_sequence_is_cut(window: int, cut: int) -> None:
    """Nothing on the host can refuse a value in device memory."""
    scores, alpha = torch.rand(2, 2, 100), torch.tensor([0.5])
    wrong, right = (
        ops.refine(scores, alpha, torch.tensor([w], dtype=torch.int32), *PARAMETERS)[0] for w in (window, cut)
    )
    assert torch.equal(wrong, right)


def test_an_alpha_that_is_no_number_is_no_fault() -> None:
    scores, window = torch.rand(1, 1, 100), torch.tensor([10], dtype=torch.int32)
    z, _ = ops.refine(scores, torch.tensor([torch.nan]), window, *PARAMETERS)
    assert np.array_equal(np.flatnonzero(np.isposinf(z[0, 0].numpy())), [0, 1, 2, 3, *range(90, 100)])
