# SPDX-License-Identifier: Apache-2.0
"""How heads share rows, given what each loses by keeping fewer (``ops.held_out_loss``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BISECTIONS = 48
_PRICES = (2.0**-80, 2.0)  # at the second no row is worth it: losses are at most 1


def share_rows(
    loss: NDArray[np.float32],
    rows: NDArray[np.int32],
    total: int,
    least: NDArray[np.int64],
    most: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Rows of each head, int64 [H], ``total`` of them together, so that the sum of the heads' losses is least.

    Every row has the same price, and a head takes the rows of the level where loss and price together are least; the
    price at which ``total`` rows are taken is found by bisection. What is left between two prices goes to the heads
    that would take it at the lower one, in proportion.

    Args:
        loss: [H, levels + 1], falls along a row.
        rows: [H, levels + 1], grows along a row.
        total: rows to share. Where all heads together hold fewer, or must keep more, that many.
        least: [H], rows that a head keeps at least.
        most: [H], rows that a head keeps at most; ``least`` counts for more.
    """
    most = np.maximum(least, most)
    if most.sum() <= total:
        return most
    # A level out of bounds counts as the last one within: it costs what that costs and saves no more.
    first, last = (np.maximum((rows <= bound[:, None]).sum(axis=1) - 1, 0)[:, None] for bound in (least, most))
    level = np.clip(np.arange(rows.shape[1]), first, last)
    losses = np.take_along_axis(loss, level, axis=1).astype(np.float64)
    sizes = np.clip(np.take_along_axis(rows, level, axis=1).astype(np.int64), least[:, None], most[:, None])

    def taken(price: float) -> NDArray[np.int64]:
        best = np.argmin(losses + price * sizes, axis=1, keepdims=True)
        return np.take_along_axis(sizes, best, axis=1)[:, 0]

    low, high = _PRICES
    many, few = most, taken(high)
    for _ in range(_BISECTIONS):
        if few.sum() == total:
            break
        price = (low * high) ** 0.5
        found = taken(price)
        if found.sum() > total:
            low, many = price, found
        else:
            high, few = price, found
    extra, left = np.maximum(many - few, 0), max(0, total - int(few.sum()))
    given = extra * min(left, int(extra.sum())) // max(1, int(extra.sum()))
    given[np.flatnonzero(given < extra)[: left - int(given.sum())]] += 1  # what rounding down left
    return few + given


def rows_for_mass(loss: NDArray[np.float32], rows: NDArray[np.int32], p: float) -> NDArray[np.int64]:
    """The least rows of each head, int64 [H], with which the root of its loss is at most 1 - p: what is lost is that
    share of attention, in the root mean square over the queries. p = 1: all rows."""
    if p == 1:
        return rows[:, -1].astype(np.int64)
    level = np.argmax(loss <= (1 - p) ** 2, axis=1)[:, None]  # the last is 0
    return np.take_along_axis(rows, level, axis=1)[:, 0].astype(np.int64)
