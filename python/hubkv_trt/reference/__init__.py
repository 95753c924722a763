# SPDX-License-Identifier: Apache-2.0
"""The stages in NumPy, written to be read: the oracles that the host and CUDA kernels are held to.

Names and argument order are those of :mod:`hubkv_trt.ops`. NumPy has no bfloat16: an array of uint16 holds its bits.
"""

from .append import append
from .attend import attend
from .calibrate_top_p import calibrate_top_p
from .compact import compact, compact_into
from .held_out_loss import held_out_loss
from .merge import merge_into
from .plan import plan
from .refine import refine
from .rewrite import rewrite_into
from .score_window import score_window
from .select import select
from .select_ragged import select_ragged

__all__ = [
    "refine",
    "select",
    "compact",
    "compact_into",
    "plan",
    "attend",
    "append",
    "score_window",
    "held_out_loss",
    "calibrate_top_p",
    "select_ragged",
    "rewrite_into",
    "merge_into",
]
