# SPDX-License-Identifier: Apache-2.0
"""Why a service takes no request, or not this one."""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """The service has as many waiting requests as it takes; ask again later."""


class ServiceClosedError(RuntimeError):
    """The service was closed, or its loop has failed."""


class UnknownContextError(ValueError):
    """No context has that id: it was never made, was released, or made room for others. Send its document again."""
