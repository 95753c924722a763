# SPDX-License-Identifier: Apache-2.0
"""The stages as torch operators, ``torch.ops.hubkv.*``, and as typed functions of the same names.

Letters: B sequences, T prompt tokens, Tq new tokens, L layers, Hq query heads, Hkv KV heads, D head dim, K kept rows,
P tokens per tail page. Exact semantics: ``include/hubkv/hubkv.h``. Tensors are on the CPU or on one CUDA device and
dense unless said otherwise. All functions raise:

* ``ValueError`` naming the field and the value: a tensor or a parameter does not fit, or ``HUBKV_NUM_THREADS`` or
  ``HUBKV_CPU_ISA`` in the environment;
* ``NotImplementedError``: a CUDA tensor, and libhubkv was not built with CUDA;
* ``ImportError``: there is no libhubkv (the message says how to build it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._abi import LEVELS
from ._library import cpu_isa, has_cuda, num_threads, set_num_threads, version
from ._operators import LIBRARY
from ._stages_cache import append, attend, plan
from ._stages_decode import calibrate_top_p, held_out_loss, score_window, select_ragged
from ._stages_prefill import compact, compact_into, refine, select
from ._stages_rewrite import merge_into, rewrite_into

__all__ = [
    "refine",
    "select",
    "compact",
    "compact_into",
    "plan",
    "attend",
    "append",
    "score_window",
    "held_out_loss",
    "calibrate_top_p",
    "select_ragged",
    "rewrite_into",
    "merge_into",
    "cpu_isa",
    "has_cuda",
    "num_threads",
    "set_num_threads",
    "version",
]


def _same_device(*arguments: object) -> None:
    """Fake kernels also run where one of several tensors is on the meta device: refuse, lest the result be no data."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors are on {', '.join(sorted(map(str, devices)))}, not on one device")


@torch.library.register_fake("hubkv::refine", lib=LIBRARY)
def _(scores: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    _same_device(scores, *others)
    return torch.empty_like(scores), scores.new_empty((1,), dtype=torch.int64)


@torch.library.register_fake("hubkv::select", lib=LIBRARY)
def _(refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
    return (
        refined.new_empty((num_groups * rows_per_group,), dtype=torch.int32),
        refined.new_empty((refined.shape[0] * refined.shape[1] + 1,), dtype=torch.int64),
    )


@torch.library.register_fake("hubkv::compact", lib=LIBRARY)
def _(k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor) -> tuple[Tensor, Tensor]:
    _same_device(*k, *v, positions, head_offsets)
    shape = (positions.shape[0], k[0].shape[2])
    return k[0].new_empty(shape), v[0].new_empty(shape)


@torch.library.register_fake("hubkv::compact_into", lib=LIBRARY)
def _(k: Sequence[Tensor], v: Sequence[Tensor], *others: Tensor) -> None:
    _same_device(*k, *v, *others)


@torch.library.register_fake("hubkv::plan", lib=LIBRARY)
def _(
    arena: Tensor, segments: Tensor, num_layers: int, num_kv_heads: int, capacity: int, min_rows_per_item: int
) -> tuple[Tensor, Tensor]:
    _same_device(arena, segments)
    return (
        segments.new_empty((num_layers, capacity, 4), dtype=torch.int32),
        segments.new_empty((num_layers,), dtype=torch.int32),
    )


@torch.library.register_fake("hubkv::attend", lib=LIBRARY)
def _(q: Tensor, *tables: object) -> Tensor:
    _same_device(q, *tables)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.register_fake("hubkv::append", lib=LIBRARY)
def _(*tensors: object) -> None:
    _same_device(*tensors)


@torch.library.register_fake("hubkv::score_window", lib=LIBRARY)
def _(
    q: Tensor,
    positions: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    tail_tokens: int,
    tail_base: int,
    num_kv_heads: int,
    *others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _same_device(q, positions, arena, segments, block_table)
    heads = q.shape[0] * num_kv_heads
    size = (positions.shape[0] + heads * tail_tokens,)
    return (
        q.new_empty(size, dtype=torch.float32),
        q.new_empty(size, dtype=torch.float32),
        q.new_empty(size, dtype=torch.int32),
        q.new_empty((heads + 1,), dtype=torch.int64),
    )


@torch.library.register_fake("hubkv::held_out_loss", lib=LIBRARY)
def _(
    q: Tensor,
    ranking: Tensor,
    candidate_positions: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    tail_tokens: int,
    tail_length: int,
    num_kv_heads: int,
    *others: object,
) -> tuple[Tensor, Tensor]:
    _same_device(q, ranking, candidate_positions, arena, segments, block_table)
    shape = (q.shape[0] * num_kv_heads, LEVELS + 1)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("hubkv::calibrate_top_p", lib=LIBRARY)
def _(
    raw: Tensor, transformed: Tensor, candidate_positions: Tensor, candidate_offsets: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    _same_device(raw, transformed, candidate_positions, candidate_offsets)
    heads = (candidate_offsets.shape[0] - 1,)
    return raw.new_empty(heads, dtype=torch.int32), raw.new_empty(heads), torch.empty_like(raw)


@torch.library.register_fake("hubkv::select_ragged", lib=LIBRARY)
def _(
    scores: Tensor,
    candidate_positions: Tensor,
    candidate_offsets: Tensor,
    counts: Tensor,
    num_rows: int,
    sink_tokens: int,
) -> tuple[Tensor, Tensor]:
    _same_device(scores, candidate_positions, candidate_offsets, counts)
    return scores.new_empty((num_rows,), dtype=torch.int32), torch.empty_like(candidate_offsets)


@torch.library.register_fake("hubkv::merge_into", lib=LIBRARY)
@torch.library.register_fake("hubkv::rewrite_into", lib=LIBRARY)
def _(*tensors: object) -> None:
    _same_device(*tensors)
