# SPDX-License-Identifier: Apache-2.0
"""TensorRT networks by evaluation, beside the eager backend."""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt_rtx_bindings as trt
import torch
from torch import Tensor

from hubkv_trt.config import EngineConfig
from hubkv_trt.engine.network import extend_network, prefill_network
from hubkv_trt.graph.lowered import LoweredOps

from .builder import Builder
from .evaluate import evaluate
from .twins import Twins


class OlderOps(LoweredOps):
    """What ``tensorrt`` 10.14 would be given: no rotary embedding, and attention whose causality is a flag."""

    def has(self, call: str) -> bool:
        return call not in ("add_rotary_embedding", "add_attention_v2") and super().has(call)


class Evaluated(Twins):
    """The networks are evaluated; plugin nodes by ``torch.ops.hubkv``.

    Args:
        ops: what writes the networks.

    Attributes:
        builder: whose networks they are.
        networks: ``prefill`` and ``extend``.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: Mapping[str, Tensor],
        ops: type[LoweredOps] = LoweredOps,
        exact: bool = False,
    ) -> None:
        super().__init__(config, weights, exact)
        self._exact = exact
        self.builder = Builder()
        self.networks = {
            plan: network_of(trt, self.builder.builder, config, self.rounded, ops)
            for plan, network_of in (("prefill", prefill_network), ("extend", extend_network))
        }

    def run(self, plan: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        network = self.networks[plan]
        weights = {name: self.weights[name] for name, binding in network.bindings.items() if binding.is_weight}
        assert isinstance(network.ops, LoweredOps)
        return evaluate(trt, network.definition, {**inputs, **weights}, network.ops.calls, self._exact)

    def check(self, got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)

    def check_choice(self, distances: Tensor, kept: int) -> None:
        assert len(distances) <= 0.01 * kept
        assert (distances < 1e-5).all()
