# SPDX-License-Identifier: Apache-2.0
"""Many examples for plan and attend on the GPU: as test_cuda_attend.py, without race detection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_attend
import test_plan
from on_device import DEVICES, on

test_plan_anything = test_plan.test_equals_oracle_on_anything
test_attend_anything = test_attend.test_equals_oracle_on_anything
test_attend_cuts = test_attend.test_equals_oracle_however_rows_are_cut
test_attend_groups = test_attend.test_equals_oracle_for_every_group
del test_attend, test_plan


@pytest.fixture(scope="module", params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
