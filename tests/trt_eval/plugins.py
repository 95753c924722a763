# SPDX-License-Identifier: Apache-2.0
"""Nodes of HubKV's plugins, run by ``torch.ops.hubkv``. Inputs, fields and outputs: docs/plugin.md."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

import hubkv_trt.ops  # noqa: F401 (registers torch.ops.hubkv)
from hubkv_trt.graph.lowered import PluginCall

_DEFAULTS: dict[str, dict[str, float]] = {
    "HubKVRefine": {
        "nms_kernel": 5, "penalty_factor": 0.5, "head_weight_temperature": 0.5, "min_head_weight": 0.8,
        "max_head_weight": 1.2, "sink_tokens": 4,
    },
    "HubKVSelect": {"num_groups": 1},
    "HubKVCompact": {"token_major": 1},
    "HubKVAttend": {"page_base": 0, "scale": 0.0},
}  # fmt: skip
_REQUIRED = {"HubKVAttend": {"layer", "page_tokens"}}


def run(call: PluginCall, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What the plugin of a node makes of its inputs, shape tensors last."""
    given = {name: value.item() for name, value in call.fields.items()}
    fields = {**_DEFAULTS[call.name], **given}
    known = _DEFAULTS[call.name].keys() | _REQUIRED.get(call.name, set())
    if fields.keys() != known:
        raise ValueError(f"{call.name}: fields {sorted(given)}, it has {sorted(known)}")
    return tuple(_STAGES[call.name](fields, *inputs))


def _refine(fields: dict[str, Any], scores: Tensor, alpha: Tensor, window: Tensor) -> tuple[Tensor, ...]:
    names = (
        "nms_kernel",
        "penalty_factor",
        "head_weight_temperature",
        "min_head_weight",
        "max_head_weight",
        "sink_tokens",
    )
    return torch.ops.hubkv.refine(scores.contiguous(), alpha, window, *(fields[name] for name in names))


def _select(fields: dict[str, Any], refined: Tensor, rows_per_group: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.hubkv.select(refined, fields["num_groups"], int(rows_per_group))


def _compact(fields: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    *rows, positions, head_offsets = inputs
    if fields["token_major"]:
        rows = [x.transpose(0, 1) for x in rows]
    half = len(rows) // 2
    return torch.ops.hubkv.compact(rows[:half], rows[half:], positions, head_offsets)


def _attend(
    fields: dict[str, Any], q: Tensor, k_new: Tensor, v_new: Tensor, arena: Tensor, segments: Tensor, *tables: Tensor
) -> tuple[Tensor, ...]:
    shape, batch = q.shape, segments.shape[0]
    q, k_new, v_new = (x.contiguous().view(batch, -1, *x.shape[-2:]) for x in (q, k_new, v_new))
    block_table, tail_lengths, new_lengths, work, work_count = tables
    out = torch.ops.hubkv.attend(
        q, k_new, v_new, memory(arena), segments, block_table, tail_lengths, new_lengths, work, work_count,
        fields["layer"], work.shape[0], fields["page_tokens"], fields["page_base"], fields["scale"],
    )  # fmt: skip
    return (out.view(shape),)


def memory(arena: Tensor) -> Tensor:
    """The bytes that an arena tensor, int64 [2] (address, size), stands for."""
    address, size = arena.tolist()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


_STAGES = {"HubKVRefine": _refine, "HubKVSelect": _select, "HubKVCompact": _compact, "HubKVAttend": _attend}
