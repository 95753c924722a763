# SPDX-License-Identifier: Apache-2.0
"""Brings the plugins of libhubkv_plugin.so into TensorRT's registry, once in a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import _library
from ..graph.plugin_nodes import PLUGIN_NAMESPACE, PLUGIN_VERSION
from .backend import PLUGIN_FILE

PLUGINS = ("HubKVRefine", "HubKVSelect", "HubKVCompact", "HubKVPlan", "HubKVAttend")


def plugin_library() -> Path:
    """Where the library lies: beside libhubkv."""
    return _library.find().parent / PLUGIN_FILE


def load_plugins(trt: Any, file: Path | None = None) -> None:
    """Makes sure that the registry has our plugins; does nothing where it has them already.

    Args:
        trt: the module ``tensorrt``, or one with its interface.
        file: the library; None takes the one of this installation.

    Raises:
        ValueError: there is no such library, TensorRT cannot load it, or it has plugins of another version.
    """
    registry = trt.get_plugin_registry()
    if not _missing(registry):
        return
    file = plugin_library() if file is None else file
    if not file.is_file():
        raise ValueError(
            f"plugin library: {file} is not there: build it with cmake -DHUBKV_CUDA=ON -DHUBKV_PLUGIN=ON "
            "(docs/plugin.md)"
        )
    registry.load_library(str(file))
    if missing := _missing(registry):
        found = _versions(registry)
        others = ", ".join(f"{name} {found[name]}" for name in missing if name in found)
        raise ValueError(
            f"plugin library: {file}: TensorRT finds no {', '.join(missing)} of version {PLUGIN_VERSION} in it"
            + (f" (there are {others})" if others else "")
            + "; its log may say why. Build it from the sources of this hubkv-trt (docs/plugin.md)"
        )


def _missing(registry: Any) -> list[str]:
    found = _versions(registry)
    return [name for name in PLUGINS if PLUGIN_VERSION not in found.get(name, "").split(", ")]


def _versions(registry: Any) -> dict[str, str]:
    """The versions of our plugins that are registered, by name."""
    found: dict[str, str] = {}
    for creator in registry.all_creators:
        if creator.plugin_namespace == PLUGIN_NAMESPACE:
            known = found.get(creator.name)
            found[creator.name] = creator.plugin_version if known is None else f"{known}, {creator.plugin_version}"
    return found
