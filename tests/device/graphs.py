# SPDX-License-Identifier: Apache-2.0
"""A captured CUDA graph of all stages follows what its tensors say at each replay.

python -m device.graphs
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from device.chain import chain, expect, inputs

SEEDS = (0, 1, 2, 3)


def host_results() -> list[dict[str, Tensor]]:
    """Of each seed, by the host kernels."""
    return [chain(inputs(seed)) for seed in SEEDS]


def capture(x: dict[str, Tensor]) -> tuple[Callable[[], None], dict[str, Tensor]]:
    """A graph of chain(x) on the GPU: what replays it, and the results that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(x)  # what a first call allocates (the arena's table) is not part of the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(x)
    return graph.replay, results


def check(expected: list[dict[str, Tensor]], device: str = "cuda") -> None:
    """Replays with other scores, parameters, rows, segments, page tables and lengths in the same memory. On the CPU the
    calls are made again instead.

    Raises:
        AssertionError: a replay gave other results than the host kernels.
    """
    x = {name: value.to(device, copy=True) for name, value in inputs(SEEDS[-1]).items()}
    replay, results = capture(x) if device == "cuda" else (lambda: results.update(chain(x)), {})
    for seed, want in zip(SEEDS, expected, strict=True):
        for name, value in inputs(seed).items():
            x[name].copy_(value)
        replay()
        expect(results, want)
        print(f"  replay with the tables of seed {seed}: as the host kernels")


if __name__ == "__main__":
    check(host_results())
