# SPDX-License-Identifier: Apache-2.0
"""What a compression while decoding judges, and by which queries, at the end of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import HardKVConfig, Importance, ModelConfig, require
from ..engine.directory import Engine
from ..graph.eager import EagerOps
from ..models.decoder import Decoder
from ..ops import score_window
from ..runtime.cache import Cache, Segment
from ..runtime.ledger import Ledger


@dataclass(frozen=True)
class Decoding:
    """A sequence of T tokens of which a compression is due: all but the ``recent`` last are candidates in every head.

    Attributes:
        config: parameters of the compression.
        model: gives L and Hkv.
        tokens: T.
        queries: [L, W, Hq, D], rotated, of the last W tokens.
        cache: holds the segment.
        segment: keys and positions of the candidates; its values are unset.
    """

    config: HardKVConfig
    model: ModelConfig
    tokens: int
    queries: Tensor
    cache: Cache
    segment: Segment

    @property
    def candidates(self) -> int:
        """Of each head."""
        return self.segment.rows // self.model.num_rows_per_token

    def score(self, importance: Importance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What ``ops.score_window`` gives: raw and transformed, candidate positions and offsets."""
        return score_window(
            self.queries, self.segment.positions, self.cache.arena, torch.tensor([self.segment.entry]),
            torch.zeros(1, 1, dtype=torch.int32), 0, self.candidates, self.model.num_kv_heads,
            self.cache.ledger.page_tokens, self.cache.page_base, importance.value, self.config.pool_kernel,
            self.config.importance_share, self.config.sink_tokens, 0.0,
        )  # fmt: skip


@torch.inference_mode()
def collect_decoding(
    engine: Engine, token_ids: Sequence[int], config: HardKVConfig, progress: Callable[[], object] = lambda: None
) -> Decoding:
    """Runs T tokens densely on the CPU, with the engine's own weights whatever its backend.

    Keys go to a compact segment as the runtime lays it out; queries are those that decoding the last tokens one by one
    would keep aside.

    Args:
        engine: with HubKV or without.
        token_ids: T of them, more than ``config.recent``, at most the model's positions.
        config: ``query_window``, ``recent`` and the measures' parameters are read.
        progress: called after each of the L layers.

    Raises:
        ValueError: the text is too short or too long.
    """
    model, dtype = engine.config.model, engine.config.dtype
    least, most = config.recent + 1, model.max_position_embeddings
    require(least <= len(token_ids) <= most, "token_ids", f"{len(token_ids)} tokens", f"in {least}..{most}")
    candidates = len(token_ids) - config.recent
    heads = model.num_rows_per_token
    ledger = Ledger(model, dtype)
    cache = Cache(ledger, ledger.segment_bytes(heads * candidates), num_pages=1)
    segment = cache.allocate(heads * candidates)
    segment.positions.view(heads, candidates).copy_(torch.arange(candidates, dtype=torch.int32))
    segment.head_offsets.copy_(torch.arange(heads + 1) * candidates)
    keys = segment.k_rows.view(model.num_layers, model.num_kv_heads, candidates, model.head_dim)
    ops, decoder = EagerOps({**engine.weights}, dtype), Decoder(model)
    queries: list[Tensor] = []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        keys[layer].copy_(k[:candidates].transpose(0, 1))
        out = ops.causal_attention(q, k, v, decoder.scale)
        progress()
        return out

    decoder.forward(
        ops,
        torch.tensor(list(token_ids), dtype=torch.int32),
        torch.arange(len(token_ids), dtype=torch.int32),
        attention,
        last_only=True,
        see_queries=lambda q: queries.append(ops.last(q, config.query_window)),
    )
    return Decoding(config, model, len(token_ids), torch.stack(queries), cache, segment)
