# SPDX-License-Identifier: Apache-2.0
"""The service's counters on Triton's metrics port."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..runtime.metrics import Histogram, Metrics

_HELP = {
    "hubkv_arena_bytes": "Bytes of the KV cache: its size, what is promised to running requests, what is held",
    "hubkv_kv_bytes": "Bytes of K and V of the prompts held now: without compression, kept, saved",
    "hubkv_tier_rows": "KV rows of running requests, all layers and heads: tails (dense), compact segments (sparse)",
    "hubkv_tier_bytes": "Bytes of the cache that these tiers hold",
    "hubkv_decode_compressions_total": "Compressions of caches while their requests decoded",
    "hubkv_decode_compression_seconds_total": "Seconds that these took",
    "hubkv_requests": "Requests in the service",
    "hubkv_contexts": "Compressed contexts that are kept",
    "hubkv_rows_kept_total": "Rows kept by prefills, by the upper bound of their effective compression ratio",
    "hubkv_tokens_total": "Tokens that went through the engine",
    "hubkv_prefill_seconds_total": "Seconds that the engine took for prompts and documents",
    "hubkv_requests_finished_total": "Requests that have ended",
    "hubkv_requests_refused_total": "Requests refused because the queue was full",
    "hubkv_preemptions_total": "Running requests that had to start again",
    "hubkv_evictions_total": "Contexts that made room for others",
    "hubkv_first_token_seconds": "Seconds from a request's arrival to its first token",
    "hubkv_inter_token_seconds": "Seconds between two tokens of a request",
}


class Sample(NamedTuple):
    """A value of a family; names that end in ``_total``, ``_bucket``, ``_sum`` or ``_count`` only grow."""

    name: str
    labels: dict[str, str]
    value: float

    @property
    def grows(self) -> bool:
        return self.name.endswith(("_total", "_bucket", "_sum", "_count"))

    @property
    def help(self) -> str:
        return _HELP.get(self.name) or _HELP[self.name.rpartition("_")[0]]


def samples(metrics: Metrics) -> Iterator[Sample]:
    """All of them. Histograms come as the counters that Prometheus makes of one: Triton's own can only observe."""
    m = metrics
    for name, label, values in (
        ("hubkv_arena_bytes", "of", {"size": m.arena_bytes_total, "reserved": m.arena_bytes_reserved,
                                     "used": m.arena_bytes_used}),
        ("hubkv_kv_bytes", "of", {"dense": m.kv_bytes_dense, "kept": m.kv_bytes_kept, "saved": m.kv_bytes_saved}),
        ("hubkv_tier_rows", "tier", m.tier_rows),
        ("hubkv_tier_bytes", "tier", m.tier_bytes),
        ("hubkv_requests", "state", {"running": m.running, "waiting": m.waiting}),
        ("hubkv_rows_kept_total", "ratio", {f"{bound:g}": rows for bound, rows in m.rows_kept.items()}),
        ("hubkv_tokens_total", "phase", {"prefill": m.prefill_tokens, "question": m.question_tokens,
                                         "decode": m.decode_tokens}),
        ("hubkv_requests_finished_total", "reason", m.finished),
    ):  # fmt: skip
        for key, value in values.items():
            yield Sample(name, {label: key}, value)
    yield Sample("hubkv_contexts", {}, m.contexts)
    yield Sample("hubkv_prefill_seconds_total", {}, m.prefill_seconds)
    yield Sample("hubkv_requests_refused_total", {}, m.refused)
    yield Sample("hubkv_decode_compressions_total", {}, m.compressions)
    yield Sample("hubkv_decode_compression_seconds_total", {}, m.compression_seconds)
    yield Sample("hubkv_preemptions_total", {}, m.preemptions)
    yield Sample("hubkv_evictions_total", {}, m.evictions)
    yield from _histogram("hubkv_first_token_seconds", m.first_token_seconds)
    yield from _histogram("hubkv_inter_token_seconds", m.inter_token_seconds)


def _histogram(name: str, histogram: Histogram) -> Iterator[Sample]:
    for bound, count in histogram.cumulative():
        yield Sample(f"{name}_bucket", {"le": "+Inf" if bound == float("inf") else f"{bound:g}"}, count)
    yield Sample(f"{name}_sum", {}, histogram.sum)
    yield Sample(f"{name}_count", {}, histogram.count)


def read_metrics(text: str, model: str) -> dict[str, float]:
    """A model's metrics out of what Triton's metrics port gives: ``name{label="value"}`` without the model's label."""
    values = {}
    for name, labels, value in re.findall(r"^(hubkv_\w+)\{(.*)\} (\S+)$", text, flags=re.M):
        parts = labels.split(",")
        if f'model="{model}"' in parts:
            parts.remove(f'model="{model}"')
            values[name + (f"{{{parts[0]}}}" if parts else "")] = float(value)
    return values


class Exporter:
    """Keeps Triton's metrics equal to the service's.

    Args:
        pb_utils: the module of that name of Triton's Python backend.
        model: its name, a label of every metric.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pb_utils = pb_utils
        self._model = model
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._values: dict[tuple[str, str], float] = {}

    def publish(self, metrics: Metrics) -> None:
        """Sends what has changed; each value is a message to the server's process."""
        for sample in samples(metrics):
            key = (sample.name, next(iter(sample.labels.values()), ""))
            last = self._values.get(key)
            if last == sample.value:
                continue
            if last is None:
                self._metrics[key] = self._family(sample).Metric(labels={"model": self._model, **sample.labels})
            if sample.grows:
                self._metrics[key].increment(sample.value - (last or 0))
            else:
                self._metrics[key].set(sample.value)
            self._values[key] = sample.value

    def close(self) -> None:
        """Takes the metrics off the port; Triton wants them gone before their families."""
        self._metrics.clear()
        self._families.clear()

    def _family(self, sample: Sample) -> Any:
        if sample.name not in self._families:
            family = self._pb_utils.MetricFamily
            kind = family.COUNTER if sample.grows else family.GAUGE
            self._families[sample.name] = family(name=sample.name, description=sample.help, kind=kind)
        return self._families[sample.name]
