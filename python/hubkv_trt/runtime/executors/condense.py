# SPDX-License-Identifier: Apache-2.0
"""HARD-KV's compression of one sequence between two decode steps: score, calibrate and select, rewrite."""

from __future__ import annotations

import numpy as np
import torch

from ... import ops as stages
from ...config import ModelConfig
from ..cache import Cache, Segment
from ..sequence import Sequence


def condense(model: ModelConfig, cache: Cache, sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
    """``Condenser.condense`` with the operators of ``hubkv_trt.ops``; everything it reads and writes is in the arena."""
    cascade, segment, tail = sequence.cascade, sequence.segment, sequence.tail
    assert cascade is not None
    assert segment is not None
    assert tail is not None
    config, ledger = cascade.config, cache.ledger
    num_rows = int(segment.head_offsets[-1])
    segments = torch.tensor([segment.entry], dtype=torch.int64)
    pages = torch.tensor([tail.pages[: ledger.pages(moved)]], dtype=torch.int32)
    place = (ledger.page_tokens, cache.page_base)
    raw, scores, positions, offsets = stages.score_window(
        cascade.take_queries().contiguous(), segment.positions[:num_rows], cache.arena, segments, pages, moved,
        sequence.tail_start, model.num_kv_heads, *place, config.importance.value, config.pool_kernel,
        config.importance_share, config.sink_tokens, 0.0,
    )  # fmt: skip
    counts, _, _ = stages.calibrate_top_p(
        raw if config.calibrate else scores, scores, positions, offsets, model.num_layers, config.p,
        config.sink_tokens, config.min_rows, config.upper_budget or 0,
        (config.layer_budget or 0) * model.num_kv_heads, config.fill,
    )  # fmt: skip
    kept = int(counts.sum())
    indices, head_offsets = stages.select_ragged(scores, positions, offsets, counts, kept, config.sink_tokens)
    stages.rewrite_into(
        positions, indices, head_offsets, cache.arena, segments, pages, num_rows, moved, sequence.tail_start,
        model.num_layers, *place, target.k_rows[:kept], target.v_rows[:kept], target.positions[:kept], None,
    )  # fmt: skip
    target.head_offsets.copy_(head_offsets)
    target.work = None
    return counts.numpy().astype(np.int64).reshape(model.num_layers, model.num_kv_heads)
