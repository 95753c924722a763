# SPDX-License-Identifier: Apache-2.0
"""plan and attend on the GPU: the tests of the stages' own files over the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_attend
import test_plan
from on_device import DEVICES_AND_RACES, on, taken_from

# Many examples, or large ones: test_cuda_attend_large.py runs them without the race detector.
LARGE = (
    "test_equals_oracle_on_anything",
    "test_equals_oracle_however_rows_are_cut",
    "test_equals_oracle_for_every_group",
)
globals().update(taken_from(test_plan, test_attend, without=(*LARGE, "test_permuted_batch_and_threads_change_no_bit")))
del test_plan


@pytest.fixture(scope="module", params=DEVICES_AND_RACES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
