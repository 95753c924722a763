# SPDX-License-Identifier: Apache-2.0
"""What all readers of a Hugging Face ``config.json`` share. Whatever the decoder does not build is refused by name."""

from __future__ import annotations

from typing import Any

from ..config import RopeConfig

ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")


def field(data: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One value of the config; missing and null are the default.

    Raises:
        ValueError: it has another type, or is missing and has no default.
    """
    value = data.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"config.json {name}: missing")
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"config.json {name}: {value!r} is not of type {kind.__name__}")
    return value


def refuse(condition: bool, name: str, value: object, reason: str) -> None:
    """Raises ``ValueError`` naming a feature that is not built."""
    if condition:
        raise ValueError(f"config.json {name}: {value!r} is not supported: {reason}")


def common_fields(data: dict[str, Any], num_kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that every family reads alike, after refusing what none of them builds.

    Args:
        data: ``config.json``.
        num_kv_heads: Hkv where the file has none (None: the number of query heads).
        head_dim: D where the file has none (None: hidden_size / num_attention_heads).

    Raises:
        ValueError: a field is missing, has the wrong type, or asks for what is not built.
    """
    _refuse_features(data)
    hidden, heads = field(data, "hidden_size", int), field(data, "num_attention_heads", int)
    if heads < 1:
        raise ValueError(f"config.json num_attention_heads: {heads} is not an integer >= 1")
    dim = field(data, "head_dim", int, head_dim or hidden // heads)
    if data.get("head_dim") is None and head_dim is None and hidden % heads:
        raise ValueError(f"config.json hidden_size: {hidden} is not a multiple of num_attention_heads = {heads}")
    max_positions = field(data, "max_position_embeddings", int)
    return {
        "vocab_size": field(data, "vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": field(data, "intermediate_size", int),
        "num_layers": field(data, "num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": field(data, "num_key_value_heads", int, num_kv_heads or heads),
        "head_dim": dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": field(data, "rms_norm_eps", float, 1e-6),
        "rope": read_rope(data, max_positions),
        "tie_word_embeddings": field(data, "tie_word_embeddings", bool, False),
        "bos_token_id": read_token_ids(data, "bos_token_id")[0] if data.get("bos_token_id") is not None else None,
        "eos_token_ids": read_token_ids(data, "eos_token_id"),
    }


def _refuse_features(data: dict[str, Any]) -> None:
    act = data.get("hidden_act") or "silu"
    refuse(act != "silu", "hidden_act", act, "only silu is built")
    for name in _EXPERTS:
        refuse(bool(data.get(name)), name, data.get(name), "mixture-of-experts layers are not built")
    quantization = data.get("quantization_config")
    refuse(quantization is not None, "quantization_config", quantization,
           "load an unquantized checkpoint (float32, float16 or bfloat16)")  # fmt: skip
    refuse(bool(data.get("use_mrope")), "use_mrope", data.get("use_mrope"), "multimodal RoPE is not built")
    layer_types = data.get("layer_types") or []
    other = sorted({str(t) for t in layer_types if t != "full_attention"})
    refuse(bool(other), "layer_types", ", ".join(other), "only full_attention is built")


def refuse_sliding_window(data: dict[str, Any]) -> None:
    """For families with ``use_sliding_window``: refuses a window that some layer would use."""
    layers = field(data, "num_hidden_layers", int)
    if data.get("use_sliding_window") and data.get("sliding_window") is not None and not data.get("layer_types"):
        first = field(data, "max_window_layers", int, 28)
        refuse(first < layers, "use_sliding_window", True, "sliding-window attention is not built")


def read_token_ids(data: dict[str, Any], name: str) -> tuple[int, ...]:
    """A token id or a list of them; missing is none."""
    value = data.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"config.json {name}: {value!r} is not a token id or a list of them")
    return tuple(ids)


def read_rope(
    data: dict[str, Any], max_position_embeddings: int, scaling_key: str = "rope_scaling", theta_key: str = "rope_theta"
) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Args:
        data: ``config.json``.
        max_position_embeddings: the original context where the file names none.
        scaling_key: what the file calls ``rope_scaling``.
        theta_key: what the file calls ``rope_theta``.

    Raises:
        ValueError: a type, a parameter or a partial rotation that is not built, named.
    """
    name = "rope_parameters" if data.get("rope_parameters") else scaling_key
    given = data.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.json {name}: {given!r} is not an object")
    refuse(any(isinstance(v, dict) for v in given.values()), name, given, "RoPE that differs by layer is not built")
    rope = {k: v for k, v in given.items() if v is not None}
    partial = rope.pop("partial_rotary_factor", data.get("partial_rotary_factor"))
    refuse(partial not in (None, 1, 1.0), "partial_rotary_factor", partial, "partial rotation is not built")
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope} or {"default"}
    refuse(len(kinds) > 1, f"{name}.rope_type", sorted(map(str, kinds)), "rope_type and type disagree")
    kind = kinds.pop()
    refuse(kind not in ROPE_PARAMETERS, f"{name}.rope_type", kind, f"built are {', '.join(ROPE_PARAMETERS)}")
    theta = rope.pop("rope_theta", data.get(theta_key))
    if kind == "yarn" and "factor" not in rope and rope.get("original_max_position_embeddings"):
        rope["factor"] = max_position_embeddings / rope["original_max_position_embeddings"]
    if kind in ("llama3", "yarn") and data.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = data["original_max_position_embeddings"]
    for key, value in rope.items():
        stray = kind != "default" and key not in ROPE_PARAMETERS[kind]
        refuse(stray, f"{name}.{key}", value, f"rope_type {kind} has no such parameter here")
    for key in _REQUIRED.get(kind, ()):
        if key not in rope:
            raise ValueError(f"config.json {name}.{key}: missing, rope_type {kind} needs it")
    kept = {key: rope[key] for key in ROPE_PARAMETERS[kind] if key in rope}
    if "original_max_position_embeddings" in ROPE_PARAMETERS[kind]:
        kept.setdefault("original_max_position_embeddings", max_position_embeddings)
    config = RopeConfig.from_dict({"theta": 10000.0 if theta is None else theta, "type": kind, **kept})
    low, high = config.low_freq_factor, config.high_freq_factor
    if low is not None and high is not None and low >= high:
        raise ValueError(f"config.json {name}.low_freq_factor: {low} is not below high_freq_factor = {high}")
    return config
