# SPDX-License-Identifier: Apache-2.0
"""An LLM whose steps a test can hold back and look at, for tests of the service over it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hubkv_trt.runtime.llm import LLM
from hubkv_trt.runtime.scheduler import Phase
from hubkv_trt.runtime.service import Service


class PacedEngine:
    """Audits the cache after every step, and that everything in it has an owner.

    Attributes:
        llm: the engine.
        steps: (phase, sequences) of every step that did something.
        spent: tokens of prompts and questions that each of them ran.
        errors: what the audits found.
        at_gate: the service has taken what came in and waits to step.
        after_step: called once, behind the next step.
    """

    def __init__(self, engine: Path, **options: Any) -> None:
        self.llm = LLM(engine, **options)
        self.steps: list[tuple[Phase, list[Any]]] = []
        self.spent: list[int] = []
        self.errors: list[Exception] = []
        self.at_gate = False
        self.after_step: Callable[[], None] | None = None
        self._service: Service | None = None
        self._open = threading.Event()
        self._open.set()
        self._step = self.llm.step
        self.llm.step = self._paced  # type: ignore[method-assign]
        self._spend = self.llm._scheduler.spend
        self.llm._scheduler.spend = self._counted  # type: ignore[method-assign]
        self._now = 0

    def _counted(self, tokens: int) -> None:
        self._now += tokens
        self._spend(tokens)

    def _paced(self) -> tuple[Phase, list[Any]]:
        self.at_gate = not self._open.is_set()
        self._open.wait(60)
        self.at_gate = False
        self._now = 0
        try:
            phase, sequences = self._step()
            self.llm.cache.audit()
            self._check_owners()
        except Exception as error:
            self.errors.append(error)
            raise
        if phase is not Phase.IDLE:
            self.steps.append((phase, sequences))
            self.spent.append(self._now)
        after_step, self.after_step = self.after_step, None
        if after_step is not None:
            after_step()
        return phase, sequences

    def _check_owners(self) -> None:
        """Whatever a service has open in the cache belongs to a sequence or a context that is there."""
        if self._service is None:
            return
        scheduler, cache = self.llm._scheduler, self.llm.cache
        entries = self._service._desk.contexts.all()
        contexts = [c for e in entries for c in (e.context, e.document.compressed) if c is not None]
        segments = {s.segment for s in (*scheduler.running, *scheduler.waiting) if s.segment is not None}
        if cache._tails != {s.tail for s in scheduler.running} or any(s.tail for s in scheduler.waiting):
            raise AssertionError("a tail without a running sequence")
        if cache._segments != segments | {c.segment for c in contexts}:
            raise AssertionError("a segment without an owner")

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step begins in the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextmanager
    def service(self, **options: Any) -> Iterator[Service]:
        """A service; behind the block everything that it held is back, and its counters say so."""
        self.steps.clear()
        self.spent.clear()
        self._service = service = Service(self.llm, **options)
        try:
            yield service
        finally:
            self._open.set()
            service.close()
            self._service = None
        assert not self.errors
        metrics = service.metrics()
        gauges = ("waiting", "running", "contexts", "arena_bytes_used", "arena_bytes_reserved", "kv_bytes_dense")
        assert {name: getattr(metrics, name) for name in gauges} == dict.fromkeys(gauges, 0)
        gc.collect()
        self.llm.cache.audit()
        assert self.llm.cache.reserved_bytes == 0


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Waits for what another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


def first_seen(steps: Sequence[tuple[Phase, list[Any]]]) -> list[int]:
    """Lengths of the prompts, in the order in which their prefill began."""
    prompts = {id(s[0]): len(s[0].token_ids) for phase, s in steps if phase is Phase.PREFILL}
    return list(prompts.values())
