# SPDX-License-Identifier: Apache-2.0
"""The memory staircase: how many rows are stored while tokens arrive one after the other."""

from __future__ import annotations

from collections.abc import Iterator


def stored_rows(num_tokens: int, active: int, bin_tokens: int, rank: int) -> Iterator[int]:
    """Rows of the pipeline after each of T tokens.

    A token that finds the active cache full moves the least of it to the bin. A bin of ``bin_tokens`` becomes ``rank``
    synthetic rows, and empties: a fall by bin_tokens - rank. Synthetic rows stay, so each stair is ``rank`` higher than
    the one before: the rows are not bounded, they grow with rank / bin_tokens of the tokens.
    """
    kept, waiting, synthetic = 0, 0, 0
    for _ in range(num_tokens):
        if kept < active:
            kept += 1
        else:
            waiting += 1
        if waiting == bin_tokens:
            waiting, synthetic = 0, synthetic + rank
        yield kept + waiting + synthetic
