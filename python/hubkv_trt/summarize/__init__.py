# SPDX-License-Identifier: Apache-2.0
"""Summarising what would be evicted, in place of deleting it.

Selection, reconstruction, compression as published (doi 10.5281/zenodo.19657329), with its evaluation:

    report = run("synthetic", [synthetic_heads()])
    print(describe(report))
"""

from __future__ import annotations

from .collect import collect_attention, model_heads
from .report import Report, describe, run
from .synthetic import synthetic_heads

__all__ = ["Report", "collect_attention", "describe", "model_heads", "run", "synthetic_heads"]
