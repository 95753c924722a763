# SPDX-License-Identifier: Apache-2.0
"""Which backend an engine is built for: ``eager`` runs everywhere, ``tensorrt`` needs a GPU, its library and plugin."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..config import Backend

PLUGIN_FILE = "libhubkv_plugin.so"


def missing_for_tensorrt() -> Iterator[str]:
    """What stands between this machine and a TensorRT engine, each with its remedy; nothing where nothing does."""
    import torch

    from .. import _library

    if importlib.util.find_spec("tensorrt") is None:
        yield "the Python package tensorrt (pip install 'hubkv-trt[tensorrt]')"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        yield "the Python package cuda-python (pip install 'hubkv-trt[tensorrt]')"
    if not torch.cuda.is_available():
        yield "an NVIDIA GPU that PyTorch can use (torch.cuda.is_available() is false)"
    if not _library.has_cuda():
        yield "CUDA kernels in libhubkv (this one was built without CUDA)"
    if not (_library.find().parent / PLUGIN_FILE).is_file():
        yield f"the TensorRT plugin {PLUGIN_FILE} (this installation has none)"


def choose_backend(asked: str) -> tuple[Backend, str]:
    """The backend to build for, and why.

    Args:
        asked: ``auto`` (tensorrt where it can be had, else eager), ``eager`` or ``tensorrt``.

    Raises:
        ValueError: another word, or ``tensorrt`` where something is missing: the message lists what.
    """
    choices = ("auto", *(backend.value for backend in Backend))
    if asked not in choices:
        raise ValueError(f"backend: {asked!r} is not one of {', '.join(choices)}")
    if asked == Backend.EAGER.value:
        return Backend.EAGER, "as asked"
    missing = missing_for_tensorrt()
    first = next(missing, None)
    if first is None:
        return Backend.TENSORRT, "as asked" if asked == Backend.TENSORRT.value else "everything it needs is here"
    if asked == Backend.TENSORRT.value:
        items = "\n".join(f"  - {item}" for item in (first, *missing))
        raise ValueError(
            f"backend: tensorrt cannot be built on this machine. Missing:\n{items}\n"
            "Use --backend eager (PyTorch on the CPU with the same C++ kernels) or build where these are installed"
        )
    return Backend.EAGER, f"tensorrt cannot be had here: it needs {first}"
