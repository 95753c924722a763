# SPDX-License-Identifier: Apache-2.0
"""Ways to compress a cache while it decodes, all as values of ``HardKVConfig``, at one mean budget of rows."""

from __future__ import annotations

from hubkv_trt.config import HardKVConfig, Importance


def settings(budget: int, interval: int, window: int) -> dict[str, HardKVConfig | None]:
    """By name.

    Args:
        budget: b, rows that a layer keeps as a mean over its heads, beside the tail.
        interval: decode steps between two compressions.
        window: queries that judge.
    """
    base = HardKVConfig(interval=interval, query_window=window, recent=max(64, window), layer_budget=budget,
                        upper_budget=2 * budget)  # fmt: skip
    static = base.replace(p=1.0, upper_budget=budget)
    return {
        "dense": None,
        "top-k": static,
        "top-p": base.replace(layer_budget=None, upper_budget=None),
        "HARD-KV": base,  # p and the budget as bounds
        "HARD-KV fixed": base.replace(fill=True),  # the whole budget, heads share it by need
        "HARD-KV merged": base.replace(fill=True, condensed_rows=4, layer_budget=budget - 4),
        "HARD-KV refined": base.replace(fill=True, refine=True),
        "SnapKV": static.replace(importance=Importance.SNAPKV),
        "R-KV": static.replace(importance=Importance.RKV),
        "StreamingLLM": base.replace(p=1e-6, min_rows=0, recent=base.recent + budget, layer_budget=base.sink_tokens,
                                     upper_budget=base.sink_tokens),
    }  # fmt: skip
