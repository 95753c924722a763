# SPDX-License-Identifier: Apache-2.0
"""What a sequence holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(eq=False)
class Segment:
    """A compact segment in the arena; its tensors are views. Shared by ``references`` holders, freed with the last."""

    offset: int  # bytes
    num_bytes: int
    rows: int  # K
    k_rows: torch.Tensor  # [K, D]
    v_rows: torch.Tensor  # [K, D]
    head_offsets: torch.Tensor  # int64 [L*Hkv + 1]
    positions: torch.Tensor  # int32 [K]
    entry: tuple[int, int, int, int]  # its row of the table ``segments`` (include/hubkv/hubkv.h)
    row_bias: torch.Tensor | None = None  # float32 [K], where the ledger has one
    references: int = 1
    work: tuple[np.ndarray, np.ndarray] | None = None  # its own list of attend's work, for an executor that keeps it


@dataclass(eq=False)
class Tail:
    """The pages of one sequence's later tokens. ``reserved`` pages are promised to it, ``pages`` it has."""

    reserved: int
    pages: list[int] = field(default_factory=list)
