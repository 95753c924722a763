# SPDX-License-Identifier: Apache-2.0
"""Values of the host, and rows, on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def on_device(device: torch.device, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The values on the device; the host does not wait for the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def take_rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """x[rows]; ``rows`` ascends."""
    return x if len(rows) == x.shape[0] else x.index_select(0, on_device(x.device, rows, torch.int64))


def set_rows(x: torch.Tensor, rows: list[int], values: torch.Tensor) -> None:
    """x[rows] = values; ``rows`` ascends."""
    if len(rows) == x.shape[0]:
        x.copy_(values)
    else:
        x.index_copy_(0, on_device(x.device, rows, torch.int64), values)
