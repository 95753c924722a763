# SPDX-License-Identifier: Apache-2.0
"""Whether plans fit the machine: TensorRT binds them to its own version and to a kind of GPU."""

from __future__ import annotations

from typing import Any

from ...config import EngineConfig
from ...cuda.device import Device
from ...engine.bindings import plans_of


def import_tensorrt() -> Any:
    """The module ``tensorrt``.

    Raises:
        ValueError: it is not here.
    """
    try:
        import tensorrt
    except ImportError as error:
        raise ValueError(
            f"backend: tensorrt cannot be run without the Python package tensorrt ({error}): pip install "
            "'hubkv-trt[tensorrt]', or build the engine with --backend eager"
        ) from None
    return tensorrt


def check_machine(config: EngineConfig, tensorrt_version: str, device: Device) -> None:
    """Refuses plans that this TensorRT or this GPU cannot run.

    Args:
        config: of a TensorRT engine.
        tensorrt_version: of the one that is here; compared as far as ``engine.json`` names its own.
        device: that shall run them.

    Raises:
        ValueError: names both versions.
    """
    plans = plans_of(config)
    built = plans.version.split(".") if plans.version else []
    if tensorrt_version.split(".")[: len(built)] != built:
        raise ValueError(
            f"tensorrt.version: the plans were built by TensorRT {plans.version} and cannot be read by "
            f"{tensorrt_version}, which is installed: build the engine again, or install tensorrt=={plans.version}"
        )
    if plans.compute_capability and plans.compute_capability != device.compute_capability:
        raise ValueError(
            f"tensorrt.compute_capability: the plans were built for a GPU of {plans.compute_capability}, GPU "
            f"{device.index} has {device.compute_capability}: build the engine again on it"
        )
