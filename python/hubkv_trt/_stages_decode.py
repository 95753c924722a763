# SPDX-License-Identifier: Apache-2.0
"""score_window, held_out_loss, calibrate_top_p and select_ragged, in the way of ``_stages_prefill.py``: what a sequence
keeps when it is compressed again while it decodes.

The *candidates* of a (layer, KV head) are the rows that may be dropped: its compact rows, then the first
``tail_tokens`` tokens of its tail. Arrays over the candidates of all heads are ragged and packed, N = K +
L*Hkv*tail_tokens long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _abi
from ._library import call, workspace_bytes
from ._operators import operator
from ._tensors import address, arena_table, check, check_dims, dtype_code, int32, place, shape_text, workspace

SCORES = {"vanilla": _abi.SCORE_VANILLA, "snapkv": _abi.SCORE_SNAPKV, "rkv": _abi.SCORE_RKV}


def candidates_params(
    like: Tensor,
    name: str,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    num_layers: int,
    num_kv_heads: int,
    num_compact_rows: int,
    tail_tokens: int,
    tail_base: int,
    page_tokens: int,
    page_base: int,
    sink_tokens: int,
) -> _abi.CandidatesParams:
    """The parameters of a sequence whose rows have the head dimension and dtype of `like`, after its tables were
    checked.
    """
    check(arena, "arena", torch.uint8, (None,), like.device)
    check(segments, "segments", torch.int64, (1, 4), like.device)
    check(block_table, "block_table", torch.int32, (1, None), like.device)
    cache = _abi.CacheParams(
        1,
        num_layers,
        num_kv_heads,
        like.shape[-1],
        dtype_code(like, name),
        page_tokens,
        block_table.shape[1],
        page_base,
        max(num_kv_heads, 1),
    )
    return _abi.CandidatesParams(cache, num_compact_rows, tail_tokens, tail_base, int32(sink_tokens, "sink_tokens"))


@operator()
def score_window(
    q: Tensor,
    positions: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    tail_tokens: int,
    tail_base: int,
    num_kv_heads: int,
    page_tokens: int,
    page_base: int,
    score: str,
    pool_kernel: int,
    mix: float,
    sink_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last queries of one sequence against the keys of its candidates (HARD-KV, arXiv 2606.28831).

    importance_i = mean over the W*G queries of a head of softmax_i(scale * q . k_i + row_bias_i) over its candidates;
    raw_i = log(importance_i), so that softmax(raw) is the importance. transformed_i, by ``score``:

    * ``vanilla``: raw_i;
    * ``snapkv``: the largest raw_j of the ``pool_kernel`` candidates around i that are not protected (SnapKV,
      arXiv 2404.14469: the logarithm of its pooled attention weights). The transform commutes with a temperature;
    * ``rkv``: log(1e-10 + (s_i - min s) / sum_j (s_j - min s)) of s_i = mix * importance_i - (1 - mix) * redundancy_i,
      redundancy = softmax_i(mean over j != i of cosine(k_i, k_j)) (R-KV, arXiv 2505.24133). The mean comes from the sum
      of the unit keys, in O(N D); R-KV's exemption of the latest of several alike keys, which needs all pairs, is left
      out, and so is its pooling of the importance.

    Args:
        q: [L, W, Hq, D], the last W queries (1..256, in any order) of every layer, RoPE applied, at positions behind
            all candidates; float32, float16 or bfloat16, dtype of the cache. Hq/Hkv in 1..16.
        positions: int32 [K], of the compact rows in the text; K = 0 where there is no segment.
        arena: uint8 [bytes].
        segments: int64 [1, 4], byte offsets of the sequence's segment as for :func:`plan`.
        block_table: int32 [1, maxPages].
        tail_tokens: how many of the first tail tokens are candidates.
        tail_base: position of tail token 0 in the text.
        num_kv_heads: Hkv.
        page_tokens: P.
        page_base: byte offset of page 0 in the arena.
        score: ``vanilla``, ``snapkv`` or ``rkv``.
        pool_kernel: candidates that ``snapkv`` pools over, odd, 1..255 (SnapKV: 5 or 7).
        mix: in [0, 1], weight of the importance in ``rkv`` (R-KV: 0.1; its code: 0.07).
        sink_tokens: candidates at positions below are protected.
        scale: of the logits; 0 means 1/sqrt(D).

    Returns:
        raw and transformed float32 [N], candidate_positions int32 [N], candidate_offsets int64 [L*Hkv + 1]: candidate i
        of head h = layer*Hkv + KV head is entry candidate_offsets[h] + i. A row outside the arena has raw -inf.
    """
    check_dims(q, "q", "L W Hq D")
    check(q, "q", q.dtype, q.shape, q.device)
    check(positions, "positions", torch.int32, (None,), q.device)
    if score not in SCORES:
        raise ValueError(f"score: {score!r} is not one of {', '.join(SCORES)}")
    num_layers, num_queries, num_heads, _ = q.shape
    candidates = candidates_params(
        q,
        "q",
        arena,
        segments,
        block_table,
        num_layers,
        num_kv_heads,
        positions.numel(),
        tail_tokens,
        tail_base,
        page_tokens,
        page_base,
        sink_tokens,
    )
    pool = int32(pool_kernel, "pool_kernel")
    params = _abi.ScoreWindowParams(candidates, num_queries, num_heads, SCORES[score], pool, mix, scale)
    device, stream = place(q)
    scratch = workspace(q, workspace_bytes("hubkv_score_window_workspace", device, params))
    heads = num_layers * num_kv_heads
    size = positions.numel() + heads * tail_tokens
    raw, transformed = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2))
    candidate_positions = torch.empty(size, dtype=torch.int32, device=q.device)
    candidate_offsets = torch.empty(heads + 1, dtype=torch.int64, device=q.device)
    call(
        "hubkv_score_window",
        device,
        stream,
        params,
        address(q),
        address(positions),
        arena_table(arena),
        address(segments),
        address(block_table),
        address(raw),
        address(transformed),
        address(candidate_positions),
        address(candidate_offsets),
        address(scratch),
        scratch.numel(),
    )
    return raw, transformed, candidate_positions, candidate_offsets


