# SPDX-License-Identifier: Apache-2.0
"""Summaries at prefill: between select and compact, each head gets m rows for the pairs that it loses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import HubKVConfig, require
from ..graph.eager import EagerOps
from ..models.decoder import Decoder
from .fit import SummaryRows, summarize_evicted
from .references import by_kv_head, reference_queries

_MOST_SHARES = 1 << 24
"""Elements of the reference queries' weights that are in memory at once: heads of a layer go through in parts."""


class PrefillSummaries:
    """``models.scoring.EvictedRows`` of one prefill.

    Args:
        ops: that the prefill runs on; the time goes to its stage ``summarize``.
        decoder: of the model.
        hubkv: says how, and how many rows a head gets.
        references: of layers that were seen already, as the attribute has them.

    Attributes:
        references: float32 [R, Hq, D] of each layer that was seen and not yet compacted.
        row_bias: float32, of the rows of every call of ``compact``, in their order.
    """

    def __init__(self, ops: EagerOps, decoder: Decoder, hubkv: HubKVConfig, references: Sequence[Tensor] = ()) -> None:
        self._ops, self._hubkv, self._scale = ops, hubkv, decoder.scale
        self._inv_freq = torch.from_numpy(decoder.inv_freq).to(ops.device)
        self.references: list[Tensor] = list(references)
        self.row_bias: list[Tensor] = []

    def see(self, queries: Tensor) -> None:
        """Takes the references of the next layer from its rotated queries [T, Hq, D]."""
        with self._ops.stage("summarize"):
            self.references.append(reference_queries(queries, self._inv_freq))

    def compact(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], positions: Tensor, head_offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As ``EvictedRows.compact``."""
        ops, count = self._ops, self._hubkv.centroids
        with ops.stage("summarize"):
            layers, heads = len(keys), keys[0].shape[1]
            queries, self.references = self.references[:layers], self.references[layers:]
            require(len(queries) == layers, "queries", len(queries), f"of the {layers} layers that are compacted")
            kept = torch.zeros(layers * heads, keys[0].shape[0], dtype=torch.bool, device=ops.device)
            owner = torch.repeat_interleave(torch.arange(len(kept), device=ops.device), head_offsets.diff())
            kept[owner, positions.long()] = True
            found = [self._layer(*each) for each in zip(queries, keys, values, kept.split(heads), strict=True)]
            shape = (len(kept) * count, keys[0].shape[2])
            slots = (head_offsets[1:, None] + torch.arange(len(kept) * count, device=ops.device).view(-1, count)).view(
                -1
            )
            rows = len(positions) + len(slots)
            bias = torch.zeros(rows, device=ops.device)
            bias[slots] = torch.cat([each.bias for each in found]).view(-1)
            places = torch.empty(rows, dtype=torch.int32, device=ops.device)
            places[torch.arange(len(owner), device=ops.device) + owner * count] = positions
            places[slots] = torch.cat([each.tokens for each in found]).view(-1).int()
            offsets = head_offsets + count * torch.arange(len(head_offsets), device=ops.device)
        k_rows, v_rows = ops.compact(keys, values, places, offsets)
        with ops.stage("summarize"):
            k_rows[slots] = torch.cat([each.keys for each in found]).view(shape).to(k_rows.dtype)
            v_rows[slots] = torch.cat([each.values for each in found]).view(shape).to(v_rows.dtype)
            self.row_bias.append(bias)
        return k_rows, v_rows, places, offsets

    def _layer(self, queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor) -> SummaryRows:
        """Of references [R, Hq, D], keys and values [T, Hkv, D] and kept [Hkv, T]."""
        queries = by_kv_head(queries, keys.shape[1])
        keys, values = (x.transpose(0, 1).float() for x in (keys, values))
        step = max(1, _MOST_SHARES // (queries.shape[1] * keys.shape[1]))
        parts = [
            summarize_evicted(
                q, k, v, stays, self._hubkv.centroids, self._scale, self._hubkv.evicted, self._hubkv.evicted_mass
            )
            for q, k, v, stays in zip(*(x.split(step) for x in (queries, keys, values, kept)), strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return SummaryRows(*(torch.cat([getattr(p, name) for p in parts]) for name in SummaryRows.__annotations__))
