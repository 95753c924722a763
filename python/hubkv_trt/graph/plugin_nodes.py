# SPDX-License-Identifier: Apache-2.0
"""The plugins of ``libhubkv_plugin.so``, out of TensorRT's registry (docs/plugin.md has their names and fields)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PLUGIN_NAMESPACE = "hubkv"
PLUGIN_VERSION = "1"

Fields = Mapping[str, np.ndarray | int | float]
"""By name: an array of one value, or a number, which stands for int32 or float32."""


def create_plugin(trt: Any, name: str, fields: Fields) -> Any:
    """An ``IPluginV3`` to be built in.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        name: ``HubKVAttend``, ...
        fields: those without a default must be given.

    Raises:
        RuntimeError: the registry has no such plugin, or it refused the fields; its message is in the log.
    """
    creator = trt.get_plugin_registry().get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    if creator is None:
        raise RuntimeError(f"TensorRT has no plugin {PLUGIN_NAMESPACE}::{name}: libhubkv_plugin.so is not loaded")
    values = {field: as_field(value) for field, value in fields.items()}
    types = trt.PluginFieldType
    items = [trt.PluginField(n, v, getattr(types, v.dtype.name.upper())) for n, v in values.items()]
    made = creator.create_plugin(name, trt.PluginFieldCollection(items), trt.TensorRTPhase.BUILD)
    if made is None:
        raise RuntimeError(f"TensorRT plugin {name} refused its fields {dict(fields)}; its message above says why")
    return made


def as_field(value: np.ndarray | int | float) -> np.ndarray:
    """A field's value as plugins take it: int32, float32, or an array's own type."""
    if isinstance(value, np.ndarray):
        return value
    return np.array([value], np.float32 if isinstance(value, float) else np.int32)
