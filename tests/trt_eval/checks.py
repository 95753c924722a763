# SPDX-License-Identifier: Apache-2.0
"""What both backends of an engine must agree on."""

from __future__ import annotations

import torch
from torch import Tensor

from hubkv_trt import ops as stages
from hubkv_trt.config import ModelConfig
from hubkv_trt.graph.ops import CacheInputs, ExtendInputs, PrefillOutputs
from masked_reference import kept_mask
from prompt_cache import prompt_cache

from .twins import Twins


def tokens(model: ModelConfig, count: int, seed: int) -> Tensor:
    return torch.randint(model.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).int()


def check_prefill(twins: Twins, ids: Tensor, ratio: float) -> PrefillOutputs[Tensor]:
    """Outputs of a prompt. A pair may be kept by one backend alone where its score is as good as the last one's."""
    got, wanted = twins.prefill(ids, ratio)
    model = twins.config.model
    twins.check(got["logits"], wanted.logits)
    if wanted.last_queries is not None:
        twins.check(got["last_queries"], wanted.last_queries)
    kept, kept_by_eager = (
        kept_mask(positions.numpy(), offsets.numpy(), (model.num_layers, model.num_kv_heads, len(ids)))
        for positions, offsets in ((got["positions"], got["head_offsets"]), (wanted.positions, wanted.head_offsets))
    )
    assert kept.sum() == kept_by_eager.sum() == len(wanted.positions)
    if twins.config.hubkv is None:
        assert kept.all()
    else:
        assert got["non_finite"].tolist() == [0]
        twins.check_choice(torch.cat(twins.eager.distances)[kept != kept_by_eager], int(kept.sum()))
    for name in ("k_rows", "v_rows"):
        rows, rows_of_eager = got[name], getattr(wanted, name)
        twins.check(rows[kept_by_eager[kept]], rows_of_eager[kept[kept_by_eager]])
    return wanted


def check_extend(twins: Twins, cache: CacheInputs[Tensor], new: list[Tensor], starts: list[int]) -> None:
    """New tokens of each sequence; afterwards they are in the tails of the cache."""
    longest = max(map(len, new))
    ids, positions = torch.zeros(2, len(new), longest, dtype=torch.int32)
    for b, (sequence, start) in enumerate(zip(new, starts, strict=True)):
        ids[b, : len(sequence)] = sequence
        positions[b] = start + int(cache.tail_lengths[b]) + torch.arange(longest)
    cache.new_lengths.copy_(torch.tensor([len(x) for x in new]))
    last = torch.tensor([b * longest + len(x) - 1 for b, x in enumerate(new)], dtype=torch.int32)
    got, wanted = twins.extend(ExtendInputs(ids.flatten(), positions.flatten(), last, cache, len(new)))
    twins.check(got["logits"], wanted.logits)
    twins.check(got["k_new"], wanted.k_new)
    twins.check(got["v_new"], wanted.v_new)
    if wanted.q_new is not None:
        twins.check(got["q_new"], wanted.q_new)
    stages.append(
        wanted.k_new, wanted.v_new, cache.arena, cache.block_table, cache.tail_lengths, cache.new_lengths,
        cache.page_tokens, cache.page_base,
    )  # fmt: skip
    cache.tail_lengths.add_(cache.new_lengths)


def check_engine(twins: Twins) -> None:
    """Two prompts at two ratios; then, in one batch of ragged segments, questions of several tokens and single tokens
    until tails need a second page."""
    model = twins.config.model
    texts, starts = [tokens(model, 140, seed=5), tokens(model, 63, seed=6)], [110, 40]
    prompts = [check_prefill(twins, t[:n], r) for t, n, r in zip(texts, starts, (0.6, 0.3), strict=True)]
    cache = prompt_cache(model, prompts, 32)
    done = [0, 0]
    for counts in ((7, 3), (1, 1), (9, 2), (1, 1), (1, 1)):
        new = [t[s + d : s + d + c] for t, s, d, c in zip(texts, starts, done, counts, strict=True)]
        check_extend(twins, cache, new, starts)
        done = [d + c for d, c in zip(done, counts, strict=True)]
