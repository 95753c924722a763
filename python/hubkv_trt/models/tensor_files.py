# SPDX-License-Identifier: Apache-2.0
"""Files that hold weights, as mappings from Hugging Face tensor names to tensors that are read one at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = {"F32", "F16", "BF16", "F64"}


class TensorFiles(Protocol):
    """Tensors by Hugging Face name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, floating point, on the CPU. Raises ValueError naming file and tensor where it cannot be read."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file is missing, is no JSON or no object; names the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


class SafetensorsFiles:
    """A directory with ``model.safetensors``, or with an index and shards.

    Raises:
        ValueError: no such files, a shard is missing, truncated or corrupt, or index and shards disagree; names the file.
    """

    def __init__(self, directory: Path) -> None:
        self._where: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        index_path = directory / INDEX_FILE
        if index_path.exists():
            index = read_json(index_path).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
                raise ValueError(f"{index_path}: weight_map is missing or no map from tensors to files")
            for shard in sorted(set(index.values())):
                if Path(shard).name != shard:
                    raise ValueError(f"{index_path}: {shard!r} is not a file name in this directory")
                self._open(directory / shard)
            for name, shard in index.items():
                if self._paths.get(name) != directory / shard:
                    raise ValueError(f"{directory / shard}: has no tensor {name}, which {INDEX_FILE} puts there")
        elif (directory / SINGLE_FILE).exists():
            self._open(directory / SINGLE_FILE)
        else:
            raise ValueError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), framework="pt")
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in self._where:
                    raise ValueError(f"{path}: tensor {name} is also in {self._paths[name].name}")
                self._where[name], self._paths[name] = file, path
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: corrupt or truncated: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}

    def read(self, name: str) -> Tensor:
        file, path = self._where[name], self._paths[name]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {dtype}, not one of {', '.join(sorted(FLOAT_DTYPES))}")
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: tensor {name} is not readable: {error}") from error
        return tensor


_GGUF_NAMES = {
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


class GGUFFile:
    """A GGUF file of architecture llama, qwen2 or qwen3, its quantized tensors expanded to float32 when read.

    Names and shapes come out as Hugging Face's. GGUF's llama stores the rows of q and k so that RoPE turns neighbouring
    values; they are put back in the order for rotation by halves.

    Raises:
        ValueError: missing, truncated or corrupt; names the file.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            self._reader = GGUFReader(str(path))
            self.metadata = {key: f.contents() for key, f in self._reader.fields.items() if not _is_vocabulary(key)}
            self.vocabulary_size = len(getattr(self._reader.fields.get("tokenizer.ggml.tokens"), "data", ()))
            self._tensors = {_hugging_face_name(t.name): t for t in self._reader.tensors}
        except (ValueError, IndexError, KeyError, OverflowError, OSError, AttributeError) as error:
            raise ValueError(f"{path}: corrupt or truncated: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except (ValueError, NotImplementedError) as error:
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ValueError(f"{self.path}: tensor {tensor.name} of type {kind} is not readable: {error}") from error
        if self.metadata["general.architecture"] == "llama" and re.search(r"self_attn\.[qk]_proj", name):
            key = "llama.attention.head_count" + ("_kv" if "k_proj" in name else "")
            heads = self.metadata.get(key, self.metadata["llama.attention.head_count"])
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return values


def _is_vocabulary(key: str) -> bool:
    return key.startswith("tokenizer.ggml.") and not key.endswith(("_id", "model", "pre"))


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    layer = ""
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        layer, stem = f"model.layers.{match[1]}.", match[2]
    known = _GGUF_NAMES.get(stem)
    return f"{layer}{known}.{kind}" if known else name
