# SPDX-License-Identifier: Apache-2.0
"""What scorers and summaries get of a prompt while it is prefilled, and what they give.

The gate (``models/gate.py``) needs none of it: it is part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

X = TypeVar("X")


@dataclass(frozen=True)
class LayerStates(Generic[X]):
    """What the attention of one layer reads of a prompt of T tokens, at positions 0..T-1."""

    layer: int
    hidden: X  # [T, E], the attention input, after ``input_norm``
    queries: X  # [T, Hq, D], rotated
    keys: X  # [T, Hkv, D], rotated
    values: X  # [T, Hkv, D]


@runtime_checkable
class LayerScorer(Protocol[X]):
    """Scores the KV pairs of a layer as soon as the layer has its queries, keys and values."""

    def score(self, states: LayerStates[X]) -> X:
        """Higher is kept rather: [Hkv, T] float32 in [0, 1].

        A method whose own values lie elsewhere maps them by one strictly increasing function for all heads and
        layers, named in its docstring: without the refinement that changes no choice.
        """
        ...


@runtime_checkable
class PromptScorer(Protocol[X]):
    """Scores all layers at once when the whole prompt has been read: dense K and V of all layers live until then."""

    def score_prompt(self, input_ids: X, keys: Sequence[X], values: Sequence[X]) -> Sequence[X]:
        """As ``LayerScorer.score``, for each layer.

        Args:
            input_ids: int32 [T].
            keys: of each layer, rotated [T, Hkv, D].
            values: of each layer [T, Hkv, D].

        Raises:
            ValueError: a prompt that it cannot score.
        """
        ...


class EvictedRows(Protocol[X]):
    """Compaction where the KV pairs of a head that are not kept leave rows behind (``hubkv_trt.summarize``)."""

    def see(self, queries: X) -> None:
        """The queries [T, Hq, D] of the next layer, rotated."""
        ...

    def compact(self, keys: Sequence[X], values: Sequence[X], positions: X, head_offsets: X) -> tuple[X, X, X, X]:
        """As ``Ops.compact``, each head's m rows behind its kept ones.

        Args:
            keys: of some successive layers, [T, Hkv, D] each.
            values: the same.
            positions: int32 [K], kept, of those layers.
            head_offsets: int64 [heads + 1], theirs.

        Returns:
            k_rows and v_rows [K + m*heads, D], and positions and head offsets of all rows.
        """
        ...
