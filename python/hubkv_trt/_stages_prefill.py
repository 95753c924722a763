# SPDX-License-Identifier: Apache-2.0
"""refine, select and compact: check tensors against each other, fill the parameter structs, call libhubkv.

Sizes and parameters are the library's to refuse, each with its name; checked here is what only a tensor knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _abi
from ._library import call, workspace_bytes
from ._operators import operator
from ._tensors import address, check, check_dims, dtype_code, int32, place, row_strides, workspace


@operator()
def refine(
    scores: Tensor,
    alpha: Tensor,
    window: Tensor,
    nms_kernel: int,
    penalty_factor: float,
    head_weight_temperature: float,
    min_head_weight: float,
    max_head_weight: float,
    sink_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Score refinement: hubs keep their score, their neighbours are discounted, heads are calibrated, protected tokens
    get +inf.

    Args:
        scores: float32 [L, Hkv, T]. L is the layers of this call.
        alpha: float32 [1] in [0, 1], compression ratio ^ gate power; 0 leaves the scores as they are.
        window: int32 [1], how many of the last tokens are protected.
        nms_kernel: tokens of the window in which a hub is the largest; odd.
        penalty_factor: gamma in [0, 1], what a token that is no hub keeps of its score.
        head_weight_temperature: tau >= 0; 0 weighs all heads alike.
        min_head_weight: lower bound of a head's weight, > 0.
        max_head_weight: upper bound of a head's weight.
        sink_tokens: how many of the first tokens are protected.

    Returns:
        refined float32 [L, Hkv, T], and int64 [1]: how many scores were NaN or infinite.
    """
    check_dims(scores, "scores", "L Hkv T")
    check(scores, "scores", torch.float32, (None, None, None), scores.device)
    check(alpha, "alpha", torch.float32, (1,), scores.device)
    check(window, "window", torch.int32, (1,), scores.device)
    params = _abi.RefineParams(
        *scores.shape,
        int32(nms_kernel, "nms_kernel"),
        penalty_factor,
        head_weight_temperature,
        min_head_weight,
        max_head_weight,
        int32(sink_tokens, "sink_tokens"),
    )
    device, stream = place(scores)
    scratch = workspace(scores, workspace_bytes("hubkv_refine_workspace", device, params))
    refined = torch.empty_like(scores)
    non_finite = torch.empty(1, dtype=torch.int64, device=scores.device)
    call(
        "hubkv_refine",
        device,
        stream,
        params,
        address(scores),
        address(alpha),
        address(window),
        address(refined),
        address(non_finite),
        address(scratch),
        scratch.numel(),
    )
    return refined, non_finite


@operator()
def select(refined: Tensor, num_groups: int, rows_per_group: int) -> tuple[Tensor, Tensor]:
    """Exactly the K largest of each group of heads. Equal values: the lower flat index (head, token) wins.

    Args:
        refined: float32 [L, Hkv, T].
        num_groups: S, groups that L*Hkv heads are cut into: 1 (model scope), L (layer) or L*Hkv (head).
        rows_per_group: K of each group, 0..L*Hkv*T/S.

    Returns:
        positions int32 [S*K], ascending within a head, and head_offsets int64 [L*Hkv + 1], the rows before each head.
    """
    check_dims(refined, "refined", "L Hkv T")
    check(refined, "refined", torch.float32, (None, None, None), refined.device)
    num_layers, num_kv_heads, num_tokens = refined.shape
    heads = num_layers * num_kv_heads
    if num_groups < 1 or heads % num_groups != 0:
        raise ValueError(f"num_groups: {num_groups} does not divide L * Hkv = {heads}")
    params = _abi.SelectParams(num_groups, heads // num_groups, num_tokens, rows_per_group)
    device, stream = place(refined)
    scratch = workspace(refined, workspace_bytes("hubkv_select_workspace", device, params))
    positions = torch.empty(num_groups * rows_per_group, dtype=torch.int32, device=refined.device)
    head_offsets = torch.empty(heads + 1, dtype=torch.int64, device=refined.device)
    call(
        "hubkv_select",
        device,
        stream,
        params,
        address(refined),
        address(positions),
        address(head_offsets),
        address(scratch),
        scratch.numel(),
    )
    return positions, head_offsets


@operator()
def compact(k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Copies the kept rows of any number of layers together, unchanged.

    Args:
        k: per layer [Hkv, T, D], float32, float16 or bfloat16; any head and token strides that all layers share, the D
            values of a row dense.
        v: as k, with strides of its own.
        positions: int32 [K], from :func:`select`.
        head_offsets: int64 [L*Hkv + 1], from :func:`select`.

    Returns:
        k_rows and v_rows [K, D].
    """
    if not k:
        raise ValueError("k: it has no layers")
    check_dims(k[0], "k[0]", "Hkv T D")
    k_rows, v_rows = (k[0].new_empty((positions.numel(), k[0].shape[2])) for _ in "kv")
    compact_into(k, v, positions, head_offsets, k_rows, v_rows)
    return k_rows, v_rows


@operator("k_rows", "v_rows")
def compact_into(
    k: Sequence[Tensor], v: Sequence[Tensor], positions: Tensor, head_offsets: Tensor, k_rows: Tensor, v_rows: Tensor
) -> None:
    """:func:`compact` that writes to k_rows and v_rows [K, D], for example a segment in the arena."""
    if not k or len(k) != len(v):
        raise ValueError(f"k, v: {len(k)} and {len(v)} layers are not the same number >= 1")
    check_dims(k[0], "k[0]", "Hkv T D")
    num_kv_heads, num_tokens, head_dim = k[0].shape
    strides = (*row_strides(k, "k", k[0]), *row_strides(v, "v", k[0]))
    num_rows = positions.numel()
    check(positions, "positions", torch.int32, (None,), k[0].device)
    check(head_offsets, "head_offsets", torch.int64, (len(k) * num_kv_heads + 1,), k[0].device)
    check(k_rows, "k_rows", k[0].dtype, (num_rows, head_dim), k[0].device)
    check(v_rows, "v_rows", k[0].dtype, (num_rows, head_dim), k[0].device)
    params = _abi.CompactParams(len(k), num_kv_heads, num_tokens, head_dim, num_rows, dtype_code(k[0], "k"), *strides)
    pointers = ctypes.c_void_p * len(k)
    call(
        "hubkv_compact",
        *place(k[0]),
        params,
        pointers(*map(address, k)),
        pointers(*map(address, v)),
        address(positions),
        address(head_offsets),
        address(k_rows),
        address(v_rows),
    )
