# SPDX-License-Identifier: Apache-2.0
"""The metadata of a GGUF file in the terms of a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Any

from .hf_config import refuse
from .tensor_files import GGUFFile

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "vocab_size": "vocab_size",
}


def config_data(file: GGUFFile) -> dict[str, Any]:
    """What ``config.json`` would say of the model in the file.

    Raises:
        ValueError: the file asks for a RoPE scaling or another feature that is not built; names the file and the key.
    """
    metadata, shapes = file.metadata, file.shapes()
    architecture = metadata.get("general.architecture")
    data: dict[str, Any] = {"model_type": architecture}
    for key, name in _FIELDS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            data[name] = value
    # Scaled RoPE is in keys that say how, or in a tensor of factors; neither is read, so neither may pass in silence.
    try:
        for key in ("rope.scaling.type", "rope.scale_linear", "rope.scaling.factor"):
            value = metadata.get(f"{architecture}.{key}")
            refuse(value not in (None, "none", 1, 1.0), key, value, "scaled RoPE is read from safetensors only")
        refuse("rope_freqs.weight" in shapes, "rope_freqs.weight", "tensor", "scaled RoPE is read from safetensors only")
        dims, head_dim = metadata.get(f"{architecture}.rope.dimension_count"), _head_dim(data)
        refuse(dims not in (None, head_dim), "rope.dimension_count", dims, f"it is not the head dim {head_dim}")
        window = metadata.get(f"{architecture}.attention.sliding_window")
        refuse(bool(window), "attention.sliding_window", window, "sliding-window attention is not built")
    except ValueError as error:
        raise ValueError(f"{file.path}: {str(error).replace('config.json ', '')}") from error
    data.setdefault("head_dim", _head_dim(data))
    data.setdefault("vocab_size", file.vocabulary_size)
    data["tie_word_embeddings"] = "lm_head.weight" not in shapes
    data["attention_bias"] = architecture == "llama" and "model.layers.0.self_attn.q_proj.bias" in shapes
    for name in ("bos", "eos"):
        data[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return data


def _head_dim(data: dict[str, Any]) -> int | None:
    if "head_dim" in data:
        return int(data["head_dim"])
    if "hidden_size" in data and data.get("num_attention_heads"):
        return int(data["hidden_size"] // data["num_attention_heads"])
    return None
