# SPDX-License-Identifier: Apache-2.0
"""What an engine directory holds and what its KV cache costs, as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config import Budgets, EngineConfig, Evicted, HubKVConfig, budget
from .directory import ENGINE_FILE

GIB = 1 << 30
DEFAULT_CACHE_BUDGET = 16 * GIB


def cache_figures(
    config: EngineConfig, cache_bytes: int = DEFAULT_CACHE_BUDGET, ratio: float | None = None
) -> dict[str, float]:
    """The cost of a prompt of ``max_input_len`` tokens in the KV cache, as the runtime's ledger counts it.

    Args:
        config: an engine with HubKV.
        cache_bytes: memory for the KV cache.
        ratio: the compression ratio r; None means the engine's default.

    Returns:
        ``dense_bytes_per_token`` and ``kept_bytes_per_token`` of the prompt (tables and padding included),
        ``dense_sequences`` and ``kept_sequences`` that fit in ``cache_bytes``, ``protected_tokens`` that every head
        keeps, and ``effective_ratio``.
    """
    from ..runtime.ledger import Ledger

    if config.hubkv is None:
        raise ValueError("hubkv: None is not a HubKV configuration: the engine is dense")
    tokens = config.max_input_len
    kept = budget(config.model, config.hubkv, tokens, config.hubkv.ratio if ratio is None else ratio)
    ledger = Ledger(config.model, config.dtype, row_bias=config.has_row_bias)
    dense_bytes, kept_bytes = ledger.dense_bytes(tokens), ledger.segment_bytes(kept.num_rows)
    return {
        "dense_bytes_per_token": dense_bytes / tokens,
        "kept_bytes_per_token": kept_bytes / tokens,
        "dense_sequences": cache_bytes // dense_bytes,
        "kept_sequences": cache_bytes // kept_bytes,
        "protected_tokens": config.hubkv.num_protected(tokens),
        "effective_ratio": kept.effective_ratio,
    }


def summarize(
    path: Path,
    config: EngineConfig,
    *,
    cache_bytes: int = DEFAULT_CACHE_BUDGET,
    backend_reason: str = "",
    gate: str = "",
) -> str:
    """The table that ``hubkv build`` and ``hubkv info`` print."""
    model, tokens = config.model, config.max_input_len
    shape = f"{model.num_layers} layers, {model.num_heads}/{model.num_kv_heads} heads, D = {model.head_dim}"
    hub = config.hubkv
    rows = [
        ("engine", str(path)),
        ("model", f"{config.model_name} ({model.architecture}: {shape})"),
        ("backend", config.backend.value + (f" ({backend_reason})" if backend_reason else "")),
        ("dtype", config.dtype.value),
        ("limits", f"prompt {tokens} tokens, batch {config.max_batch_size}"),
    ]
    if (plans := config.tensorrt) is not None:
        rows += [
            ("plans", f"TensorRT {plans.version}, compute capability {plans.compute_capability}"),
            ("", f"{plans.weights.value} weights, up to {plans.max_extend_len} new tokens, r >= {plans.min_ratio:g}"),
        ]
    dense = model.kv_bytes_per_token(config.dtype)
    if hub is None:
        rows += [
            ("HubKV", "off: the cache keeps every KV pair"),
            ("KV bytes per token", f"{dense:,}"),
            (f"prompts of {tokens} tokens in {_size(cache_bytes)}", f"{cache_bytes // (dense * tokens):,}"),
        ]
    else:
        figures = cache_figures(config, cache_bytes)
        refine = (
            f"nms {hub.nms_kernel}, penalty {hub.penalty_factor:g}, temperature {hub.head_weight_temperature:g}, "
            f"head weight {hub.min_head_weight:g}..{hub.max_head_weight:g}, gate power {hub.gate_power:g}"
            + (f", prominence {hub.prominence:g}" if hub.prominence else "")
        )
        summarized = hub.evicted is not Evicted.DROP
        gain = figures["dense_bytes_per_token"] / figures["kept_bytes_per_token"]
        rows += [
            ("HubKV", f"r = {hub.ratio:g}, {hub.scope.value} scope, {hub.preset}{_changes(hub)}"),
            ("", refine),
            ("scorer", hub.scorer.value + (f": {gate}" if gate else "")),
            *([("evicted", f"{hub.evicted.value}, {hub.centroids} rows a head")] if summarized else []),
            ("always kept", f"{figures['protected_tokens']:,} of {tokens:,} tokens (sinks and window)"),
            (
                "KV bytes per token",
                f"{dense:,} dense -> {figures['kept_bytes_per_token']:,.0f} kept ({gain:.2f}x less)",
            ),
            (
                f"prompts of {tokens} tokens in {_size(cache_bytes)}",
                f"{figures['dense_sequences']:,} dense -> {figures['kept_sequences']:,} kept",
            ),
        ]
    if (decode := config.decode_compression) is not None:
        budget_text = "no budget" if decode.layer_budget is None else f"{decode.layer_budget:,} rows a head and layer"
        judged = "held-out queries" if decode.budgets is Budgets.HELD_OUT else "mass"
        share = f"all rows, shared by {judged}" if decode.fill else f"p = {decode.p:g} of {judged}"
        rows.append(("while decoding", f"HARD-KV, {share}, every {decode.interval} tokens, {budget_text}"))
        if decode.condensed_rows:
            how = "merged into" if decode.condense is Evicted.MERGE else "summarized in"
            rows.append(("  evicted rows", f"{how} {decode.condensed_rows} a head"))
    for name in (*sorted(config.files), ENGINE_FILE):
        if (path / name).is_file():
            rows.append((f"  {name}", _size((path / name).stat().st_size)))
    return table(rows)


def _changes(hubkv: HubKVConfig) -> str:
    """Names the parameters that differ from the preset's."""
    preset = HubKVConfig.from_preset(
        hubkv.preset,
        ratio=hubkv.ratio,
        scope=hubkv.scope,
        scorer=hubkv.scorer,
        evicted=hubkv.evicted,
        centroids=hubkv.centroids,
    )
    names = [name for name in preset.to_dict() if getattr(hubkv, name) != getattr(preset, name)]
    return f" with {', '.join(names)} changed" if names else ""


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
