# SPDX-License-Identifier: Apache-2.0
"""Many examples, and large ones, for the decoding stages on the GPU: as test_cuda_decode.py, without race detection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import test_calibrate_top_p
import test_held_out_loss
import test_merge
import test_rewrite
import test_score_window
import test_select_ragged
from on_device import DEVICES, on

test_score_window_anything = test_score_window.test_equals_oracle_on_anything
test_held_out_loss_anything = test_held_out_loss.test_equals_oracle_on_anything
test_calibrate_top_p_anything = test_calibrate_top_p.test_equals_oracle_on_anything
test_calibrate_top_p_logits = test_calibrate_top_p.test_equals_oracle_on_logits
test_select_ragged_anything = test_select_ragged.test_equals_oracle_on_anything
test_select_ragged_large = test_select_ragged.test_large_with_ties
test_rewrite_large = test_rewrite.test_large
test_merge_anything = test_merge.test_equals_oracle_on_anything
del test_calibrate_top_p, test_held_out_loss, test_merge, test_rewrite, test_score_window, test_select_ragged


@pytest.fixture(scope="module", params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param
