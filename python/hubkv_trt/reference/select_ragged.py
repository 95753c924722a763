# SPDX-License-Identifier: Apache-2.0
"""select_ragged by sorting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .candidates import ranking


def select_ragged(
    scores: NDArray[np.float32],
    candidate_positions: NDArray[np.int32],
    candidate_offsets: NDArray[np.int64],
    counts: NDArray[np.int32],
    num_rows: int,
    sink_tokens: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """indices int32 [K] and head_offsets int64 [H + 1]; as ``ops.select_ragged``, for right offsets."""
    indices = np.full(num_rows, -1, np.int32)
    head_offsets = np.zeros(len(candidate_offsets), np.int64)
    for head, count in enumerate(counts):
        entries = slice(int(candidate_offsets[head]), int(candidate_offsets[head + 1]))
        order = ranking(scores[entries], candidate_positions[entries] < sink_tokens)
        begin = head_offsets[head]
        kept = order[: min(max(int(count), 0), num_rows - int(begin))]
        head_offsets[head + 1] = begin + len(kept)
        indices[begin : head_offsets[head + 1]] = np.sort(kept)
    return indices, head_offsets
