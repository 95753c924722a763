# SPDX-License-Identifier: Apache-2.0
"""Where prefill writes the rows that it keeps: into the segment itself wherever TensorRT can address it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...cuda.upload import ALIGNMENT
from ..arena import align


@dataclass(frozen=True)
class RowOutput:
    """One output that holds kept rows.

    Attributes:
        name: of the output.
        offset: byte of the arena where its rows belong.
        num_bytes: of the rows.
        staged: byte of borrowed memory where they are written first and copied from; None where they are written to
            their place.
    """

    name: str
    offset: int
    num_bytes: int
    staged: int | None


def place_rows(names: Sequence[str], offset: int, num_bytes: int, staged: int) -> Iterator[RowOutput]:
    """Puts outputs of equal size behind each other.

    Args:
        names: of the outputs, in the order of their rows.
        offset: byte of the arena where the first begins, a multiple of 256.
        num_bytes: of each.
        staged: first byte of borrowed memory, a multiple of 256; those that need it take it one behind the other.
    """
    for name in names:
        aligned = offset % ALIGNMENT == 0
        yield RowOutput(name, offset, num_bytes, None if aligned else staged)
        offset += num_bytes
        staged += 0 if aligned else align(num_bytes)


def staged_bytes(count: int, num_bytes: int) -> int:
    """Borrowed memory that ``place_rows`` uses for that many outputs."""
    return sum(align(num_bytes) for i in range(count) if i * num_bytes % ALIGNMENT)
