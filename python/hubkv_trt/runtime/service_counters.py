# SPDX-License-Identifier: Apache-2.0
"""Counts what a service does, in its own thread."""

from __future__ import annotations

import bisect
import time

from .cache import Cache
from .metrics import RATIOS, TIERS, Metrics
from .scheduler import Phase
from .sequence import Sequence
from .service_contexts import Contexts
from .service_job import Job
from .stats import RequestStats


class Counters:
    """Counters grow as things happen; gauges are read from what holds the memory.

    Args:
        cache: of the engine.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._metrics = Metrics(arena_bytes_total=cache.num_bytes)

    def evicted(self) -> None:
        self._metrics.evictions += 1

    def preempted(self) -> None:
        self._metrics.preemptions += 1

    def finished(self, reason: str) -> None:
        self._metrics.finished[reason] += 1

    def step(self, phase: Phase, sequences: list[Sequence]) -> None:
        """A step of the engine, with what took part in it."""
        metrics = self._metrics
        for sequence in sequences if phase in (Phase.PREFILL, Phase.QUESTION) else ():
            if sequence.error is not None or sequence.prefill is not None:
                continue
            if phase is Phase.QUESTION:
                metrics.question_tokens += len(sequence.token_ids)
            elif sequence.budget is not None:
                metrics.prefill_tokens += len(sequence.token_ids)
                metrics.prefill_seconds += sequence.stats.seconds["prefill"]
                bucket = RATIOS[bisect.bisect_left(RATIOS, sequence.stats.effective_ratio)]
                metrics.rows_kept[bucket] += sequence.budget.num_rows

    def tokens(self, job: Job) -> None:
        """What the request's sequence has generated since the last call."""
        assert job.sequence is not None
        self._compressions(job, job.sequence.stats)
        new = len(job.sequence.output_ids) - job.counted
        if new == 0:
            return
        now = time.perf_counter()
        if job.counted == 0:
            self._metrics.first_token_seconds.observe(now - job.submitted)
        else:
            self._metrics.inter_token_seconds.observe(now - job.last_token)
        self._metrics.decode_tokens += new
        job.counted, job.last_token = job.counted + new, now

    def _compressions(self, job: Job, stats: RequestStats) -> None:
        if stats.condensations == job.compressions:
            return
        seconds = stats.seconds["condense"]
        self._metrics.compressions += stats.condensations - job.compressions
        self._metrics.compression_seconds += seconds - job.compression_seconds
        job.compressions, job.compression_seconds = stats.condensations, seconds

    def read(self, running: list[Sequence], contexts: Contexts, waiting: int) -> Metrics:
        """All of it now."""
        metrics, cache = self._metrics.copy(), self._cache
        kept = [entry.context for entry in contexts.all() if entry.context is not None]
        stats = [s.stats for s in running if s.budget is not None] + [context.stats for context in kept]
        metrics.waiting, metrics.running, metrics.contexts = waiting, len(running), len(kept)
        metrics.arena_bytes_used, metrics.arena_bytes_reserved = cache.held_bytes, cache.reserved_bytes
        metrics.kv_bytes_dense = sum(s.bytes_dense for s in stats)
        metrics.kv_bytes_kept = sum(s.bytes_kept for s in stats)
        self._read_tiers(metrics, running)
        return metrics

    def _read_tiers(self, metrics: Metrics, running: list[Sequence]) -> None:
        ledger = self._cache.ledger
        heads, segments = ledger.model.num_rows_per_token, set()
        rows, num_bytes = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
        for sequence in running:
            rows["dense"] += max(0, sequence.tail_length) * heads  # less than 0 while its prompt runs
            rows["sparse"] += sequence.segment_rows
            num_bytes["dense"] += len(sequence.tail.pages) * ledger.page_bytes if sequence.tail else 0
            segments |= {sequence.segment, sequence.cascade.slot if sequence.cascade else None} - {None}
        num_bytes["sparse"] = sum(segment.num_bytes for segment in segments if segment)
        metrics.tier_rows, metrics.tier_bytes = rows, num_bytes
