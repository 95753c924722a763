# SPDX-License-Identifier: Apache-2.0
"""Large inputs and many examples for refine and select on the GPU: as test_cuda_prefill.py, without race detection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_refine
import test_select
from on_device import DEVICES, on

test_refine_anything = test_refine.test_equals_oracle_on_anything
test_select_anything = test_select.test_equals_oracle_on_anything
test_select_ties = test_select.test_equals_oracle_with_ties
test_select_large = test_select.test_large
del test_refine, test_select


@pytest.fixture(scope="module", params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
