# SPDX-License-Identifier: Apache-2.0
"""The stages on another device, for callers that have CPU tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hubkv_trt import ops

STAGES = (
    "refine",
    "select",
    "compact",
    "compact_into",
    "plan",
    "attend",
    "append",
    "score_window",
    "held_out_loss",
    "calibrate_top_p",
    "select_ragged",
    "rewrite_into",
    "merge_into",
)
WRITTEN = {
    "compact_into": ("k_rows", "v_rows"),
    "append": ("arena",),
    "rewrite_into": ("k_rows", "v_rows", "positions", "row_bias"),
    "merge_into": ("k_rows", "v_rows", "positions", "row_bias"),
}


def _storage(x: Tensor) -> Tensor:
    """uint8 [bytes]: all of the memory that x is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


class Mover:
    """Copies tensors to a device with the whole memory they are parts of: strides, alignment, what lies around them,
    and which of them share memory, all belong to a test's case.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._moved: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        start = value.untyped_storage().data_ptr()
        if start not in self._moved:
            self._moved[start] = _storage(value).to(self._device, copy=True)
        memory, place = self._moved[start].untyped_storage(), (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype, device=self._device).set_(memory, *place)


def through(stage: Callable[..., Any], device: str, written: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The stage, which takes CPU tensors, computes on the device and gives CPU tensors. written: the arguments that it
    writes to.
    """

    def run(*arguments: Any, **keywords: Any) -> Any:
        given = inspect.signature(stage).bind(*arguments, **keywords).arguments
        move = Mover(device)
        moved = {name: move(value) for name, value in given.items()}
        results = stage(**moved)
        for name in (name for name in written if given[name] is not None):
            _storage(given[name]).copy_(_storage(moved[name]))
        return Mover("cpu")(results)

    return run


@contextlib.contextmanager
def computing_on(device: str) -> Iterator[None]:
    """The functions of ``hubkv_trt.ops`` take CPU tensors and compute on the device."""
    before = {name: getattr(ops, name) for name in STAGES}
    try:
        for name, stage in before.items():
            setattr(ops, name, through(stage, device, WRITTEN.get(name, ())))
        yield
    finally:
        for name, stage in before.items():
            setattr(ops, name, stage)
