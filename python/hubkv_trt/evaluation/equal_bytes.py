# SPDX-License-Identifier: Apache-2.0
"""What a method that leaves rows behind for evicted pairs may keep in the bytes of dropping them."""

from __future__ import annotations

from bisect import bisect_right

from ..config import EngineConfig, Evicted, HubKVConfig, budget, require
from ..runtime.ledger import Ledger


def ratio_at_equal_bytes(config: EngineConfig, hubkv: HubKVConfig, num_tokens: int, ratio: float) -> float:
    """The ratio at which ``hubkv`` stores no byte more than dropping does at r, padding counted.

    Where pairs are dropped it is r itself. Otherwise every row has a bias of 4 bytes, and it is the lowest such ratio.

    Args:
        config: gives model and dtype.
        hubkv: says what becomes of evicted pairs, in which scope and what is protected.
        num_tokens: T.
        ratio: r in [0, 1).

    Raises:
        ValueError: what is protected and the rows for evicted pairs take more than that.
    """
    if hubkv.evicted is Evicted.DROP:
        return ratio
    model, pairs = config.model, num_tokens * config.model.num_rows_per_token
    rows = budget(model, hubkv.replace(evicted=Evicted.DROP), num_tokens, ratio).num_rows
    limit = Ledger(model, config.dtype).segment_bytes(rows)
    ledger = Ledger(model, config.dtype, row_bias=True)
    most = bisect_right(range(rows), limit, key=ledger.segment_bytes) - 1
    for fewer in range(most, 0, -1):
        equal = (pairs - fewer) / pairs
        found = budget(model, hubkv, num_tokens, equal)  # a group's rows are rounded up, and some are its least
        if found.summaries_per_group and ledger.segment_bytes(found.num_rows) <= limit:
            return equal
    expected = f"one at which {num_tokens} tokens leave room for {hubkv.centroids} rows a head beside what is protected"
    require(False, "ratio", ratio, f"{expected}: lower it, or centroids")
    raise AssertionError
