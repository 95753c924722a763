# SPDX-License-Identifier: Apache-2.0
"""The cache that prefills leave behind, without the runtime: compact segments of real prompts and empty tails."""

from __future__ import annotations

import torch
from torch import Tensor

from hubkv_trt import ops as stages
from hubkv_trt.config import ModelConfig
from hubkv_trt.graph.ops import CacheInputs, PrefillOutputs


def prompt_cache(
    config: ModelConfig, prompts: list[PrefillOutputs[Tensor]], tail_tokens: int, page_tokens: int = 16
) -> CacheInputs[Tensor]:
    """One arena: pages of empty tails with room for ``tail_tokens`` each, then the segments of all prompts.

    Rows of the tails are NaN until they are written.
    """
    batch, pages, dtype = len(prompts), -(-tail_tokens // page_tokens), prompts[0].k_rows.dtype
    page_bytes = config.num_rows_per_token * 2 * page_tokens * config.head_dim * dtype.itemsize
    pieces: list[Tensor] = []
    end = 0

    def place(tensor: Tensor) -> int:
        nonlocal end
        raw = tensor.contiguous().view(torch.uint8).flatten()
        pieces.append(torch.cat((raw, raw.new_zeros(-len(raw) % 256))))
        end += len(pieces[-1])
        return end - len(pieces[-1])

    place(torch.full((batch * pages * page_bytes,), 0xFF, dtype=torch.uint8))
    rows = [[place(p.k_rows), place(p.v_rows), place(p.head_offsets), -1] for p in prompts]
    arena, segments = torch.cat(pieces), torch.tensor(rows)
    work, work_count = stages.plan(arena, segments, config.num_layers, config.num_kv_heads, 4 * batch + 16, 64)
    table = torch.arange(batch * pages, dtype=torch.int32).flip(0).view(batch, pages)
    return CacheInputs(
        arena=arena, segments=segments, block_table=table, tail_lengths=torch.zeros(batch, dtype=torch.int32),
        new_lengths=torch.zeros(batch, dtype=torch.int32), work=work, work_count=work_count, page_tokens=page_tokens,
        page_base=0,
    )  # fmt: skip
