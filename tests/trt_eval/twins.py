# SPDX-License-Identifier: Apache-2.0
"""An engine twice: its TensorRT networks and the eager backend, over the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hubkv_trt.config import (
    Backend,
    DType,
    EngineConfig,
    HubKVConfig,
    ModelConfig,
    Scope,
    TensorRTConfig,
    WeightsPlace,
    budget,
)
from hubkv_trt.engine.bindings import plans_of, row_names, weight_shapes
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.graph.ops import ExtendInputs, ExtendOutputs, PrefillInputs, PrefillOutputs
from hubkv_trt.models.decoder import Decoder


def engine_config(
    model: ModelConfig, scope: Scope | None = Scope.MODEL, dtype: DType = DType.BFLOAT16, **changes: Any
) -> EngineConfig:
    """Of a TensorRT engine: 512 input tokens, 4 sequences, up to 64 new tokens.

    Args:
        scope: None makes a dense engine.
        changes: of ``EngineConfig`` and ``TensorRTConfig``.
    """
    plans = {"max_extend_len": 64, **{n: v for n, v in changes.items() if n in TensorRTConfig.__dataclass_fields__}}
    own = {n: v for n, v in changes.items() if n not in plans}
    hubkv = None if scope is None else HubKVConfig(scope=scope)
    limits = {"max_input_len": min(512, model.max_position_embeddings), "max_batch_size": 4, "hubkv": hubkv, **own}
    return EngineConfig(model=model, dtype=dtype, backend=Backend.TENSORRT, tensorrt=TensorRTConfig(**plans), **limits)


class Eager(EagerOps):
    """The eager backend.

    Attributes:
        distances: of each KV pair's score from the last that its group keeps: [L, Hkv, T] of each selection.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: DType) -> None:
        super().__init__(weights, dtype)
        self.distances: list[Tensor] = []

    def select(self, refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
        scores = refined.view(num_groups, -1)
        last = scores.sort(descending=True).values[:, rows_per_group - 1 : rows_per_group]
        self.distances.append((scores - last).abs().view(refined.shape))
        return super().select(refined, num_groups, rows_per_group)


class Twins:
    """Both backends of one engine. A subclass says how the networks are run.

    Args:
        config: of a TensorRT engine.
        weights: float32, of model and gate.
        exact: 16-bit floats where the networks have them, on both sides; else float32 on both.

    Attributes:
        eager: the eager backend, in float32 or, ``exact``, in the engine's dtype.
        weights: what the eager backend reads, by name.
        rounded: the same as the engine's files hold them.
    """

    def __init__(self, config: EngineConfig, weights: Mapping[str, Tensor], exact: bool) -> None:
        self.config, self.decoder = config, Decoder(config.model, config.hubkv)
        types = {name: getattr(torch, dtype) for name, dtype, _ in weight_shapes(config, num_sinks=16)}
        self.rounded = {name: weights[name].to(dtype) for name, dtype in types.items()}
        self.weights = {name: weights[name] for name in types}
        if exact:
            self.weights = self.rounded
        elif plans_of(config).weights is WeightsPlace.EMBEDDED:
            self.weights = {name: weight.float() for name, weight in self.rounded.items()}
        self.eager = Eager(self.weights, config.dtype if exact else DType.FLOAT32)

    def run(self, plan: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of ``prefill`` or ``extend`` by name; inputs are all but weights, on the host."""
        raise NotImplementedError

    def address(self, arena: Tensor) -> int:
        """Where the networks find the bytes of an arena of the eager backend."""
        return arena.data_ptr()

    def check(self, got: Tensor, wanted: Tensor) -> None:
        """That a result of the networks is as near to the eager backend's as it must be."""
        raise NotImplementedError

    def check_choice(self, distances: Tensor, kept: int) -> None:
        """That KV pairs which one backend alone keeps may be: their scores' distances from the last kept one."""
        raise NotImplementedError

    def prefill(self, ids: Tensor, ratio: float = 0.0) -> tuple[dict[str, Tensor], PrefillOutputs[Tensor]]:
        """The networks' outputs for a prompt int32 [T], by name, and what the eager backend gives."""
        config, hubkv = self.config, self.config.hubkv
        inputs: dict[str, Tensor] = {"input_ids": ids}
        rows = 0
        if hubkv is not None:
            rows = budget(config.model, hubkv, len(ids), ratio).rows_per_group
            inputs["alpha"] = torch.tensor([hubkv.alpha(ratio)])
            inputs["window"] = torch.tensor([hubkv.window(len(ids))], dtype=torch.int32)
        self.eager.distances.clear()
        given = PrefillInputs(**inputs, positions=torch.arange(len(ids), dtype=torch.int32), rows_per_group=rows)
        with torch.inference_mode():
            wanted = self.decoder.prefill(self.eager, given, plans_of(config).last_queries)
        if hubkv is not None:
            inputs["rows_per_group"] = torch.tensor([rows])
        got = self.run("prefill", inputs)
        for side in ("k", "v"):
            parts = [got.pop(name) for name in row_names(side, config.model, hubkv)]
            got[f"{side}_rows"] = torch.cat(parts)
        return got, wanted

    def extend(self, inputs: ExtendInputs[Tensor]) -> tuple[dict[str, Tensor], ExtendOutputs[Tensor]]:
        """As ``prefill``, for new tokens: the eager backend's inputs. The cache is not changed."""
        with torch.inference_mode():
            wanted = self.decoder.extend(self.eager, inputs, plans_of(self.config).new_queries)
        cache, batch = inputs.cache, inputs.batch_size
        names = ("segments", "block_table", "tail_lengths", "new_lengths", "work", "work_count")
        tables = {name: getattr(cache, name) for name in names}
        arena = torch.tensor([self.address(cache.arena), cache.arena.numel()])
        ids, positions = inputs.input_ids.view(batch, -1), inputs.positions.view(batch, -1)
        tokens = {"input_ids": ids, "positions": positions, "last_tokens": inputs.last_tokens}
        return self.run("extend", {**tokens, **tables, "arena": arena}), wanted
