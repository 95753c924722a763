# SPDX-License-Identifier: Apache-2.0
"""The attention of a real model: queries, keys and values of a text, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import require
from ..engine.directory import Engine
from ..graph.eager import EagerOps
from ..models.decoder import Decoder
from .heads import Heads


@dataclass(frozen=True)
class LayerAttention:
    """What the attention of one layer reads of N tokens, float32, after RoPE."""

    queries: Tensor  # [N, Hq, D]
    keys: Tensor  # [N, Hkv, D]
    values: Tensor  # [N, Hkv, D]


@torch.inference_mode()
def collect_attention(engine: Engine, token_ids: Sequence[int]) -> list[LayerAttention]:
    """Runs N tokens densely on the CPU with the engine's own weights, and keeps what each of the L layers attends with.

    Raises:
        ValueError: the text is empty or longer than the model's positions.
    """
    config = engine.config
    limit = config.model.max_position_embeddings
    require(1 <= len(token_ids) <= limit, "token_ids", f"{len(token_ids)} tokens", f"in 1..{limit}")
    ops, decoder = EagerOps({**engine.weights}, config.dtype), Decoder(config.model)
    found: list[LayerAttention] = []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        found.append(LayerAttention(q.float().clone(), k.float().clone(), v.float().clone()))
        return ops.causal_attention(q, k, v, decoder.scale)

    positions = torch.arange(len(token_ids), dtype=torch.int32)
    decoder.forward(ops, torch.tensor(list(token_ids), dtype=torch.int32), positions, attention)
    return found


def model_heads(layers: Sequence[LayerAttention], num_tokens: int) -> list[Heads]:
    """Every query head of each layer with the keys and values that it reads: a cache of the first T tokens.

    The later queries are those of the tokens that follow; their attention is taken among the T tokens.

    Args:
        layers: of N > T tokens.
        num_tokens: T.
    """
    total = layers[0].queries.shape[0]
    require(1 <= num_tokens < total, "num_tokens", num_tokens, f"in 1..{total - 1}: some queries must follow")
    cases = []
    for number, layer in enumerate(layers):
        group = layer.queries.shape[1] // layer.keys.shape[1]
        queries = layer.queries.transpose(0, 1).contiguous()
        keys, values = (x[:num_tokens].transpose(0, 1).repeat_interleave(group, 0) for x in (layer.keys, layer.values))
        scale = layer.queries.shape[2] ** -0.5
        later = queries[:, num_tokens:]
        cases.append(Heads(f"layer {number}", queries[:, :num_tokens], later, keys, values, scale, True))
    return cases
