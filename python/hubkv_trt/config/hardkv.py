# SPDX-License-Identifier: Apache-2.0
"""The compression while decoding: HARD-KV's parameters (arXiv 2606.28831)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from .base import INT32_MAX, Config, require
from .hubkv import MOST_CENTROIDS, Evicted
from .model import ModelConfig

MOST_QUERIES = 256  # that the stage score_window takes


class Importance(str, Enum):
    """How much a KV pair matters to the last queries of its head (docs/hard-kv.md)."""

    VANILLA = "vanilla"  # mean attention weight
    SNAPKV = "snapkv"  # the same, each pair raised to the best of its neighbourhood
    RKV = "rkv"  # mixed with how much the pair's key differs from its neighbours'


class Budgets(str, Enum):
    """What decides how many pairs each head keeps (docs/hard-kv.md)."""

    MASS = "mass"  # the attention mass, of the queries that order the pairs, that they hold: the paper's
    HELD_OUT = "held_out"  # what later queries lose where the first of the window order the pairs


HARD_KV_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},  # the paper's
    "held_out": {"budgets": Budgets.HELD_OUT, "fill": True, "upper_budget": None},
}


@dataclass(frozen=True)
class HardKVConfig(Config):
    """Parameters of the cascade cache. The paper's are defaults of ``p``, ``query_window``, ``interval`` and budgets.

    The tail holds the ``recent`` last tokens and up to ``interval`` more. When it is full, the tokens before the recent
    ones join the compact segment, of which each head keeps what its last queries need.

    Attributes:
        p: attention mass that each head keeps (of the calibrated distribution; with ``budgets`` = ``held_out`` 1 less
            the root mean square of what the judges lose); 1 keeps every pair. ``fill`` keeps what it keeps.
        query_window: W, the last queries of each head that judge, at most 256. With ``budgets`` = ``held_out`` the
            oldest sixteenth, at least one, orders and the others judge.
        interval: decode steps between two compressions; at least ``query_window``.
        layer_budget: rows of the compact segment that a layer keeps at most, as a mean over its KV heads; with
            ``budgets`` = ``held_out`` all layers, as a mean over all KV heads. None: no limit but the text's length.
        upper_budget: rows that a single head keeps at most. None: as many as there are to share.
        recent: tokens that are always kept, in the tail; at least ``query_window``.
        sink_tokens: the first tokens of the text are kept, too.
        importance: what orders the pairs of a head.
        pool_kernel: pairs, odd, that ``snapkv`` looks over for the best.
        importance_share: of the importance in ``rkv``; the rest is what sets a key apart.
        refine: HubKV's refinement (``HubKVConfig()``) follows the importance: local hubs stay, their neighbours are
            discounted, the more the larger the fraction of rows is that the compression drops.
        min_rows: that a head keeps at least.
        condensed_rows: m, rows of each head beside ``layer_budget`` that stand for what a compression evicts; 0: that
            is dropped. Needs a ``layer_budget``.
        condense: how: ``merge``, groups of neighbours with the log-sum-exp of their attention; ``summarize``, at most 8
            rows fitted to what the last queries read of the evicted (``summarize.fit``).
        budgets: how many pairs each head keeps is decided by their attention ``mass``, each layer by itself, or by what
            ``held_out`` queries lose without the others, all heads of the model together: these share the rows of all
            layers.
        fill: all of ``layer_budget`` is kept, whatever ``p`` would keep: a fixed budget, spread over heads by need.
        calibrate: brings each head's distribution to the sharpness of its plain attention before ``p`` cuts it
            (``budgets`` = ``mass``).
    """

    p: float = 0.9
    query_window: int = 32
    interval: int = 128
    layer_budget: int | None = 1024
    upper_budget: int | None = 2048
    recent: int = 64
    sink_tokens: int = 4
    importance: Importance = Importance.VANILLA
    pool_kernel: int = 5
    importance_share: float = 0.1
    refine: bool = False
    min_rows: int = 8
    condensed_rows: int = 0
    condense: Evicted = Evicted.MERGE
    budgets: Budgets = Budgets.MASS
    fill: bool = False
    calibrate: bool = True

    def __post_init__(self) -> None:
        ok = isinstance(self.p, (int, float)) and not isinstance(self.p, bool) and 0 < self.p <= 1
        require(ok, "p", self.p, "a number in (0, 1], the attention mass that is kept")
        window = self.query_window
        ok = type(window) is int and 1 <= window <= MOST_QUERIES
        require(ok, "query_window", window, f"an integer in 1..{MOST_QUERIES}")
        for name, least in (("interval", 16), ("recent", 1), ("sink_tokens", 0), ("min_rows", 0)):
            value = getattr(self, name)
            require(type(value) is int and least <= value <= INT32_MAX, name, value, f"an integer >= {least}")
        for name in ("recent", "interval"):  # the queries that judge come after all that they judge
            value = getattr(self, name)
            require(value >= window, name, value, f"at least query_window = {window}")
        for name in ("layer_budget", "upper_budget"):
            value, least = getattr(self, name), max(1, self.sink_tokens, self.min_rows)
            ok = value is None or (type(value) is int and least <= value <= INT32_MAX)
            require(ok, name, value, f"an integer >= {least} or null")
        require(isinstance(self.importance, Importance), "importance", self.importance, "an Importance")
        require(isinstance(self.budgets, Budgets), "budgets", self.budgets, "a Budgets")
        ok = self.budgets is Budgets.MASS or window > 1
        require(ok, "query_window", window, "at least 2 with budgets = held_out: one orders, one judges")
        pool, share = self.pool_kernel, self.importance_share
        require(
            type(pool) is int and 1 <= pool <= 255 and pool % 2 == 1, "pool_kernel", pool, "an odd number in 1..255"
        )
        ok = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        require(ok, "importance_share", share, "a number in [0, 1]")
        for name in ("calibrate", "fill", "refine"):
            require(type(getattr(self, name)) is bool, name, getattr(self, name), "true or false")
        rows = self.condensed_rows
        require(type(rows) is int and 0 <= rows <= 256, "condensed_rows", rows, "an integer in 0..256")
        ok = rows == 0 or self.layer_budget is not None
        require(ok, "condensed_rows", rows, "possible without a layer_budget")
        ok = self.condense in (Evicted.MERGE, Evicted.SUMMARIZE)
        require(ok, "condense", self.condense, "merge or summarize; condensed_rows = 0 drops what is evicted")
        fits = rows <= MOST_CENTROIDS or self.condense is Evicted.MERGE
        require(fits, "condensed_rows", rows, f"at most {MOST_CENTROIDS}, for condense = summarize")
        require(not self.fill or self.layer_budget is not None, "fill", self.fill, "possible without a layer_budget")

    @classmethod
    def from_preset(cls, preset: str = "default", **changes: Any) -> HardKVConfig:
        """``default``: the paper's parameters; ``held_out``: the whole budget, shared by what held-out queries lose.

        Raises:
            ValueError: there is no such preset.
        """
        if preset not in HARD_KV_PRESETS:
            raise ValueError(f"preset: {preset!r} is not one of {', '.join(HARD_KV_PRESETS)}")
        return cls(**{**HARD_KV_PRESETS[preset], **changes})

    @property
    def tail_tokens(self) -> int:
        """Tokens that the tail of a sequence comes to hold while it decodes."""
        return self.recent + self.interval

    def rows(self, model: ModelConfig) -> int:
        """Rows that the compact segment of a sequence can come to hold."""
        most = model.max_position_embeddings
        kept = most if self.layer_budget is None else min(most, self.layer_budget)
        return model.num_rows_per_token * (kept + self.condensed_rows)
