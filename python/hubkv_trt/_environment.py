# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment that torch reads when it is imported. What a user has set stays."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def set_defaults() -> None:
    """To be called before torch is imported; afterwards it changes nothing."""
    # torch's OpenMP threads wait by spinning, for milliseconds after each of the hundreds of operations of a step, and
    # so take the cores from this library's threads and from other processes. A short spin covers the gap between two
    # operations.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Where two threads of a process have run torch, as in a server, GNU's OpenMP spins a tenth of that, which is too
    # short: steps took 3 to 5 % longer. "active" lifts that limit; it does not make the spin longer than the count
    # above. Other implementations know no count and would spin for ever.
    if _has_gnu_openmp():
        os.environ.setdefault("OMP_WAIT_POLICY", "active")
    # Weights and long activations in huge pages, where the system leaves that to programs: reading them is bound by the
    # lookup of addresses otherwise (twice as fast where measured).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _has_gnu_openmp() -> bool:
    """Whether the torch that would be imported brings libgomp, as its wheels for Linux do."""
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None and any(Path(found.origin).parent.glob("lib/libgomp*"))
