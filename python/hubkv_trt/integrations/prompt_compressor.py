# SPDX-License-Identifier: Apache-2.0
"""HubKV for another runtime: it hands over attention inputs, and asks at the end of a prompt what to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import DType, Evicted, HubKVConfig, ModelConfig, Scope, Scorer, budget, require
from ..graph.eager import EagerOps
from ..models.gate import gate_scores
from ..scorers.fastkvzip import Gate, check_gate, engine_weights


class Chunk(NamedTuple):
    """Tokens of one request that go through the model together."""

    request: int
    first: int  # position of the first of them in the prompt
    num_tokens: int


class PromptCompressor:
    """Scores prompts while they are prefilled, in one piece or in chunks, and selects the rows to keep.

    Every KV head keeps the same number of rows (``head`` scope), so that a cache that knows one length per sequence can
    hold them. Scores of all heads of a layer are computed everywhere, for they are calibrated against each other.

    Args:
        model: gives Hkv, G and E of the whole model.
        hubkv: parameters, ratio included; ``head`` scope.
        gate: of the model.
        dtype: of the attention inputs.
        device: where they are.
        layers: the layers of this process (pipeline parallelism); None: all.
        heads: the KV heads of this process (tensor parallelism); None: all.

    Raises:
        ValueError: the scope or the scorer is another one, or the gate is that of another model.
    """

    def __init__(
        self,
        model: ModelConfig,
        hubkv: HubKVConfig,
        gate: Gate,
        dtype: DType = DType.FLOAT32,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
        heads: range | None = None,
    ) -> None:
        require(hubkv.scorer is Scorer.FASTKVZIP, "scorer", hubkv.scorer.value, "fastkvzip: scores come from the gate")
        require(hubkv.evicted is Evicted.DROP, "evicted", hubkv.evicted.value, "drop: rows have no bias here")
        require(hubkv.scope is Scope.HEAD, "scope", hubkv.scope.value, "head: the cache has one length per sequence")
        self.model, self.hubkv = model, hubkv
        self.layers = tuple(range(model.num_layers) if layers is None else layers)
        self.heads = heads or range(model.num_kv_heads)
        weights = engine_weights(check_gate(gate, model), dtype)
        local = {name: w.to(device) for name, w in weights.items() if int(name.split(".")[1]) in self.layers}
        self._ops = EagerOps(local, dtype)
        self._scores: dict[int, dict[int, list[Tensor]]] = {}  # request -> layer -> [Hkv, n] of successive chunks

    def begin(self, request: int) -> None:
        """A request's prompt starts, or starts over."""
        self._scores[request] = {layer: [] for layer in self.layers}

    def forget(self, request: int) -> None:
        """A request is over; one that is unknown is no error."""
        self._scores.pop(request, None)

    def __contains__(self, request: int) -> bool:
        return request in self._scores

    def score(self, layer: int, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """Takes the attention input of one layer.

        Args:
            layer: one of ``layers``.
            hidden: [N, E], the tokens of the chunks one after the other from the first row on; more may follow.
            chunks: of requests that have begun and of others, which are passed over. A chunk that does not follow the
                ones before is dropped, and ``select`` then says so.
        """
        first = 0
        for request, position, num_tokens in chunks:
            rows = hidden[first : first + num_tokens]
            first += num_tokens
            parts = self._scores.get(request, {}).get(layer)
            if parts is not None and position == sum(part.shape[1] for part in parts):
                with torch.no_grad():
                    parts.append(gate_scores(self._ops, layer, rows.to(self._ops.dtype), self.model))

    def select(self, request: int, num_tokens: int) -> Tensor | None:
        """The rows to keep of a prompt, and the end of its scores.

        Args:
            request: one that has begun.
            num_tokens: T, tokens of the prompt.

        Returns:
            int32 [layers, heads, K] of this process, ascending; None where nothing is to be dropped.

        Raises:
            ValueError: tokens were not scored, or scores are not finite.
        """
        scores = self._scores.pop(request)
        rows = budget(self.model, self.hubkv, num_tokens, self.hubkv.ratio).rows_per_group
        if rows >= num_tokens:
            return None
        for layer, parts in scores.items():
            seen = sum(part.shape[1] for part in parts)
            if seen != num_tokens:
                raise ValueError(f"layer {layer}: {seen} of {num_tokens} tokens were scored")
        whole = torch.stack([torch.cat(parts, 1) for parts in scores.values()])  # [layers, Hkv, T]
        alpha = torch.tensor([self.hubkv.alpha(self.hubkv.ratio)], dtype=torch.float32, device=whole.device)
        window = torch.tensor([self.hubkv.window(num_tokens)], dtype=torch.int32, device=whole.device)
        refined = self._ops.refine(whole, alpha, window, self.hubkv)
        refined = refined[:, self.heads.start : self.heads.stop].contiguous()
        positions, _ = self._ops.select(refined, len(self.layers) * len(self.heads), rows)
        return positions.view(len(self.layers), len(self.heads), rows)


def local_heads(num_kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads of one of several tensor-parallel ranks; with fewer heads than ranks some hold the same one.

    Raises:
        ValueError: the heads are not divided evenly.
    """
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(f"{ranks} tensor-parallel ranks fit no {num_kv_heads} KV heads")
    first = rank * num_kv_heads // ranks
    return range(first, first + max(num_kv_heads // ranks, 1))
