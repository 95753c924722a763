# SPDX-License-Identifier: Apache-2.0
"""select by a stable sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def select(
    refined: NDArray[np.float32], num_groups: int, rows_per_group: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The K largest of each group of heads; of equal values (-0 equals +0, NaN ranks as -inf) the lower flat index.

    Args:
        refined: float32 [L, Hkv, T].
        num_groups: S, divides L*Hkv.
        rows_per_group: K.

    Returns:
        positions int32 [S*K] and head_offsets int64 [L*Hkv + 1].
    """
    num_tokens = refined.shape[2]
    groups = np.where(np.isnan(refined), -np.inf, refined.astype(np.float64)).reshape(num_groups, -1)
    kept = np.zeros(groups.shape, bool)
    for group, values in enumerate(groups):
        kept[group, np.argsort(-values, kind="stable")[:rows_per_group]] = True
    heads, positions = np.nonzero(kept.reshape(-1, num_tokens))
    counts = np.bincount(heads, minlength=kept.size // num_tokens)
    return positions.astype(np.int32), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
