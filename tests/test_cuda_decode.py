# SPDX-License-Identifier: Apache-2.0
"""The stages that compress while decoding, on the GPU: the tests of the stages' own files over the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_calibrate_top_p
import test_held_out_loss
import test_merge
import test_rewrite
import test_score_window
import test_select_ragged
from on_device import DEVICES_AND_RACES, on, taken_from

# Many examples, or large ones: test_cuda_decode_large.py runs them without the race detector.
LARGE = ("test_equals_oracle_on_anything", "test_equals_oracle_on_logits", "test_large", "test_large_with_ties")
STAGES = (test_score_window, test_held_out_loss, test_calibrate_top_p, test_select_ragged, test_rewrite, test_merge)
globals().update(taken_from(*STAGES, without=(*LARGE, "test_refuses")))
del test_score_window, test_held_out_loss, test_calibrate_top_p, test_select_ragged, test_rewrite, test_merge, STAGES


@pytest.fixture(scope="module", params=DEVICES_AND_RACES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
