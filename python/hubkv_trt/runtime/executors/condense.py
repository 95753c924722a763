# SPDX-License-Identifier: Apache-2.0
"""HARD-KV's compression of one sequence between two decode steps: score, calibrate and select, rewrite, condense."""

from __future__ import annotations

import numpy as np
import torch

from ... import ops as stages
from ...config import Budgets, Evicted, HardKVConfig, HubKVConfig, ModelConfig
from ...config.base import INT32_MAX
from ...refinement import refine
from ..cache import Cache, Segment
from ..sequence import Sequence
from .head_shares import rows_for_mass, share_rows
from .summaries import summarize_into

_HUBKV = HubKVConfig(sink_tokens=0)  # how ``HardKVConfig.refine`` refines; what is protected is no number there
_ORDERING = 16  # one query of the window in so many, the oldest, orders pairs for the others to judge


def condense(model: ModelConfig, cache: Cache, sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
    """``Condenser.condense`` with the operators of ``hubkv_trt.ops``; all that it reads and writes is in the arena."""
    cascade, segment, tail = sequence.cascade, sequence.segment, sequence.tail
    assert cascade is not None
    assert segment is not None
    assert tail is not None
    config, place = cascade.config, (cache.ledger.page_tokens, cache.page_base)
    num_rows = int(segment.head_offsets[-1])
    segments, pages = _tables(cache, sequence, moved)
    queries = cascade.take_queries().contiguous()
    raw, positions, offsets, indices, head_offsets = _chosen(model, cache, sequence, moved, queries)
    kept = indices.numel()
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
    return new_offsets.diff().numpy().reshape(model.num_layers, model.num_kv_heads)


def _tables(cache: Cache, sequence: Sequence, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence's segment, int64 [1, 4], and the pages of the first tokens of its tail, int32 [1, pages]."""
    assert sequence.segment is not None
    assert sequence.tail is not None
    pages = sequence.tail.pages[: cache.ledger.pages(tokens)]
    return torch.tensor([sequence.segment.entry], dtype=torch.int64), torch.tensor([pages], dtype=torch.int32)


def _chosen(
    model: ModelConfig, cache: Cache, sequence: Sequence, moved: int, queries: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Which candidates stay: raw, positions and offsets of ``score_window``, indices and head offsets of
    ``select_ragged``."""
    assert sequence.cascade is not None
    assert sequence.segment is not None
    config, segment = sequence.cascade.config, sequence.segment
    place = (model.num_kv_heads, cache.ledger.page_tokens, cache.page_base)
    segments, pages = _tables(cache, sequence, moved)

    def scored(window: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return stages.score_window(
            window, segment.positions[: int(segment.head_offsets[-1])], cache.arena, segments, pages, moved,
            sequence.tail_start, *place, config.importance.value, config.pool_kernel, config.importance_share,
            config.sink_tokens, 0.0,
        )  # fmt: skip

    raw, scores, positions, offsets = scored(queries)
    if config.budgets is Budgets.HELD_OUT:
        early = max(1, queries.shape[1] // _ORDERING)
        _, order, _, _ = scored(queries[:, :early].contiguous())
        _, all_pages = _tables(cache, sequence, sequence.tail_length)
        loss, rows = stages.held_out_loss(
            queries[:, early:].contiguous(), order, positions, cache.arena, segments, all_pages, moved,
            sequence.tail_length, *place, config.sink_tokens, 0.0,
        )  # fmt: skip
        counts = _shares(config, loss.numpy(), rows.numpy())
    else:
        counts = _counts(config, model, raw, scores, positions, offsets)
    if config.refine:
        dropped = 1 - int(counts.sum()) / max(1, scores.numel())
        scores = refined(scores, offsets, positions < config.sink_tokens, model.num_layers, _HUBKV.alpha(dropped))
        if config.budgets is Budgets.MASS:
            counts = _counts(config, model, raw, scores, positions, offsets)
    kept = stages.select_ragged(scores, positions, offsets, counts, int(counts.sum()), config.sink_tokens)
    return raw, positions, offsets, *kept


def _counts(
    config: HardKVConfig,
    model: ModelConfig,
    raw: torch.Tensor,
    scores: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """int32 [L*Hkv], the rows of each head, by mass."""
    counts, _, _ = stages.calibrate_top_p(
        raw if config.calibrate else scores, scores, positions, offsets, model.num_layers, config.p,
        config.sink_tokens, config.min_rows, config.upper_budget or 0,
        (config.layer_budget or 0) * model.num_kv_heads, config.fill,
    )  # fmt: skip
    return counts


def _shares(config: HardKVConfig, loss: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    """int32 [L*Hkv], the rows of each head, by what held-out queries lose."""
    sizes = rows[:, -1].astype(np.int64)
    most = sizes if config.upper_budget is None else np.minimum(sizes, config.upper_budget)
    if not config.fill:
        most = np.minimum(most, rows_for_mass(loss, rows, config.p))
    least = np.maximum(rows[:, 0], np.minimum(config.min_rows, sizes))
    total = int(sizes.sum()) if config.layer_budget is None else config.layer_budget * len(sizes)
    return torch.from_numpy(share_rows(loss, rows, total, least, most).astype(np.int32))


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
