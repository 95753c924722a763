# SPDX-License-Identifier: Apache-2.0
"""The condensed tier of a compression while decoding, fitted: rows for what each head loses (``summarize.fit``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.base import INT32_MAX
from ...summarize.fit import SummaryRows, summarize_evicted
from ...summarize.heads import EMPTY
from ..cache import Segment

_MOST_ELEMENTS = 1 << 23
"""Of the judges' weights, or of keys, that are in memory at once: heads go through in parts."""


@torch.inference_mode()
def summarize_into(
    queries: Tensor,
    candidates: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    old: Segment,
    tail: Tensor,
    count: int,
    target: Segment,
) -> None:
    """Writes a summary of the candidates that a head does not keep behind those that it keeps, for all heads.

    The judges are the queries of all G query heads of a KV head, over the candidates alone, as when these were chosen.
    A row that stands for nothing has bias -inf, and a position that no sink has.

    Args:
        queries: the sequence's last ones, [L, n, Hq, D].
        candidates: positions int32 [N] and offsets int64 [L*Hkv + 1] (``ops.score_window``): rows of ``old``, then the
            tokens of ``tail``.
        kept: indices int32 [K'] and head offsets int64 [L*Hkv + 1] (``ops.select_ragged``).
        old: the segment that is compressed.
        tail: K and V of tokens that leave the tail, [2, L*Hkv, tokens, D].
        count: m, 1..8.
        target: has the kept rows of each head already, and room for m behind them.
    """
    assert target.row_bias is not None
    (positions, offsets), (indices, head_offsets) = candidates, kept
    heads, head_dim, width = tail.shape[1], tail.shape[3], int(offsets.diff().max())
    group = queries.shape[2] * queries.shape[0] // heads
    judges = queries.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)
    owner = torch.repeat_interleave(head_offsets.diff())
    step = max(1, _MOST_ELEMENTS // (width * max(judges.shape[1], head_dim)))
    parts = []
    for first in range(0, heads, step):
        last = min(first + step, heads)
        keys, values, bias = _padded(old, tail, first, last, width)
        gone = bias > EMPTY
        mine = slice(int(head_offsets[first]), int(head_offsets[last]))
        gone[owner[mine] - first, indices[mine].long()] = False
        scale = head_dim**-0.5
        parts.append(summarize_evicted(judges[first:last].float(), keys, values, ~gone, count, scale, bias=bias))
    fields = (torch.cat([getattr(part, name) for part in parts]) for name in SummaryRows.__annotations__)
    keys, values, bias, tokens = (field.flatten(0, 1) for field in fields)
    empty = bias <= EMPTY
    slots = (head_offsets[1:, None] + count * torch.arange(heads)[:, None] + torch.arange(count)).flatten()
    for rows, found in ((target.k_rows, keys), (target.v_rows, values)):
        rows[slots] = found.masked_fill_(empty.unsqueeze(1), 0).to(rows.dtype)
    target.row_bias[slots] = bias.masked_fill_(empty, -torch.inf)
    target.positions[slots] = positions[offsets[:-1].repeat_interleave(count) + tokens].masked_fill_(empty, INT32_MAX)


def _padded(old: Segment, tail: Tensor, first: int, last: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates of some heads: keys and values float32 [H, width, D], bias float32 [H, width], ``EMPTY`` where a
    row stands for nothing or there is none."""
    offsets = old.head_offsets[first : last + 1]
    sizes, rows = offsets.diff(), slice(int(offsets[0]), int(offsets[-1]))
    owner = torch.repeat_interleave(sizes)
    place = torch.arange(len(owner)) - (offsets[:-1] - offsets[0])[owner]
    heads, behind = torch.arange(last - first)[:, None], sizes[:, None] + torch.arange(tail.shape[2])
    keys, values = (torch.zeros(last - first, width, tail.shape[3]) for _ in range(2))
    for padded, compact, later in ((keys, old.k_rows, tail[0]), (values, old.v_rows, tail[1])):
        padded[owner, place] = compact[rows].float()
        padded[heads, behind] = later[first:last].float()
    bias = torch.full((last - first, width), EMPTY)
    bias[owner, place] = 0.0 if old.row_bias is None else old.row_bias[rows].clamp_min(EMPTY)
    bias[heads, behind] = 0
    return keys, values, bias
