# SPDX-License-Identifier: Apache-2.0
"""The tables of an extend step in one piece, so that one copy brings them to the device."""

from __future__ import annotations

import numpy as np

from ...cuda.upload import layout
from ...engine.bindings import Binding
from ..batch import Tables

ITEM_BYTES = {"int32": 4, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class TableImage:
    """Where the inputs of a step lie, on the host and on the device alike; each at a multiple of 256 bytes.

    What changes with the members of a batch and their pages comes first (``segments``, ``block_table``), what changes
    with every step behind it, so that a step may copy the second part alone.

    Args:
        batch_size: B, at most.
        num_tokens: B*Tq, at most.
        pages: columns of the block table.

    Attributes:
        offsets: bytes from the beginning by the name of the input.
        num_bytes: of the whole.
        step_start: first byte of the second part.
    """

    def __init__(self, batch_size: int, num_tokens: int, pages: int) -> None:
        self.pages = pages
        sizes = {
            "segments": batch_size * 4 * 8,
            "block_table": batch_size * pages * 4,
            "tail_lengths": batch_size * 4,
            "new_lengths": batch_size * 4,
            "last_tokens": batch_size * 4,
            "positions": num_tokens * 4,
            "input_ids": num_tokens * 4,
        }
        self.offsets, self.num_bytes = layout(sizes)
        self.step_start = self.offsets["tail_lengths"]

    def fill(
        self, buffer: np.ndarray, tables: Tables | None, token_ids: np.ndarray | None, batch_size: int, num_new: int
    ) -> None:
        """Writes the inputs of a step.

        Rows behind the batch's own (all, without tables) are sequences without a segment, tail or new token.

        Args:
            buffer: uint8 [num_bytes].
            tables: of b <= ``batch_size`` sequences, Tq = ``num_new``.
            token_ids: int32 [b, Tq]; None leaves zeros, where they are on the device.
            batch_size: B of the step.
            num_new: Tq of the step.
        """
        count = 0 if tables is None else tables.segments.shape[0]

        def view(name: str, dtype: type, *shape: int) -> np.ndarray:
            start, size = self.offsets[name], int(np.prod(shape)) * np.dtype(dtype).itemsize
            return buffer[start : start + size].view(dtype).reshape(shape)

        segments = view("segments", np.int64, batch_size, 4)
        block_table = view("block_table", np.int32, batch_size, self.pages)
        positions = view("positions", np.int32, batch_size, num_new)
        input_ids = view("input_ids", np.int32, batch_size, num_new)
        last_tokens = view("last_tokens", np.int32, batch_size)
        segments[count:] = -1
        block_table[:] = -1
        positions[count:] = 0
        input_ids[:] = 0
        last_tokens[:] = np.arange(batch_size) * num_new
        for name in ("tail_lengths", "new_lengths"):
            view(name, np.int32, batch_size)[count:] = 0
        if tables is None:
            return
        segments[:count] = tables.segments.numpy()
        block_table[:count, : tables.block_table.shape[1]] = tables.block_table.numpy()
        positions[:count] = tables.positions.numpy().reshape(count, num_new)
        last_tokens[:count] = tables.last_tokens.numpy()
        view("tail_lengths", np.int32, batch_size)[:count] = tables.tail_lengths.numpy()
        view("new_lengths", np.int32, batch_size)[:count] = tables.new_lengths.numpy()
        if token_ids is not None:
            input_ids[:count] = token_ids


def binding_bytes(binding: Binding, **letters: int) -> int:
    """Bytes of an input or output whose dynamic dimensions have these sizes; ``N`` is B*Tq, where it has both."""
    num_bytes = ITEM_BYTES[binding.dtype]
    if "N" in letters and {"B", "Tq"} <= set(binding.dims):
        letters = {**letters, "B": letters["N"], "Tq": 1}
    for letter, size in zip(binding.dims, binding.shape, strict=True):
        num_bytes *= letters[letter] if size < 0 else size
    return num_bytes


def batch_sizes(most: int) -> list[int]:
    """The batch sizes that decoding is recorded for: powers of two below ``most``, and ``most``."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def smallest_that_holds(count: int, sizes: list[int]) -> int:
    """The first of ascending sizes that is not less than ``count``."""
    return next(size for size in sizes if size >= count)


def question_pieces(lengths: np.ndarray, width: int) -> list[np.ndarray]:
    """Cuts the new tokens of a batch into steps of at most ``width`` tokens a sequence.

    Args:
        lengths: int32 [B], new tokens of each, >= 1.
        width: >= 1.

    Returns:
        int32 [B] for each step: how many tokens of each sequence it takes; 0 where a sequence has no more.
    """
    steps = -(-int(lengths.max()) // width)
    return [np.clip(lengths - step * width, 0, width).astype(np.int32) for step in range(steps)]
