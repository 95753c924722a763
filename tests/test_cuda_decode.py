# SPDX-License-Identifier: Apache-2.0
"""score_window, calibrate_top_p, select_ragged and rewrite on the GPU: the tests of the stages' own files over the CUDA
kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_calibrate_top_p
import test_rewrite
import test_score_window
import test_select_ragged
from on_device import DEVICES_AND_RACES, on, taken_from

# Many examples, or large ones: test_cuda_decode_large.py runs them without the race detector.
LARGE = ("test_equals_oracle_on_anything", "test_equals_oracle_on_logits", "test_large", "test_large_with_ties")
STAGES = (test_score_window, test_calibrate_top_p, test_select_ragged, test_rewrite)
globals().update(taken_from(*STAGES, without=(*LARGE, "test_refuses")))
del test_score_window, test_calibrate_top_p, test_select_ragged, test_rewrite, STAGES


@pytest.fixture(scope="module", params=DEVICES_AND_RACES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