def _check_scores(scores: Tensor, name: str, candidate_positions: Tensor, candidate_offsets: Tensor) -> int:
    """Checks arrays over N candidates; gives the number of heads."""
    check(scores, name, torch.float32, (None,), scores.device)
    check(candidate_positions, "candidate_positions", torch.int32, tuple(scores.shape), scores.device)
    check(candidate_offsets, "candidate_offsets", torch.int64, (None,), scores.device)
    if candidate_offsets.numel() < 2:
        raise ValueError(f"candidate_offsets: {shape_text(candidate_offsets)} is not [L*Hkv + 1]")
    return candidate_offsets.numel() - 1


@operator()
def held_out_loss(
    q: Tensor,
    ranking: Tensor,
    candidate_positions: Tensor,
    arena: Tensor,
    segments: Tensor,
    block_table: Tensor,
    tail_tokens: int,
    tail_length: int,
    num_kv_heads: int,
    page_tokens: int,
    page_base: int,
    sink_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What each head loses by keeping fewer candidates, as queries say that had no part in ranking them.

    Per head, candidates are cut into 32 levels by how far below the best they rank, half a unit each:
    level_i = min(31, floor(2 * (max ranking - ranking_i))). loss[b] is the mean over the W * G queries of the squared
    attention mass on candidates of level b or more, in a softmax over all that a query sees: the candidates and the
    tail tokens behind them up to its own. rows[b] is how many candidates are left without those, protected ones
    included. ``include/hubkv/hubkv.h`` has every detail.

    Args:
        q: [L, W, Hq, D] of the cache's dtype, RoPE applied: queries of the last W tokens of the tail, oldest first.
            1 <= W <= 256.
        ranking: float32 [N], logarithms: ``transformed`` of :func:`score_window` with earlier queries.
        candidate_positions: int32 [N], from :func:`score_window`.
        arena: uint8 [bytes].
        segments: int64 [1, 4], byte offsets of the sequence's segment as for :func:`plan`.
        block_table: int32 [1, maxPages], with pages for the whole tail.
        tail_tokens: how many of the first tail tokens are candidates.
        tail_length: tokens of the tail, at least tail_tokens + W.
        num_kv_heads: Hkv.
        page_tokens: P.
        page_base: byte offset of page 0 in the arena.
        sink_tokens: candidates at positions below are protected.
        scale: of the logits; 0 means 1/sqrt(D).

    Returns:
        loss float32 [L*Hkv, 33] and rows int32 [L*Hkv, 33]: loss falls and rows grow along a row, to 0 and all
        candidates.
    """
    check_dims(q, "q", "L W Hq D")
    check(q, "q", q.dtype, q.shape, q.device)
    check(ranking, "ranking", torch.float32, (None,), q.device)
    check(candidate_positions, "candidate_positions", torch.int32, tuple(ranking.shape), q.device)
    num_layers, num_queries, num_heads, _ = q.shape
    heads = num_layers * num_kv_heads
    candidates = candidates_params(
        q,
        "q",
        arena,
        segments,
        block_table,
        num_layers,
        num_kv_heads,
        ranking.numel() - heads * tail_tokens,
        tail_tokens,
        0,
        page_tokens,
        page_base,
        sink_tokens,
    )
    params = _abi.HeldOutLossParams(candidates, num_queries, num_heads, tail_length, scale)
    device, stream = place(q)
    scratch = workspace(q, workspace_bytes("hubkv_held_out_loss_workspace", device, params))
    loss = torch.empty(heads, _abi.LEVELS + 1, dtype=torch.float32, device=q.device)
    rows = torch.empty(heads, _abi.LEVELS + 1, dtype=torch.int32, device=q.device)
    call(
        "hubkv_held_out_loss",
        device,
        stream,
        params,
        address(q),
        address(ranking),
        address(candidate_positions),
        arena_table(arena),
        address(segments),
        address(block_table),
        address(loss),
        address(rows),
        address(scratch),
        scratch.numel(),
    )
    return loss, rows


@operator()
def calibrate_top_p(
    raw: Tensor,
    transformed: Tensor,
    candidate_positions: Tensor,
    candidate_offsets: Tensor,
    num_layers: int,
    p: float,
    sink_tokens: int,
    min_rows: int,
    max_rows: int,
    layer_rows: int,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """How many candidates each head keeps: top-p after logits calibration (HARD-KV, arXiv 2606.28831).

    Selection collapse: the same p keeps wildly different numbers of candidates of ``raw`` and of ``transformed``. So,
    per head: n* = size of the top-p set of softmax(raw); the temperature tau at which the n* first of
    softmax(transformed / tau) hold mass p (accepted in [p, p + min(0.01, (1 - p) / 10)], or where top-p at tau keeps
    n*: with transformed = raw tau is 1); then n_h = size of the top-p set of softmax(transformed / tau). Protected
    candidates come first and count with their mass. The order within a head never changes: its n_h first are kept,
    which :func:`select_ragged` picks by ``transformed``. Sums are of integer weights: the same bits on every device.

    Budgets (the summary of the paper that this follows has a layer budget of 1024 and an upper budget of 2048, but no
    rule; the rule is ours): ``max_rows`` cuts a head. Where a layer's heads together exceed ``layer_rows``, one
    threshold on the calibrated probabilities cuts all of its heads, so that the layer loses the least mass.
    ``include/hubkv/hubkv.h`` has every detail.

    Args:
        raw: float32 [N], logits whose softmax is the importance, from :func:`score_window`.
        transformed: float32 [N], the logits to select by.
        candidate_positions: int32 [N], from :func:`score_window`.
        candidate_offsets: int64 [L*Hkv + 1], from :func:`score_window`.
        num_layers: L.
        p: in (0, 1]; 1 keeps all.
        sink_tokens: candidates at positions below are protected: always kept.
        min_rows: that a head keeps at least, as far as it has them; held also against ``layer_rows``.
        max_rows: that a head keeps at most; 0: no bound.
        layer_rows: that all heads of a layer keep at most, together (b rows a head on average are b*Hkv); 0: no bound.
        fill: a layer keeps exactly ``layer_rows``, whatever p would keep (as far as it has them).

    Returns:
        counts int32 [L*Hkv] of n_h, temperature float32 [L*Hkv] of tau, and calibrated float32 [N]:
        softmax(transformed / tau).
    """
    heads = _check_scores(raw, "raw", candidate_positions, candidate_offsets)
    check(transformed, "transformed", torch.float32, tuple(raw.shape), raw.device)
    if num_layers < 1 or heads % num_layers != 0:
        raise ValueError(f"num_layers: {num_layers} does not divide the {heads} heads of candidate_offsets")
    params = _abi.CalibrateTopPParams(
        num_layers,
        heads // num_layers,
        raw.numel(),
        p,
        int32(sink_tokens, "sink_tokens"),
        min_rows,
        max_rows,
        layer_rows,
        bool(fill),
    )
    device, stream = place(raw)
    scratch = workspace(raw, workspace_bytes("hubkv_calibrate_top_p_workspace", device, params))
    counts = torch.empty(heads, dtype=torch.int32, device=raw.device)
    temperature = torch.empty(heads, dtype=torch.float32, device=raw.device)
    calibrated = torch.empty_like(raw)
    call(
        "hubkv_calibrate_top_p",
        device,
        stream,
        params,
        address(raw),
        address(transformed),
        address(candidate_positions),
        address(candidate_offsets),
        address(counts),
        address(temperature),
        address(calibrated),
        address(scratch),
        scratch.numel(),
    )
    return counts, temperature, calibrated


@operator()
def select_ragged(
    scores: Tensor,
    candidate_positions: Tensor,
    candidate_offsets: Tensor,
    counts: Tensor,
    num_rows: int,
    sink_tokens: int,
) -> tuple[Tensor, Tensor]:
    """The counts[h] first candidates of every head: protected ones by index, then the largest scores; of equal ones (-0
    equals +0, NaN ranks as -inf) the lower index.

    Args:
        scores: float32 [N].
        candidate_positions: int32 [N].
        candidate_offsets: int64 [H + 1].
        counts: int32 [H], cut to what a head has.
        num_rows: K, the sum of counts. More rows are left out; indices past the last one are -1.
        sink_tokens: candidates at positions below are protected.

    Returns:
        indices int32 [K], candidates' numbers within their head, ascending; and head_offsets int64 [H + 1], the rows
        before each head.
    """
    heads = _check_scores(scores, "scores", candidate_positions, candidate_offsets)
    check(counts, "counts", torch.int32, (heads,), scores.device)
    params = _abi.SelectRaggedParams(heads, scores.numel(), num_rows, int32(sink_tokens, "sink_tokens"))
    indices = torch.empty(max(num_rows, 0), dtype=torch.int32, device=scores.device)
    head_offsets = torch.empty(heads + 1, dtype=torch.int64, device=scores.device)
    call(
        "hubkv_select_ragged",
        *place(scores),
        params,
        address(scores),
        address(candidate_positions),
        address(candidate_offsets),
        address(counts),
        address(indices),
        address(head_offsets),
    )
    return indices, head_offsets
