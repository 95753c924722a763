# SPDX-License-Identifier: Apache-2.0
"""TensorRT's messages in Python's logging, and the last errors for exceptions: TensorRT itself only answers no."""

from __future__ import annotations

import functools
import logging
from typing import Any

LOGGER = logging.getLogger("hubkv_trt.tensorrt")

_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}


@functools.cache
def make_logger(trt: Any) -> Any:
    """The ``ILogger`` of this process, which passes on to the logger ``hubkv_trt.tensorrt``.

    One for all: while anything lives that was made with a logger, TensorRT ignores others.

    Its method ``reason()`` gives the errors since it was last called, in one line, and forgets them; ``failed`` says
    whether there are any.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
    """

    class Messages(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity.name in ("INTERNAL_ERROR", "ERROR"):
                self._errors = [*self._errors[-3:], message.strip()]
            LOGGER.log(_LEVELS.get(severity.name, logging.INFO), "%s", message)

        def reason(self) -> str:
            errors, self._errors = self._errors, []
            return " / ".join(errors) or "TensorRT gave no reason"

        @property
        def failed(self) -> bool:
            return bool(self._errors)

    return Messages()
