# SPDX-License-Identifier: Apache-2.0
"""The stages run on torch's current stream and never wait for the GPU.

python -m device.streams
"""

from __future__ import annotations

import torch
from torch import Tensor

from device.chain import chain, expect, inputs

LONG = 300_000_000  # clocks, some tenths of a second


def check(expected: dict[str, Tensor]) -> None:
    """On a stream that waits before its inputs are there, all stages see these inputs, and the calls return at once.

    Args:
        expected: of ``inputs(1)``, by the host kernels.

    Raises:
        AssertionError: a result is not the one of these inputs, or a call waited.
    """
    x, late = ({name: value.cuda() for name, value in inputs(seed).items()} for seed in (0, 1))
    chain(x)  # what a first call allocates waits
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for name, value in late.items():
            x[name].copy_(value)
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = chain(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not side.query(), "the stages waited for the stream"
    side.synchronize()
    expect(results, expected)
    print("  all stages ran on the current stream; no call waited")


if __name__ == "__main__":
    check(chain(inputs(1)))
