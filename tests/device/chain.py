# SPDX-License-Identifier: Apache-2.0
"""All six stages one after the other on one set of tensors, as prefill and a decode step call them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hubkv_trt import ops

L, HKV, G, D, T, B, TQ, P, MAX_PAGES = 2, 2, 4, 64, 300, 2, 3, 16, 4
K = L * HKV * T // 4
CAPACITY, ITEM_ROWS = B * HKV + 12, 16
_SIDE, _TABLE = K * D * 4, 256
SEGMENT = 2 * _SIDE + _TABLE  # k_rows, v_rows, head_offsets
PAGE_BASE = B * SEGMENT
PAGE = L * 2 * HKV * P * D * 4
LAYER_STAGES = [f"attend of layer {layer}" for layer in range(L)]


def inputs(seed: int) -> dict[str, Tensor]:
    """CPU tensors of the same shapes for every seed: scores, parameters, rows and all tables differ.

    Sequence 0 has no segment yet: chain() writes it. Sequence 1 has one, or none where seed is odd.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    def ints(*shape: int, low: int = 0, high: int) -> Tensor:
        return torch.from_numpy(rng.integers(low, high, shape).astype(np.int32))

    arena = torch.zeros(PAGE_BASE + B * MAX_PAGES * PAGE, dtype=torch.uint8)
    arena[PAGE_BASE:].view(torch.float32).copy_(normal(B * MAX_PAGES * PAGE // 4))
    arena[SEGMENT : SEGMENT + 2 * _SIDE].view(torch.float32).copy_(normal(2 * K * D))
    offsets = np.sort(np.concatenate([[0, K], rng.integers(0, K, L * HKV - 1)]))
    arena[2 * SEGMENT - _TABLE :][: 8 * len(offsets)].view(torch.int64).copy_(torch.from_numpy(offsets))
    starts = torch.tensor([[b * SEGMENT, b * SEGMENT + _SIDE, (b + 1) * SEGMENT - _TABLE, -1] for b in range(B)])
    if seed % 2:
        starts[1] = -1
    pages = torch.from_numpy(rng.permutation(B * MAX_PAGES).astype(np.int32).reshape(B, MAX_PAGES))
    return {
        "scores": torch.from_numpy(rng.random((L, HKV, T), np.float32)),
        "alpha": torch.tensor([rng.random()], dtype=torch.float32),
        "window": ints(1, high=20),
        "k": normal(L, T, HKV, D),
        "v": normal(L, T, HKV, D),
        "arena": arena,
        "segments": starts,
        "block_table": pages,
        "tail_lengths": ints(B, high=MAX_PAGES * P - TQ),
        "new_lengths": ints(B, high=TQ + 1),
        "q": normal(L, B, TQ, HKV * G, D),
        "k_new": normal(L, B, TQ, HKV, D),
        "v_new": normal(L, B, TQ, HKV, D),
    }


def chain(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each stage gives; `arena` of x is written to."""
    arena, tails = x["arena"], (x["block_table"], x["tail_lengths"], x["new_lengths"])
    refined, non_finite = ops.refine(x["scores"], x["alpha"], x["window"], 5, 0.5, 0.5, 0.8, 1.2, 4)
    positions, offsets = ops.select(refined, 1, K)
    k, v = ([layer.transpose(0, 1) for layer in x[name]] for name in "kv")
    k_rows, v_rows = (arena[at : at + _SIDE].view(torch.float32).view(K, D) for at in (0, _SIDE))
    ops.compact_into(k, v, positions, offsets, k_rows, v_rows)
    arena[2 * _SIDE :][: offsets.numel() * 8].copy_(offsets.view(torch.uint8))
    work, work_count = ops.plan(arena, x["segments"], L, HKV, CAPACITY, ITEM_ROWS)
    rows = zip(x["q"], x["k_new"], x["v_new"], strict=True)
    out = {
        name: ops.attend(*row, arena, x["segments"], *tails, work, work_count, layer, L, P, PAGE_BASE, 0.0)
        for layer, (name, row) in enumerate(zip(LAYER_STAGES, rows, strict=True))
    }
    ops.append(x["k_new"], x["v_new"], arena, *tails, P, PAGE_BASE)
    results = {"refine": refined, "non-finite": non_finite, "select": positions, "offsets": offsets}
    # A list beyond its count is not written.
    listed = torch.arange(CAPACITY, device=work.device) < work_count[:, None]
    return {**results, "plan": work * listed[:, :, None], "plan's counts": work_count, **out, "arena": arena}


def expect(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal bit for bit, attend within 1e-5.

    Raises:
        AssertionError: a stage's result differs; the message names the stage.
    """
    for name, want in expected.items():
        exact = name not in LAYER_STAGES
        torch.testing.assert_close(
            results[name].cpu(),
            want,
            rtol=0 if exact else 1e-5,
            atol=0 if exact else 1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
