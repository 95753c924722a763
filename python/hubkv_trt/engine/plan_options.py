# SPDX-License-Identifier: Apache-2.0
"""How plans are built. Apart from ``plans.py``: the command line wants it before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import require


@dataclass(frozen=True)
class PlanOptions:
    """How plans are built; nothing of it changes what they compute.

    Attributes:
        workspace_bytes: what a layer may use beside its inputs and outputs, at most; None leaves it to TensorRT.
        timing_cache: file with the timings of earlier builds, read where it is there and written anew: a second build
            takes less time and gives the same plan.
    """

    workspace_bytes: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        given = self.workspace_bytes
        ok = given is None or (type(given) is int and given >= 1 << 20)
        require(ok, "workspace_bytes", given, "a number of bytes of at least 1 MiB")
        cache = self.timing_cache
        require(cache is None or not cache.is_dir(), "timing_cache", str(cache), "a file")
