# SPDX-License-Identifier: Apache-2.0
"""rewrite and merge, in the way of ``_stages_prefill.py``: the new compact segment of a sequence that was compressed
while it decodes. ``_stages_decode.py`` says what candidates are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _abi
from ._library import call
from ._operators import operator
from ._stages_decode import candidates_params
from ._tensors import address, arena_table, check, check_dims, place, shape_text


@operator("k_rows", "v_rows", "positions", "row_bias")
def rewrite_into(
    candidate_positions: Tensor,
    indices: Tensor,
    head_offsets: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    num_compact_rows: int,
    tail_tokens: int,
    tail_base: int,
    num_layers: int,
    page_tokens: int,
    page_base: int,
    k_rows: Tensor,
    v_rows: Tensor,
    positions: Tensor,
    row_bias: Tensor | None,
) -> None:
    """Copies the kept candidates together as a new compact segment, bytes of keys and values unchanged. The segment
    that they come from must lie elsewhere: it stays whole, so that decoding may go on over it.

    Args:
        candidate_positions: int32 [N], from :func:`score_window`.
        indices: int32 [K'], from :func:`select_ragged`. One outside its head's candidates gives a row of zeros at
            position 0 with bias -inf.
        head_offsets: int64 [L*Hkv + 1], from :func:`select_ragged`; the new segment's, which the caller stores.
        arena: uint8 [bytes].
        segments: int64 [1, 4], of the old segment.
        block_table: int32 [1, maxPages].
        num_compact_rows: K, rows of the old segment.
        tail_tokens: as for :func:`score_window`.
        tail_base: as for :func:`score_window`.
        num_layers: L.
        page_tokens: P.
        page_base: byte offset of page 0 in the arena.
        k_rows: [K', D], written to, for example a segment in the arena; its dtype is that of the cache.
        v_rows: [K', D], written to.
        positions: int32 [K'], written to.
        row_bias: float32 [K'], written to: the old rows' bias, 0 for tokens of the tail. None: biases are dropped.
    """
    _rewrite(
        candidate_positions,
        indices,
        head_offsets,
        (arena, segments, block_table),
        (num_compact_rows, tail_tokens, tail_base),
        num_layers,
        (page_tokens, page_base),
        0,
        (k_rows, v_rows, positions, row_bias),
    )


@operator("k_rows", "v_rows", "positions", "row_bias")
def merge_into(
    logits: Tensor,
    candidate_positions: Tensor,
    indices: Tensor,
    head_offsets: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    num_compact_rows: int,
    tail_tokens: int,
    tail_base: int,
    num_layers: int,
    page_tokens: int,
    page_base: int,
    merged_rows: int,
    k_rows: Tensor,
    v_rows: Tensor,
    positions: Tensor,
    row_bias: Tensor,
) -> None:
    """:func:`rewrite_into` that does not lose what is evicted: behind its kept rows, each head gets ``merged_rows``
    rows that stand for its other candidates (tier 3 of the cascade of HARD-KV, arXiv 2606.28831; the formula is ours).

    The evicted candidates of a head are cut into that many groups of neighbours, of equal size. With weights
    w = softmax(logits) over a group its row is key = sum w_i k_i, value = sum w_i v_i and
    bias = sum w_i (bias_i - log w_i). By Jensen's inequality the row's logit is never more than the log-sum-exp of its
    members' logits, and equal to it for a query that weighs the members by w. Merged rows may be merged again: their
    bias is among bias_i.

    Args:
        logits: float32 [N], raw of :func:`score_window`.
        indices: int32 [K'], ascending within a head.
        head_offsets: int64 [L*Hkv + 1], rows of ``indices`` before each head. Those of the new segment are
            head_offsets[h] + h*merged_rows.
        merged_rows: m >= 0. A group without members is a row of zeros at position 0 with bias -inf.
        k_rows: [K' + L*Hkv*m, D], written to.
        v_rows: [K' + L*Hkv*m, D], written to.
        positions: int32 [K' + L*Hkv*m], written to; of a merged row that of its group's last candidate.
        row_bias: float32 [K' + L*Hkv*m], written to.

    The rest is as for :func:`rewrite_into`.
    """
    check(logits, "logits", torch.float32, tuple(candidate_positions.shape), candidate_positions.device)
    where, params, arrays = _rewrite(
        candidate_positions,
        indices,
        head_offsets,
        (arena, segments, block_table),
        (num_compact_rows, tail_tokens, tail_base),
        num_layers,
        (page_tokens, page_base),
        merged_rows,
        (k_rows, v_rows, positions, row_bias),
    )
    call("hubkv_merge", *where, params, address(logits), *arrays)


def _rewrite(
    candidate_positions: Tensor,
    indices: Tensor,
    head_offsets: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    old_rows: tuple[int, int, int],
    num_layers: int,
    pages: tuple[int, int],
    merged_rows: int,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> tuple[tuple[int, int | None], _abi.RewriteParams, tuple[int | None, ...]]:
    """Checks all tensors and copies what is kept; device and stream, parameters, and addresses of the call.

    Args:
        tables: arena, segments, block_table.
        old_rows: num_compact_rows, tail_tokens, tail_base.
        pages: page_tokens, page_base.
        outputs: k_rows, v_rows, positions, row_bias.
    """
    device = candidate_positions.device
    k_rows, v_rows, positions, row_bias = outputs
    check(candidate_positions, "candidate_positions", torch.int32, (None,), device)
    check(indices, "indices", torch.int32, (None,), device)
    check(head_offsets, "head_offsets", torch.int64, (None,), device)
    heads = head_offsets.numel() - 1
    if num_layers < 1 or heads < 1 or heads % num_layers != 0:
        raise ValueError(f"num_layers: {num_layers} does not divide the {heads} heads of head_offsets")
    num_rows = indices.numel() + heads * merged_rows
    check_dims(k_rows, "k_rows", "K D")
    check(k_rows, "k_rows", k_rows.dtype, (num_rows, None), device)
    check(v_rows, "v_rows", k_rows.dtype, tuple(k_rows.shape), device)
    check(positions, "positions", torch.int32, (num_rows,), device)
    if row_bias is not None:
        check(row_bias, "row_bias", torch.float32, (num_rows,), device)
    num_kv_heads = heads // num_layers
    candidates = candidates_params(k_rows, "k_rows", *tables, num_layers, num_kv_heads, *old_rows, *pages, 0)
    expected = old_rows[0] + heads * old_rows[1]
    if candidate_positions.numel() != expected:
        raise ValueError(
            f"candidate_positions: {shape_text(candidate_positions)} is not [{expected}], K + L*Hkv*tail_tokens"
        )
    arena, segments, block_table = tables
    where, params = place(candidate_positions), _abi.RewriteParams(candidates, indices.numel(), merged_rows)
    arrays = (
        address(candidate_positions),
        address(indices),
        address(head_offsets),
        arena_table(arena),
        address(segments),
        address(block_table),
        address(k_rows),
        address(v_rows),
        address(positions),
        None if row_bias is None else address(row_bias),
    )
    call("hubkv_rewrite", *where, params, *arrays)
    return where, params, arrays
