# SPDX-License-Identifier: Apache-2.0
"""A Triton server on tiny engines, for the tests: its repository, its log, its metrics."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hubkv_trt.serving.counters import read_metrics
from hubkv_trt.serving.repository import ModelParameters, write_model
from hubkv_trt.serving.responder import PUBLISH_SECONDS
from hubkv_trt.serving.triton_server import TritonServer

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "triton_repo" / "hubkv"
ENVIRONMENT = Path(os.environ.get("HUBKV_TRITON_ENVIRONMENT", ROOT / ".venv-triton"))
CACHE_BYTES = 64 << 20
SECONDS = 60.0  # for any one answer


class TritonSite:
    """A running server with ``hubkv`` (decoupled) and ``hubkv_unary`` of one engine.

    Args:
        engine: its directory.
        folder: for the repository and the log.
        max_waiting: of ``hubkv``; ``hubkv_unary`` has room for two.
        cache_bytes: of each model.
        copy_engine: each model has a copy.
        lifetime: seconds after which the server is stopped, whatever happens.

    Attributes:
        engine: its directory.
        repository: the model repository; more models may be put in and loaded.
        server: the server.
    """

    def __init__(
        self,
        engine: Path,
        folder: Path,
        *,
        max_waiting: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        copy_engine: bool = True,
        lifetime: float = 900.0,
    ) -> None:
        self.engine = engine
        self._cache_bytes = cache_bytes
        self._copy_engine = copy_engine
        self.repository = folder / "repository"
        self._log = folder / "triton.log"
        self.add_model("hubkv", max_waiting=max_waiting)
        self.add_model("hubkv_unary", decoupled=False, max_waiting=2)
        options = ["--model-control-mode=explicit", "--load-model=hubkv", "--load-model=hubkv_unary"]
        self.server = TritonServer(ENVIRONMENT, self.repository, options=options, log=self._log)
        self._deadline = threading.Timer(lifetime, self.server.stop)
        self._deadline.daemon = True
        self._deadline.start()

    def add_model(self, name: str, decoupled: bool = True, **parameters: Any) -> Path:
        """Writes a model; the folder of its version. ``parameters`` are those of ``ModelParameters``."""
        given = ModelParameters(str(self.engine), cache_bytes=self._cache_bytes, **parameters)
        folder = write_model(
            TEMPLATE, self.repository, given, name=name, decoupled=decoupled, copy_engine=self._copy_engine
        )
        return folder / "1"

    def log(self) -> str:
        """What the server and its models have printed."""
        return self._log.read_text(errors="replace")

    def url(self, model: str, call: str) -> str:
        """Of an HTTP call such as ``generate``."""
        return f"http://{self.server.http}/v2/models/{model}/{call}"

    def metrics(self, model: str = "hubkv") -> dict[str, float]:
        """The model's own metrics, as ``read_metrics`` has them."""
        with urllib.request.urlopen(f"http://{self.server.metrics}/metrics", timeout=SECONDS) as answer:
            return read_metrics(answer.read().decode(), model)

    def wait_for(self, condition: Callable[[dict[str, float]], bool], model: str = "hubkv") -> dict[str, float]:
        """Metrics that fulfil the condition."""
        deadline = time.monotonic() + SECONDS
        while True:
            values = self.metrics(model)
            if condition(values):
                return values
            assert time.monotonic() < deadline, values
            time.sleep(0.2)

    def wait_until_idle(self, model: str = "hubkv") -> dict[str, float]:
        """Metrics when no request and no context is left and the whole cache is free again, all of them published."""
        while True:
            values = self.wait_for(lambda values: all(values.get(name) == 0 for name in HELD), model)
            time.sleep(3 * PUBLISH_SECONDS)
            if self.metrics(model) == values:
                return values

    def idle_totals(self) -> dict[str, float]:
        """Counters of both models together, when both are idle."""
        both = [self.wait_until_idle(model) for model in ("hubkv", "hubkv_unary")]
        return {key: both[0].get(key, 0) + both[1].get(key, 0) for key in both[0].keys() | both[1].keys()}

    def stop(self) -> int:
        """Stops the server; its exit status."""
        self._deadline.cancel()
        return self.server.stop()


HELD = (
    'hubkv_requests{state="running"}',
    'hubkv_requests{state="waiting"}',
    "hubkv_contexts",
    'hubkv_arena_bytes{of="used"}',
    'hubkv_arena_bytes{of="reserved"}',
    'hubkv_kv_bytes{of="kept"}',
)
