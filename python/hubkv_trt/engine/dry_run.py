# SPDX-License-Identifier: Apache-2.0
"""What a TensorRT build would make: inputs, outputs, layers and memory, without building and without a GPU."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..config import EngineConfig, WeightsPlace
from ..graph.lowered import LoweredOps
from ..runtime.ledger import Ledger
from .bindings import Binding, plans_of, weight_shapes
from .directory import EXTEND_FILE, PREFILL_FILE
from .estimate import device_weight_bytes, extend_bytes, prefill_bytes
from .network import Network, extend_network, prefill_network
from .plans import make_builder
from .profiles import extend_profiles, prefill_profiles
from .summary import GIB, cache_figures, table
from .trt_log import make_logger

RTX_WHEELS = "tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"

_MODULES = (("tensorrt",), ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"), ("tensorrt_rtx",))
"""Where a network builder may come from, in order of preference; TensorRT-RTX has one that needs no GPU."""


def find_builder() -> tuple[Any, Any]:
    """A module with TensorRT's network interface, and a builder of it that works on this machine.

    Raises:
        ValueError: there is none; says what to install.
    """
    tried = []
    for names in _MODULES:
        try:
            module = [importlib.import_module(name) for name in names][-1]
            return module, make_builder(module, make_logger(module))
        except (ImportError, OSError) as error:
            tried.append(f"{names[-1]}: {error}")
        except RuntimeError as error:
            tried.append(str(error))
    listed = "\n".join(f"  - {text}" for text in tried)
    raise ValueError(
        f"dry run: no network builder works on this machine:\n{listed}\n"
        f"Without a GPU, TensorRT-RTX has one: pip install --no-deps {RTX_WHEELS}"
    )


def describe(config: EngineConfig, num_sinks: int = 16, cache_bytes: int = 16 * GIB) -> str:
    """The text of ``--dry-run``: both networks are really written down, with each plugin counted as one layer.

    Args:
        config: of a TensorRT engine.
        num_sinks: S of the gate.
        cache_bytes: memory for the KV cache that the figures reckon with.

    Raises:
        ValueError: see ``find_builder``.
    """
    trt, builder = find_builder()
    weights = _stand_in_weights(config, num_sinks)
    plans = plans_of(config)
    model = config.model
    shape = f"L = {model.num_layers}, Hq = {model.num_heads}, Hkv = {model.num_kv_heads}, D = {model.head_dim}"
    parts = [
        f"{config.model_name} ({model.architecture}): {shape}, V = {model.vocab_size}; {config.dtype.value}",
        f"networks written with {trt.__name__} {trt.__version__}; nothing is built",
    ]
    for file, network_of, profiles in (
        (PREFILL_FILE, prefill_network, prefill_profiles(config)),
        (EXTEND_FILE, extend_network, extend_profiles(config)),
    ):
        network = network_of(trt, builder, config, weights, LoweredOps)
        parts += ["", file, *(f"  {line}" for line in _describe_network(network, profiles))]
    stored = "one copy for both plans" if plans.weights is WeightsPlace.SHARED else "one copy in each plan"
    tokens, batch, new = config.max_input_len, config.max_batch_size, plans.max_extend_len
    rows = [
        (f"weights, {stored}", _mib(device_weight_bytes(config, num_sinks))),
        (f"activations of a prompt of {tokens} tokens", _mib(prefill_bytes(config, tokens, num_sinks))),
        (f"activations of a decoding step, {batch} sequences", _mib(extend_bytes(config, batch, 1))),
        (f"activations of a question of {new} tokens", _mib(extend_bytes(config, 1, new))),
        *_cache_rows(config, cache_bytes),
    ]
    return "\n".join([*parts, "", "estimated memory", *(f"  {line}" for line in table(rows).splitlines())])


def _stand_in_weights(config: EngineConfig, num_sinks: int) -> dict[str, Any]:
    """Tensors of the right shapes whose memory nobody touches."""
    import torch

    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in weight_shapes(config, num_sinks)
    }


def _describe_network(network: Network, profiles: list[dict[str, tuple[int, int, int]]]) -> Iterator[str]:
    bindings = network.bindings.values()
    weights = [binding for binding in bindings if binding.is_weight]
    for title, is_input in (("input", True), ("output", False)):
        yield from _listed(title, [b for b in bindings if b.is_input == is_input and not b.is_weight])
        if is_input and weights:
            yield f"input   {len(weights)} weights, {weights[0].name} ... {weights[-1].name}"
    for number, ranges in enumerate(profiles):
        limits = ", ".join(f"{letter} {low}..{high} (best at {usual})" for letter, (low, usual, high) in ranges.items())
        yield f"profile {number}: {limits}"
    yield "layers  " + ", ".join(f"{count} {name}" for name, count in count_layers(network).most_common())


def count_layers(network: Network) -> Counter[str]:
    """Layers by type, a plugin as one layer of its name."""
    assert isinstance(network.ops, LoweredOps)
    stand_ins = {index for call in network.ops.calls for index in call.layers}
    counts = Counter(call.name for call in network.ops.calls)
    for index in range(network.definition.num_layers):
        if index not in stand_ins:
            counts[network.definition.get_layer(index).type.name] += 1
    return counts


def _listed(title: str, bindings: list[Binding]) -> Iterator[str]:
    """One line for each; outputs of successive layers share one."""
    groups: dict[str, list[Binding]] = {}
    for binding in bindings:
        stem, _, layer = binding.name.rpartition(".")
        groups.setdefault(stem if layer.isdigit() else binding.name, []).append(binding)
    for group in groups.values():
        first, last = group[0], group[-1]
        name = first.name if len(group) == 1 else f"{first.name} ... {last.name}"
        kind = ", read on the host" if first.is_shape else ""
        yield f"{title:<7} {name:<24} {first.dtype:<9} [{', '.join(first.dims)}]{kind}"


def _cache_rows(config: EngineConfig, cache_bytes: int) -> Iterator[tuple[str, str]]:
    tokens, budget = config.max_input_len, f"{cache_bytes / GIB:g} GiB"
    dense = Ledger(config.model, config.dtype).dense_bytes(tokens)
    if config.hubkv is None:
        yield f"cache of a prompt of {tokens} tokens", f"{_mib(dense)} ({cache_bytes // dense:,} in {budget})"
        return
    figures = cache_figures(config, cache_bytes)
    kept = int(figures["kept_bytes_per_token"] * tokens)
    fit = f"{int(figures['kept_sequences']):,} in {budget}; dense {_mib(dense)}, {int(figures['dense_sequences']):,}"
    yield f"cache of a prompt of {tokens} tokens, r = {config.hubkv.ratio:g}", f"{_mib(kept)} ({fit})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
