# SPDX-License-Identifier: Apache-2.0
"""What a service counts, as Prometheus wants it: gauges, counters that only grow, and histograms."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of times."""

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Upper bounds of the buckets of effective compression ratios."""


TIERS = ("dense", "sparse")
"""Of the cache of a request: its tail, and its compact segment."""


@dataclass
class Histogram:
    """Observations by size.

    Attributes:
        bounds: upper bounds of the buckets, ascending; one more takes what is larger.
        counts: of each bucket, not cumulative; one more than bounds.
        sum: of all observations.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        return replace(self, counts=list(self.counts))

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), the last bound infinite: Prometheus' buckets."""
        total, pairs = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            pairs.append((bound, total))
        return pairs


@dataclass
class Metrics:
    """A service at the end of a step. Bytes are the ledger's (``runtime/ledger.py``).

    Attributes:
        waiting: gauge: requests that have not started, those whose context is being compressed too.
        running: gauge: requests that hold cache and generate (or are compressed).
        contexts: gauge: contexts that are kept.
        arena_bytes_total: gauge: the cache.
        arena_bytes_used: gauge: segments and tail pages that are held, those of contexts too.
        arena_bytes_reserved: gauge: used, and the tail pages promised to running requests.
        kv_bytes_dense: gauge: K and V of the prompts and contexts held now, without compression.
        kv_bytes_kept: gauge: the segments that stand for them.
        tier_rows: gauge: KV rows of the requests that run, of all heads: ``dense``, their tails; ``sparse``, their
            compact segments (one that several share counts for each).
        tier_bytes: gauge: what the ledger holds for them: pages of tails; segments (a shared one once), and the room
            that requests hold for compressions.
        rows_kept: counter: by bucket of the effective ratio (``RATIOS``, upper bounds), rows kept by prefills.
        prefill_tokens: counter: tokens of prompts and documents.
        prefill_seconds: counter: what the engine took for them.
        question_tokens: counter: tokens of questions over contexts.
        decode_tokens: counter: tokens generated.
        compressions: counter: of caches, while their requests decoded (docs/hard-kv.md).
        compression_seconds: counter: what these took.
        finished: counter: by ``finish_reason``.
        refused: counter: requests that ``submit`` refused because the queue was full.
        preemptions: counter: requests that gave their cache back while they ran, to begin anew (``Policy.overcommit``).
        evictions: counter: contexts that made room for others.
        first_token_seconds: histogram: from ``submit`` to the first token.
        inter_token_seconds: histogram: between two tokens of a request.
    """

    waiting: int = 0
    running: int = 0
    contexts: int = 0
    arena_bytes_total: int = 0
    arena_bytes_used: int = 0
    arena_bytes_reserved: int = 0
    kv_bytes_dense: int = 0
    kv_bytes_kept: int = 0
    tier_rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    tier_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    rows_kept: dict[float, int] = field(default_factory=lambda: dict.fromkeys(RATIOS, 0))
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    question_tokens: int = 0
    decode_tokens: int = 0
    compressions: int = 0
    compression_seconds: float = 0.0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "aborted", "deadline", "error"), 0)
    )
    refused: int = 0
    preemptions: int = 0
    evictions: int = 0
    first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_seconds: Histogram = field(default_factory=Histogram)

    def copy(self) -> Metrics:
        return replace(
            self,
            tier_rows=dict(self.tier_rows),
            tier_bytes=dict(self.tier_bytes),
            rows_kept=dict(self.rows_kept),
            finished=dict(self.finished),
            first_token_seconds=self.first_token_seconds.copy(),
            inter_token_seconds=self.inter_token_seconds.copy(),
        )

    @property
    def kv_bytes_saved(self) -> int:
        """Gauge: what compression spares now."""
        return self.kv_bytes_dense - self.kv_bytes_kept
