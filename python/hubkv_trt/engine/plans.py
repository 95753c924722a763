# SPDX-License-Identifier: Apache-2.0
"""Builds the two plans of a TensorRT engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import DType, EngineConfig, TensorRTConfig, require
from ..graph.tensorrt import TensorRTOps
from .build_progress import BuildProgress, make_monitor
from .directory import EXTEND_FILE, PREFILL_FILE
from .network import extend_network, prefill_network
from .plan_options import PlanOptions
from .plugin_library import plugin_library
from .profiles import add_profiles, extend_profiles, prefill_profiles
from .trt_log import make_logger

OLDEST_VERSION = (10, 14)
"""The first TensorRT that has a layer for attention as the networks use it."""


def check_version(version: str) -> None:
    """Refuses a TensorRT that lacks what the networks need.

    Raises:
        ValueError: names both versions.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    oldest = ".".join(map(str, OLDEST_VERSION))
    require(
        found >= OLDEST_VERSION, "tensorrt", version, f"version {oldest} or later: pip install 'tensorrt>={oldest}'"
    )


def check_device(dtype: DType, capability: tuple[int, int]) -> None:
    """Refuses a dtype that a GPU of this compute capability does not have.

    Raises:
        ValueError: names the dtype and the compute capability.
    """
    if dtype is DType.BFLOAT16 and capability < (8, 0):
        raise ValueError(
            f"dtype: bfloat16 needs compute capability 8.0 (Ampere) or later, this GPU has "
            f"{capability[0]}.{capability[1]}: --dtype float16"
        )
    if capability < (7, 5):
        raise ValueError(f"GPU: compute capability {capability[0]}.{capability[1]} is less than 7.5, TensorRT's least")


def for_this_machine(plans: TensorRTConfig, dtype: DType) -> TensorRTConfig:
    """The settings with the versions of what is here: TensorRT, the current GPU and the library of the plugins.

    Raises:
        ValueError: TensorRT is too old, or the GPU does not have the dtype.
    """
    import tensorrt as trt
    import torch

    check_version(trt.__version__)
    major, minor = torch.cuda.get_device_capability()
    check_device(dtype, (major, minor))
    return plans.replace(
        version=trt.__version__, compute_capability=f"{major}.{minor}", plugin_library=str(plugin_library())
    )


def build_plans(
    trt: Any,
    config: EngineConfig,
    weights: Mapping[str, Any],
    directory: Path,
    options: PlanOptions | None = None,
    *,
    progress: bool = False,
    ops: type[TensorRTOps] = TensorRTOps,
    target: str | None = None,
) -> None:
    """Writes ``prefill.plan`` and ``extend.plan`` to the directory.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        config: of a TensorRT engine.
        weights: torch tensors of the model and the gate, by name.
        directory: where the plans go.
        options: see ``PlanOptions``.
        progress: bars on stderr.
        ops: what writes the networks; plugins must be in the registry (``engine.plugin_library``).
        target: compute capability to build for, ``8.9``, where the module builds for GPUs that are not there
            (TensorRT-RTX); None builds for the current one.

    Raises:
        RuntimeError: TensorRT refuses something; has its reason.
        ValueError: the timing cache is of another TensorRT or GPU.
        KeyboardInterrupt: the build was interrupted.
    """
    options = options or PlanOptions()
    messages = make_logger(trt)
    messages.reason()  # of what came before
    builder = make_builder(trt, messages)
    for file, network_of, profiles in (
        (PREFILL_FILE, prefill_network, prefill_profiles(config)),
        (EXTEND_FILE, extend_network, extend_profiles(config)),
    ):
        network = network_of(trt, builder, config, weights, ops)
        settings = builder.create_builder_config()
        if target is not None:
            settings.num_compute_capabilities = 1
            settings.set_compute_capability(getattr(trt.ComputeCapability, "SM" + target.replace(".", "")), 0)
        add_profiles(builder, settings, network.bindings, profiles)
        resize = getattr(trt.PreviewFeature, "RUNTIME_ACTIVATION_RESIZE_10_10", None)
        if resize is not None:  # context memory then follows the shapes of an enqueue: a short prompt borrows little
            settings.set_preview_feature(resize, True)
        if options.workspace_bytes is not None:
            settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if options.timing_cache is not None:
            _read_timings(settings, options.timing_cache)
        with BuildProgress(file, progress) as state:
            monitor = make_monitor(trt, state)  # outlives the settings, as TensorRT wants it
            settings.progress_monitor = monitor
            plan = builder.build_serialized_network(network.definition, settings)
        if state.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            raise RuntimeError(f"{file}: TensorRT {trt.__version__} could not build it: {messages.reason()}")
        with open(directory / file, "wb") as stream:
            stream.write(plan)
        if options.timing_cache is not None:
            _write_timings(settings, options.timing_cache)


def make_builder(trt: Any, messages: Any) -> Any:
    """An ``IBuilder``.

    Raises:
        RuntimeError: TensorRT gives none, for instance without a GPU.
    """
    try:
        builder = trt.Builder(messages)
    except (TypeError, RuntimeError) as error:  # how the bindings report a null pointer depends on their version
        raise RuntimeError(f"TensorRT {trt.__version__} gives no builder: {messages.reason()} ({error})") from error
    return builder


def _read_timings(settings: Any, file: Path) -> None:
    known = file.read_bytes() if file.is_file() else b""
    cache = settings.create_timing_cache(known)
    if cache is None or not settings.set_timing_cache(cache, False):
        raise ValueError(
            f"timing_cache: {file} is no timing cache of this TensorRT and this GPU: name another file, or delete it"
        )


def _write_timings(settings: Any, file: Path) -> None:
    content = settings.get_timing_cache().serialize()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
