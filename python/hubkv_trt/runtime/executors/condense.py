# SPDX-License-Identifier: Apache-2.0
"""HARD-KV's compression of one sequence between two decode steps: score, calibrate and select, rewrite, condense."""

from __future__ import annotations

import numpy as np
import torch

from ... import ops as stages
from ...config import Evicted, HardKVConfig, HubKVConfig, ModelConfig
from ...config.base import INT32_MAX
from ...refinement import refine
from ..cache import Cache, Segment
from ..sequence import Sequence
from .summaries import summarize_into

_HUBKV = HubKVConfig(sink_tokens=0)  # how ``HardKVConfig.refine`` refines; what is protected is no number there


def condense(model: ModelConfig, cache: Cache, sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
    """``Condenser.condense`` with the operators of ``hubkv_trt.ops``; all that it reads and writes is in the arena."""
    cascade, segment, tail = sequence.cascade, sequence.segment, sequence.tail
    assert cascade is not None
    assert segment is not None
    assert tail is not None
    config, ledger = cascade.config, cache.ledger
    num_rows = int(segment.head_offsets[-1])
    segments = torch.tensor([segment.entry], dtype=torch.int64)
    pages = torch.tensor([tail.pages[: ledger.pages(moved)]], dtype=torch.int32)
    place = (ledger.page_tokens, cache.page_base)
    queries = cascade.take_queries().contiguous()
    raw, scores, positions, offsets = stages.score_window(
        queries, segment.positions[:num_rows], cache.arena, segments, pages, moved,
        sequence.tail_start, model.num_kv_heads, *place, config.importance.value, config.pool_kernel,
        config.importance_share, config.sink_tokens, 0.0,
    )  # fmt: skip
    counts = _counts(config, model, raw, scores, positions, offsets)
    if config.refine:
        dropped = 1 - int(counts.sum()) / max(1, scores.numel())
        scores = refined(scores, offsets, positions < config.sink_tokens, model.num_layers, _HUBKV.alpha(dropped))
        counts = _counts(config, model, raw, scores, positions, offsets)
    kept = int(counts.sum())
    indices, head_offsets = stages.select_ragged(scores, positions, offsets, counts, kept, config.sink_tokens)
    condensed = config.condensed_rows  # of each head, behind its own rows
    size = kept + condensed * model.num_rows_per_token
    new_offsets = head_offsets + condensed * torch.arange(head_offsets.numel())
    k_rows, v_rows, new_positions = target.k_rows[:size], target.v_rows[:size], target.positions[:size]
    bias = None if target.row_bias is None else target.row_bias[:size]
    tables = (cache.arena, segments, pages, num_rows, moved, sequence.tail_start, model.num_layers, *place)
    new = (k_rows, v_rows, new_positions)
    if condensed and config.condense is Evicted.SUMMARIZE:
        holes = indices.new_full((size,), -1)  # none of its head's candidates: a row that stands for nothing
        holes[torch.arange(kept) + condensed * torch.repeat_interleave(head_offsets.diff())] = indices
        stages.rewrite_into(positions, holes, new_offsets, *tables, *new, bias)
        moving = cache.tail_rows(tail, moved)
        summarize_into(queries, (positions, offsets), (indices, head_offsets), segment, moving, condensed, target)
    elif condensed:
        assert bias is not None
        stages.merge_into(raw, positions, indices, head_offsets, *tables, condensed, *new, bias)
        # A row without members has position 0, as a sink: it must not be kept for that.
        new_positions.masked_fill_(bias == -torch.inf, INT32_MAX)
    else:
        stages.rewrite_into(positions, indices, head_offsets, *tables, *new, bias)
    target.head_offsets.copy_(new_offsets)
    target.work = None
    return (counts.numpy().astype(np.int64) + condensed).reshape(model.num_layers, model.num_kv_heads)


def _counts(
    config: HardKVConfig,
    model: ModelConfig,
    raw: torch.Tensor,
    scores: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """int32 [L*Hkv], the rows of each head."""
    counts, _, _ = stages.calibrate_top_p(
        raw if config.calibrate else scores, scores, positions, offsets, model.num_layers, config.p,
        config.sink_tokens, config.min_rows, config.upper_budget or 0,
        (config.layer_budget or 0) * model.num_kv_heads, config.fill,
    )  # fmt: skip
    return counts


def refined(
    scores: torch.Tensor, offsets: torch.Tensor, protected: torch.Tensor, num_layers: int, alpha: float
) -> torch.Tensor:
    """The stage ``refine`` on ragged heads: of exp(scores), and the logarithm of what it gives.

    Neighbours are the candidates beside one within its head. Protected ones keep their score; they count neither as
    neighbours nor in the moments. The stage skips NaN, which stands for them and pads heads to one length.

    Args:
        scores: float32 [N], logarithms.
        offsets: int64 [L*Hkv + 1], of the heads.
        protected: bool [N].
        num_layers: L.
        alpha: strength.
    """
    sizes = offsets.diff()
    padded = scores.new_full((sizes.numel(), max(1, int(sizes.max()))), float("nan"))
    head = torch.repeat_interleave(sizes)
    index = torch.arange(scores.numel(), device=scores.device) - offsets[head]
    padded[head, index] = scores.exp().masked_fill(protected, float("nan"))
    heads, window = padded.view(num_layers, -1, padded.shape[1]), offsets.new_zeros(1, dtype=torch.int32)
    out, _ = refine(heads, scores.new_tensor([alpha]), window, _HUBKV)
    return torch.where(protected, scores, out.view_as(padded)[head, index].log())
