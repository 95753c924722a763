# SPDX-License-Identifier: Apache-2.0
"""Makes a stage the torch operator ``torch.ops.hubkv.NAME``: the signature of its function is the operator's schema."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("hubkv", "DEF")

# Annotations as they stand in the source. A size may be symbolic while a graph is traced.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
}
_RESULTS = {
    "Tensor": "Tensor",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor, Tensor)",
    "None": "()",
}


def _schema(stage: Callable[..., Any], writes: Sequence[str]) -> str:
    signature = inspect.signature(stage)
    parameters = []
    for name, parameter in signature.parameters.items():
        kind = _TYPES[parameter.annotation]
        if name in writes:
            kind = kind.replace("Tensor", f"Tensor({'abcd'[writes.index(name)]}!)")
        parameters.append(f"{kind} {name}")
    return f"{stage.__name__}({', '.join(parameters)}) -> {_RESULTS[signature.return_annotation]}"


def cuda_device(arguments: Sequence[Any]) -> torch.device:
    """Of the first tensor that is on one; tensors elsewhere are the stage's to refuse, by name."""
    for x in arguments:
        for tensor in x if isinstance(x, list | tuple) else (x,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                return tensor.device
    raise ValueError("no argument is a CUDA tensor")


def _on_device(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The stage with its tensors' CUDA device made the current one."""

    @functools.wraps(stage)
    def run(*arguments: Any) -> Any:
        with torch.cuda.device(cuda_device(arguments)):
            return stage(*arguments)

    return run


def operator(*writes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a stage: what it becomes calls the operator. ``writes`` names the tensors that it writes to; the stage
    itself, which takes CPU tensors or tensors of the current CUDA device, is ``__wrapped__``.
    """

    def register(stage: Callable[P, R]) -> Callable[P, R]:
        name = stage.__name__
        LIBRARY.define(_schema(stage, writes))
        LIBRARY.impl(name, stage, "CPU")
        LIBRARY.impl(name, _on_device(stage), "CUDA")
        overload = getattr(torch.ops.hubkv, name).default

        @functools.wraps(stage)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            result: R = overload(*arguments, **named)
            return result

        return call

    return register
