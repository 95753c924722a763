# SPDX-License-Identifier: Apache-2.0
"""GGUF files (versions 2 and 3) of the architectures llama, qwen2 and qwen3.

The layout is that of ggml's docs/gguf.md: header, metadata, tensor table, aligned data. It is read here because a
vocabulary of 100 000 strings takes the ``gguf`` package seconds; its ``dequantize`` expands the tensors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .hf_config import refuse

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class _TensorInfo:
    name: str  # GGUF's
    shape: tuple[int, ...]  # row-major
    kind: int  # ggml type
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Cursor:
    """Reads little-endian values one after the other; running over the end is a ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize("<" + code) * count
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends within the header, at byte {len(self.data)}")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        (raw,) = self.take("s", length) if length else (b"",)
        return str(raw, "utf-8")

    def skip_string(self) -> None:
        (length,) = self.take("Q")
        if length > len(self.data) - self.at:
            raise ValueError(f"it ends within the header, at byte {len(self.data)}")
        self.at += length

    def value(self, kind: int) -> Any:
        """A metadata value; of an array of texts only its length is read."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise ValueError(f"metadata type {kind} is unknown")
        element, count = self.take("I")[0], self.take("Q")[0]
        if element in _SCALARS:
            return self.take(_SCALARS[element], count)
        for _ in range(count):
            if element != _STRING:
                raise ValueError(f"metadata array of type {element} is unknown")
            self.skip_string()
        return count


class GGUFFile:
    """A ``tensor_files.TensorFiles`` over a GGUF file; quantized tensors are expanded to float32 when read.

    Names and shapes come out as Hugging Face's. GGUF's llama stores the rows of q and k so that RoPE turns neighbouring
    values; they are put back in the order for rotation by halves.

    Attributes:
        metadata: by GGUF key. An array of texts (the vocabulary) is represented by its length.

    Raises:
        ValueError: missing, truncated or corrupt; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (ValueError, OverflowError, MemoryError, OSError) as error:
            raise ValueError(f"{path}: corrupt or truncated: {error}") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        (magic,) = cursor.take("s", 4)
        (version,) = cursor.take("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version} are not those of a little-endian GGUF 2 or 3 file")
        num_tensors, num_values = cursor.take("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.take("I")[0])
        table = [self._read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r} is not an integer >= 1")
        start = -(-cursor.at // alignment) * alignment
        self._tensors = {}
        for t in table:
            info = _TensorInfo(t.name, t.shape, t.kind, start + t.offset, t.num_bytes)
            if info.offset + info.num_bytes > len(self._data):
                raise ValueError(f"tensor {t.name} ends at byte {info.offset + info.num_bytes} of {len(self._data)}")
            self._tensors[_hugging_face_name(t.name)] = info

    def _read_tensor_info(self, cursor: _Cursor) -> _TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, (dims,) = cursor.string(), cursor.take("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed(cursor.take("Q", dims)))
        (kind,), (offset,) = cursor.take("I"), cursor.take("Q")
        if kind not in {int(k) for k in GGML_QUANT_SIZES}:
            raise ValueError(f"tensor {name} has the unknown ggml type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape and shape[-1] % block:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} values are not whole blocks of {block}")
        return _TensorInfo(name, shape, kind, offset, math.prod(shape) // block * block_bytes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: t.shape for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        from gguf import dequantize
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self._tensors[name]
        kind = GGMLQuantizationType(info.kind)
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        raw = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        stored = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        try:
            values = dequantize(raw if stored is None else raw.view(stored), kind)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"{self.path}: tensor {info.name} of type {kind.name} is not readable: {error}") from error
        tensor = torch.from_numpy(np.array(values, np.float32))
        if self.metadata.get("general.architecture") == "llama" and re.search(r"self_attn\.[qk]_proj", name):
            key = "llama.attention.head_count" + ("_kv" if "k_proj" in name else "")
            heads = self.metadata.get(key, self.metadata["llama.attention.head_count"])
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    layer = ""
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        layer, stem = f"model.layers.{match[1]}.", match[2]
    known = _NAMES.get(stem)
    return f"{layer}{known}.{kind}" if known else name


# ---- config ---------------------------------------------------------------------------------------------------------

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
    """What a Hugging Face ``config.json`` would say of the model in the file.

    Raises:
        ValueError: the file asks for a RoPE scaling or another feature that is not built; names the file and the key.
    """
    metadata, shapes = file.metadata, file.shapes()
    architecture = metadata.get("general.architecture")
    data: dict[str, Any] = {"model_type": architecture}
    for key, name in _FIELDS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            data[name] = value
    heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
    if "head_dim" not in data and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        data["head_dim"] = hidden // heads
    # Scaled RoPE is in keys that say how, or in a tensor of factors; neither is read, so neither may pass in silence.
    unscaled = "scaled RoPE is read from safetensors only"
    try:
        for key in ("rope.scaling.type", "rope.scale_linear", "rope.scaling.factor"):
            value = metadata.get(f"{architecture}.{key}")
            refuse(value not in (None, "none", 1, 1.0), key, value, unscaled)
        refuse("rope_freqs.weight" in shapes, "rope_freqs.weight", "a tensor", unscaled)
        rotated = metadata.get(f"{architecture}.rope.dimension_count")
        refuse(rotated not in (None, data.get("head_dim")), "rope.dimension_count", rotated,
               f"it is not the head dim {data.get('head_dim')}")  # fmt: skip
        window = metadata.get(f"{architecture}.attention.sliding_window")
        refuse(bool(window), "attention.sliding_window", window, "sliding-window attention is not built")
    except ValueError as error:
        raise ValueError(f"{file.path}: {str(error).replace('config.json ', '')}") from error
    data.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens"))
    data["tie_word_embeddings"] = "lm_head.weight" not in shapes
    data["attention_bias"] = architecture == "llama" and "model.layers.0.self_attn.q_proj.bias" in shapes
    for name in ("bos", "eos"):
        data[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return data
