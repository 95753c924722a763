# SPDX-License-Identifier: Apache-2.0
"""Matrix products on the CPU with weights that oneDNN has laid out beforehand.

torch's ``F.linear`` takes a plain row-major weight and brings it into blocks within every call; with a few tokens that
is most of the work. A packed weight is laid out once, in the same number of bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_ROWS = 4


def pack_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as ``EagerOps`` runs them fastest: matrices of linear layers packed where the CPU can do it.

    ``embedding.weight`` stays as it is (rows are read from it), and so does everything on CUDA. A packed tensor can
    only be multiplied by (``linear``), not read; an embedding that is the output layer too therefore gets a packed
    copy, ``lm_head.weight`` (three times as fast as the plain table where measured).

    Args:
        weights: by name; packed ones stay as they are. Emptied on the way, so that plain and packed weights need not
            fit in memory together; a caller who holds the tensors elsewhere keeps both.

    Returns:
        The same names, and ``lm_head.weight`` where the embedding is packed a second time.
    """
    packed: dict[str, Tensor] = {}
    if "embedding.weight" in weights and "lm_head.weight" not in weights and _can_pack(weights["embedding.weight"]):
        packed["lm_head.weight"] = _ops().pack(weights["embedding.weight"], None)
    for name in list(weights):
        weight = weights.pop(name)
        packed[name] = _ops().pack(weight, None) if name != "embedding.weight" and _can_pack(weight) else weight
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, In], plain or packed [Out, In], [Out] -> [N, Out].

    With a packed weight the bits of a row do not depend on how many other rows there are, so that a request gives the
    same alone and in a batch: a product of one row sums in another order, so that few rows are run as four (which also
    takes less time than one row where it was measured).
    """
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if rows < _LEAST_ROWS:
        x = x.expand(_LEAST_ROWS, -1) if rows == 1 else F.pad(x, (0, 0, 0, _LEAST_ROWS - rows))
    out: Tensor = _ops().multiply(x, weight, bias, "none", [], "")
    return out[:rows]


class _OneDNN:
    """torch's operators over oneDNN, which its compiler uses too."""

    def __init__(self) -> None:
        self.pack: Any = torch.ops.mkldnn._reorder_linear_weight.default
        self.multiply: Any = torch.ops.mkldnn._linear_pointwise.default


_found: _OneDNN | None = None


def _ops() -> _OneDNN:
    global _found  # noqa: PLW0603 (looked up once, as every decode step calls it a hundred times)
    if _found is None:
        _found = _OneDNN()
    return _found


def _can_pack(weight: Tensor) -> bool:
    return weight.ndim == 2 and weight.device.type == "cpu" and not weight.is_mkldnn and _packs(weight.dtype)


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether this torch, on this CPU, packs the dtype and multiplies right by it."""
    x, weight = torch.eye(16, dtype=dtype), torch.arange(256, dtype=dtype).reshape(16, 16)
    try:
        with torch.inference_mode():
            return torch.equal(linear(x, _ops().pack(weight, None)), weight.t())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
