# SPDX-License-Identifier: Apache-2.0
"""Rows of one sequence in a paged KV cache of equal length per head, moved together in place."""

from __future__ import annotations

import torch
from torch import Tensor


def compact_pages(pool: Tensor, pages: Tensor, positions: Tensor) -> None:
    """Token ``positions[h, i]`` of head h becomes its token i, in K and in V, unchanged. Other pages are not touched.

    Args:
        pool: [N, 2, Hkv, P, D], dense: all pages of a layer, K and then V in each.
        pages: int64 [n], the pages of the sequence in the order of its tokens.
        positions: int [Hkv, M], M <= n*P, each in 0..n*P-1; in any order.

    Raises:
        ValueError: a tensor does not fit.
    """
    if pool.ndim != 5 or pool.shape[1] != 2 or not pool.is_contiguous():
        raise ValueError(f"pool: {list(pool.shape)} is not a dense [N, 2, Hkv, P, D]")
    heads, count = positions.shape
    if heads != pool.shape[2] or count > pages.shape[0] * pool.shape[3]:
        raise ValueError(f"positions: {list(positions.shape)} does not fit {heads} heads of {pages.shape[0]} pages")
    rows = pool.view(-1, pool.shape[4])
    packed = torch.arange(count, device=positions.device).expand(heads, count)
    moved = rows.index_select(0, _row_numbers(pool, pages, positions))  # a copy: source and target overlap
    rows.index_copy_(0, _row_numbers(pool, pages, packed), moved)


def _row_numbers(pool: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """Where the K and V rows of tokens int [Hkv, M] lie in ``pool.view(-1, D)``: int64 [2*Hkv*M]."""
    _, planes, heads, page_tokens, _ = pool.shape
    positions = positions.long()
    page = pages[positions // page_tokens]
    plane = torch.arange(planes, device=positions.device)[:, None, None]
    head = torch.arange(heads, device=positions.device)[:, None]
    return (((page * planes + plane) * heads + head) * page_tokens + positions % page_tokens).flatten()
