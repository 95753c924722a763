# SPDX-License-Identifier: Apache-2.0
"""TensorRT's own network builder for tests: TensorRT-RTX, which builds engines on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorrt_rtx_bindings as trt
import torch
from torch import Tensor

from hubkv_trt.engine.network import Network
from hubkv_trt.engine.profiles import Range, add_profiles

from .evaluate import evaluate
from .values import TYPES

DATA_TYPES = {dtype: trt.DataType.__members__[name] for name, dtype in TYPES.items()}
"""``trt.DataType`` of a torch type."""


class _Log(trt.ILogger):
    """Keeps what is at least a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.WARNING:
            self.messages.append(f"{severity.name}: {message}")


LOG = _Log()
"""The only one: while a builder lives, TensorRT warns of another and does not use it."""


class Builder:
    """A builder of the process's log."""

    def __init__(self) -> None:
        self._before = len(LOG.messages)
        self.builder = trt.Builder(LOG)

    @property
    def messages(self) -> list[str]:
        """Warnings and errors since this object was made."""
        return LOG.messages[self._before :]

    def network(self) -> Any:
        """An empty network, strongly typed."""
        return self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def plan(self, network: Network, profiles: list[dict[str, Range]], *targets: str) -> bytes:
        """The serialized engine of a network for GPUs of these compute capabilities, ``SM89``."""
        settings = self.builder.create_builder_config()
        settings.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            settings.set_compute_capability(trt.ComputeCapability.__members__[target], i)
        add_profiles(self.builder, settings, network.bindings, profiles)
        plan = self.builder.build_serialized_network(network.definition, settings)
        assert plan is not None, self.messages
        return bytes(plan)


def run(
    add: Callable[..., Any], *inputs: Tensor, shapes: Sequence[tuple[int, ...]] = (), exact: bool = False
) -> Tensor:
    """The output of a layer, by evaluation: ``add(network, *tensors)`` adds it and returns it.

    Args:
        add: may add others before.
        inputs: their values.
        shapes: of the input tensors; without, every dimension is dynamic.
        exact: as of ``evaluate``.
    """
    builder = Builder()
    network = builder.network()
    shapes = shapes or [(-1,) * x.ndim for x in inputs]
    tensors = [network.add_input(f"x{i}", DATA_TYPES[x.dtype], shapes[i]) for i, x in enumerate(inputs)]
    output = add(network, *tensors).get_output(0)
    output.name = "y"
    network.mark_output(output)
    values = {f"x{i}": x if exact or not x.is_floating_point() else x.float() for i, x in enumerate(inputs)}
    y = evaluate(trt, network, values, exact=exact)["y"]
    assert builder.messages == []
    return y


def random(*shape: int, seed: int = 0) -> Tensor:
    """float32, normal."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
