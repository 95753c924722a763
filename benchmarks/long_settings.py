# SPDX-License-Identifier: Apache-2.0
"""Ways to compress a cache while it decodes, all as values of ``HardKVConfig``, at one mean budget of bytes."""

from __future__ import annotations

from hubkv_trt.config import HARD_KV_PRESETS, Budgets, Evicted, HardKVConfig, Importance

CONDENSED_ROWS = 4
BIAS_BYTES = 4


def settings(budget: int, interval: int, window: int, row_bytes: int = 516) -> dict[str, HardKVConfig | None]:
    """By name.

    Args:
        budget: b, rows that a layer keeps as a mean over its heads, beside the tail.
        interval: decode steps between two compressions.
        window: queries that judge.
        row_bytes: of a row without a bias, its position included. Condensed rows, and the bias that every row then
            has, are paid for with kept rows.
    """
    base = HardKVConfig(interval=interval, query_window=window, recent=max(64, window), layer_budget=budget,
                        upper_budget=2 * budget)  # fmt: skip
    beside = base.replace(fill=True, condensed_rows=CONDENSED_ROWS,
                          layer_budget=budget * row_bytes // (row_bytes + BIAS_BYTES) - CONDENSED_ROWS)  # fmt: skip
    static = base.replace(p=1.0, upper_budget=budget)
    return {
        "dense": None,
        "top-k": static,
        "top-p": base.replace(layer_budget=None, upper_budget=None),
        "HARD-KV": base,  # p and the budget as bounds
        "HARD-KV fixed": base.replace(fill=True),  # the whole budget, heads share it by need
        "held-out": base.replace(**HARD_KV_PRESETS["held_out"]),  # the same, by what is lost
        "held-out, p": base.replace(budgets=Budgets.HELD_OUT, upper_budget=None),
        "HARD-KV merged": beside,
        "HARD-KV summarized": beside.replace(condense=Evicted.SUMMARIZE),
        "HARD-KV refined": base.replace(fill=True, refine=True),
        "SnapKV": static.replace(importance=Importance.SNAPKV),
        "R-KV": static.replace(importance=Importance.RKV),
        "StreamingLLM": base.replace(p=1e-6, min_rows=0, recent=base.recent + budget, layer_budget=base.sink_tokens,
                                     upper_budget=base.sink_tokens),
    }  # fmt: skip
