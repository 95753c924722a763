# SPDX-License-Identifier: Apache-2.0
"""The device that work runs on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import CudaError, call, runtime


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        index: its number among those that this process sees.
        compute_capability: ``9.0``.
    """

    index: int
    compute_capability: str


def current_device() -> Device:
    """PyTorch's current device, made current for other libraries on this thread too.

    Raises:
        ValueError: there is none that can be used; says what CUDA says.
    """
    try:
        count = call("cudaGetDeviceCount")
        index = torch.cuda.current_device() if count and torch.cuda.is_available() else -1
        if index < 0:
            raise ValueError(
                "backend: tensorrt needs an NVIDIA GPU that PyTorch can use, and torch.cuda.is_available() is false: "
                "install a PyTorch with CUDA, or build the engine with --backend eager"
            )
        call("cudaSetDevice", index)
        attribute = runtime().cudaDeviceAttr
        major = call("cudaDeviceGetAttribute", attribute.cudaDevAttrComputeCapabilityMajor, index)
        minor = call("cudaDeviceGetAttribute", attribute.cudaDevAttrComputeCapabilityMinor, index)
    except CudaError as error:
        raise ValueError(
            f"backend: tensorrt needs an NVIDIA GPU, and CUDA finds none that it can use ({error}): install a driver, "
            "or build the engine with --backend eager"
        ) from error
    return Device(index, f"{major}.{minor}")
