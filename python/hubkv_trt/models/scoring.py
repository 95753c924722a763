# SPDX-License-Identifier: Apache-2.0
"""What a scorer gets of a prompt while it is prefilled, and what it gives: the interface of ``hubkv_trt.scorers``.

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
