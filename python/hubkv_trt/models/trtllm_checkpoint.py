# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of TensorRT-LLM (0.8 to 1.2): ``config.json`` with ``architecture``, and ``rank{i}.safetensors``.

A checkpoint was cut for a number of tensor-parallel ranks when it was made; here the ranks are put together again and
show themselves under the Hugging Face names, so that everything behind ``TensorFiles`` stays as it is. With R ranks:

==============================================  ==========================================  ========================
tensor of a rank (``transformer.layers.{l}.``)  shape                                       Hugging Face
==============================================  ==========================================  ========================
``attention.qkv.weight``, ``.bias``             [(Hq/R + 2*max(Hkv/R, 1))*D, E]             q, k, v of the rank
``attention.dense.weight``                      [E, Hq*D/R]                                 ``o_proj``
``attention.q_layernorm``, ``k_layernorm``      [D]                                         ``q_norm``, ``k_norm``
``mlp.fc.weight``, ``.bias``                    [I/R, E]                                    ``gate_proj`` (not up)
``mlp.gate.weight``, ``.bias``                  [I/R, E]                                    ``up_proj`` (not gate)
``mlp.proj.weight``                             [E, I/R]                                    ``down_proj``
``input_layernorm``, ``post_layernorm``         [E]                                         norms
``transformer.vocab_embedding.weight``          [V, E], or cut (``use_parallel_embedding``) ``embed_tokens``
``transformer.ln_f.weight``                     [E]                                         ``norm``
``lm_head.weight``                              [ceil(V/R), E], the last one padded         ``lm_head``
==============================================  ==========================================  ========================

With fewer KV heads than ranks, R/Hkv successive ranks hold the same KV head. Biases of ``dense`` and ``proj`` and all
norms are whole in every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from .hf_config import field, read_rope, read_token_ids, refuse
from .tensor_files import SafetensorsFile, read_json

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""By ``architecture``."""

CONSTANTS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")
"""Tables of RoPE that converters of some versions write beside the weights; they follow from the config."""

_NEUTRAL: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "only silu is built"),
    "position_embedding_type": ("rope_gpt_neox", "only RoPE over halves is built"),
    "residual_mlp": (False, "residual MLPs are not built"),
    "fc_after_embed": (False, "draft models are not built"),
    "use_input_layernorm_in_first_layer": (True, "draft models are not built"),
    "use_last_layernorm": (True, "draft models are not built"),
    "layer_idx_offset": (0, "draft models are not built"),
    "embedding_multiplier": (1, "scaled embeddings are not built"),
    "attention_multiplier": (1, "scaled attention is not built"),
    "residual_multiplier": (1, "scaled residuals are not built"),
    "output_multiplier_scale": (1, "scaled logits are not built"),
    "has_partial_lora_mask": (False, "partial LoRA is not built"),
    "remove_duplicated_kv_heads": (False, "convert the checkpoint without it"),
    "use_logn_attn": (False, "log-n attention is not built"),
    "num_labels": (1, "classification heads are not built"),
    "is_pruned": (False, "pruned checkpoints hold no weights"),
}


@dataclass(frozen=True)
class Mapping:
    """How a checkpoint was cut."""

    ranks: int  # R, tensor parallelism
    embedding_axis: int | None  # along which vocab_embedding is cut; None: whole in every rank


def is_trtllm(data: dict[str, Any]) -> bool:
    """Whether the content of a ``config.json`` is TensorRT-LLM's (of a checkpoint or of an engine)."""
    return "model_type" not in data and ("architecture" in data or "pretrained_config" in data)


def read_trtllm(data: dict[str, Any]) -> ModelConfig:
    """``ModelConfig`` from the ``config.json`` of a checkpoint.

    Raises:
        ValueError: a field is missing or wrong, or asks for what is not built (another architecture, quantization,
            pipeline or context parallelism, ...); names it.
    """
    refuse(
        "pretrained_config" in data,
        "pretrained_config",
        "...",
        "this is an engine; give the checkpoint it was built from",
    )
    architecture = data["architecture"]
    built = f"built are {', '.join(FAMILIES)}"
    refuse(not isinstance(architecture, str) or architecture not in FAMILIES, "architecture", architecture, built)
    family = FAMILIES[architecture]
    for name, (value, reason) in _NEUTRAL.items():
        given = data.get(name)
        refuse(given is not None and given != value, name, given, reason)
    _refuse_quantization(_object(data, "quantization"))
    experts = _object(data, "moe").get("num_experts") or data.get("moe_num_experts")
    refuse(bool(experts), "moe.num_experts", experts, "mixture-of-experts layers are not built")
    refuse(bool(data.get("qk_layernorm")) and family != "qwen3", "qk_layernorm", True, f"{architecture} has none")
    kind = data.get("qwen_type")
    refuse(kind is not None and kind != family, "qwen_type", kind, f"architecture is {architecture}")

    hidden, heads = field(data, "hidden_size", int), field(data, "num_attention_heads", int)
    if heads < 1:
        raise ValueError(f"config.json num_attention_heads: {heads} is not an integer >= 1")
    if data.get("head_size") is None and hidden % heads:
        raise ValueError(f"config.json hidden_size: {hidden} is not a multiple of num_attention_heads = {heads}")
    head_size = field(data, "head_size", int, hidden // heads)
    rotated = field(data, "rotary_embedding_dim", int, head_size)
    refuse(rotated != head_size, "rotary_embedding_dim", rotated, "partial rotation is not built")
    positions = field(data, "max_position_embeddings", int)
    bias = field(data, "attn_bias", bool, family == "qwen2")
    model = ModelConfig(
        architecture=family,
        vocab_size=field(data, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=field(data, "intermediate_size", int),
        num_layers=field(data, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=field(data, "num_key_value_heads", int, heads),
        head_dim=head_size,
        max_position_embeddings=positions,
        rms_norm_eps=field(data, "norm_epsilon", float, 1e-5),
        rope=read_rope(data, positions, "rotary_scaling", "rotary_base"),
        tie_word_embeddings=field(data, "tie_word_embeddings", bool, False),
        qkv_bias=bias,
        o_bias=bias and family == "llama",
        mlp_bias=field(data, "mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        eos_token_ids=read_token_ids(data, "eos_token_id"),  # of a generation_config.json beside it
    )
    read_mapping(data, model)
    return model


def read_mapping(data: dict[str, Any], model: ModelConfig) -> Mapping:
    """How the checkpoint was cut.

    Raises:
        ValueError: along more than tensor parallelism, or into parts that do not fit the model; names the field.
    """
    mapping = _object(data, "mapping")
    for name in ("pp_size", "cp_size"):
        size = field(mapping, name, int, 1)
        refuse(size != 1, f"mapping.{name}", size, "only tensor-parallel ranks are put together; convert with 1")
    refuse(bool(mapping.get("auto_parallel")), "mapping.auto_parallel", True, "convert without it")
    ranks = field(mapping, "tp_size", int, 1)
    if ranks < 1 or mapping.get("world_size") not in (None, ranks):
        raise ValueError(f"config.json mapping: world_size {mapping.get('world_size')} and tp_size {ranks} disagree")
    kv_heads = model.num_kv_heads
    for name, size in (("num_attention_heads", model.num_heads), ("intermediate_size", model.intermediate_size)):
        if size % ranks:
            raise ValueError(f"config.json mapping.tp_size: {ranks} does not divide {name} = {size}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"config.json mapping.tp_size: {ranks} fits no num_key_value_heads = {kv_heads}")
    axis = None
    if ranks > 1 and field(data, "use_parallel_embedding", bool, False):
        axis = field(data, "embedding_sharding_dim", int, 0)
        refuse(axis not in (0, 1), "embedding_sharding_dim", axis, "0 or 1")
    return Mapping(ranks, axis)


def _object(data: dict[str, Any], name: str) -> dict[str, Any]:
    return field(data, name, dict, {})


def _refuse_quantization(quantization: dict[str, Any]) -> None:
    reason = "load an unquantized checkpoint (float32, float16 or bfloat16)"
    for name in ("quant_algo", "kv_cache_quant_algo", "quantized_layers"):
        refuse(bool(quantization.get(name)), f"quantization.{name}", quantization.get(name), reason)


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where a Hugging Face tensor lies in the rank files."""

    name: str
    shape: tuple[int, ...]  # of the Hugging Face tensor
    local: tuple[int, ...]  # of the whole tensor of that name in one rank
    axis: int | None = None  # along which the ranks' parts are joined; None: whole in every rank
    rows: tuple[int, int | None] = (0, None)  # first and end of the part of it that is meant
    step: int = 1  # so many successive ranks hold the same part


class TensorRTLLMFiles:
    """The rank files of a checkpoint as ``TensorFiles``: whole tensors by Hugging Face name.

    Raises:
        ValueError: a rank file is missing, superfluous, truncated or corrupt, or a tensor is missing, unexpected or of
            a wrong shape; names file and tensor.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        mapping = read_mapping(read_json(directory / "config.json"), model)
        there = len(list(directory.glob("rank*.safetensors")))
        if there > mapping.ranks:
            raise ValueError(f"{directory}: has {there} rank files, but mapping.tp_size is {mapping.ranks}")
        self._ranks = [SafetensorsFile(directory / f"rank{i}.safetensors") for i in range(mapping.ranks)]
        self._sources = _sources(model, mapping)
        for rank in self._ranks:
            self._check(rank, model)

    def _check(self, rank: SafetensorsFile, model: ModelConfig) -> None:
        last = rank is self._ranks[-1]
        known = {source.name for source in self._sources.values()} | {"lm_head.weight"}
        for source in self._sources.values():
            shape = rank.shapes.get(source.name)
            if shape is None:
                raise ValueError(f"{rank.path}: tensor {source.name} is missing")
            rest = source.shape[0] - source.local[0] * (len(self._ranks) - 1)  # what the last one holds without padding
            if shape != source.local and not (last and source.axis == 0 and shape == (rest, *source.local[1:])):
                raise ValueError(
                    f"{rank.path}: tensor {source.name} has shape {list(shape)}, "
                    f"the config asks for {list(source.local)}"
                )
        for name in rank.shapes:
            if name not in known and name.rpartition(".")[2] not in CONSTANTS:
                raise ValueError(f"{rank.path}: tensor {name} has no place in an unquantized {model.architecture}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: source.shape for name, source in self._sources.items()}

    def read(self, name: str) -> Tensor:
        source = self._sources[name]
        ranks = self._ranks[:: source.step]
        if source.axis is not None:
            whole = torch.cat([rank.read(source.name, slice(*source.rows)) for rank in ranks], source.axis)
            return whole[: source.shape[0]]
        whole = ranks[0].read(source.name)
        for rank in ranks[1:] if whole.ndim == 1 else ():  # of large ones it would double what is read
            if not rank.read(source.name).equal(whole):
                raise ValueError(f"{rank.path}: tensor {source.name} is not that of rank 0: another checkpoint's rank")
        return whole


def _sources(model: ModelConfig, mapping: Mapping) -> dict[str, _Source]:
    """All Hugging Face tensors of the model (as ``checkpoint.weight_parts`` asks for them)."""
    ranks, e, d = mapping.ranks, model.hidden_size, model.head_dim
    inner, vocab = model.intermediate_size // ranks, -(-model.vocab_size // ranks)
    sources: dict[str, _Source] = {}

    def whole(theirs: str, name: str, *shape: int) -> None:
        sources[theirs] = _Source(name, shape, shape)

    def cut_rows(theirs: str, name: str, rows: int, *rest: int) -> None:
        sources[theirs] = _Source(name, (rows * ranks, *rest), (rows, *rest), 0)

    def cut_columns(theirs: str, name: str, columns: int) -> None:
        sources[theirs] = _Source(name, (e, columns * ranks), (e, columns), 1)

    def vocabulary(theirs: str, name: str) -> None:
        sources[theirs] = _Source(name, (model.vocab_size, e), (vocab, e), 0)

    if mapping.embedding_axis == 0:
        vocabulary("model.embed_tokens.weight", "transformer.vocab_embedding.weight")
    elif mapping.embedding_axis == 1:
        local = (model.vocab_size, e // ranks)
        shape = (model.vocab_size, e)
        sources["model.embed_tokens.weight"] = _Source("transformer.vocab_embedding.weight", shape, local, 1)
    else:
        whole("model.embed_tokens.weight", "transformer.vocab_embedding.weight", model.vocab_size, e)
    for layer in range(model.num_layers):
        theirs, name = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        _qkv(sources, model, ranks, theirs + "self_attn.", name + "attention.qkv.")
        cut_columns(theirs + "self_attn.o_proj.weight", name + "attention.dense.weight", model.num_heads * d // ranks)
        cut_rows(theirs + "mlp.gate_proj.weight", name + "mlp.fc.weight", inner, e)
        cut_rows(theirs + "mlp.up_proj.weight", name + "mlp.gate.weight", inner, e)
        cut_columns(theirs + "mlp.down_proj.weight", name + "mlp.proj.weight", inner)
        whole(theirs + "input_layernorm.weight", name + "input_layernorm.weight", e)
        whole(theirs + "post_attention_layernorm.weight", name + "post_layernorm.weight", e)
        if model.qk_norm:
            whole(theirs + "self_attn.q_norm.weight", name + "attention.q_layernorm.weight", d)
            whole(theirs + "self_attn.k_norm.weight", name + "attention.k_layernorm.weight", d)
        if model.o_bias:
            whole(theirs + "self_attn.o_proj.bias", name + "attention.dense.bias", e)
        if model.mlp_bias:
            cut_rows(theirs + "mlp.gate_proj.bias", name + "mlp.fc.bias", inner)
            cut_rows(theirs + "mlp.up_proj.bias", name + "mlp.gate.bias", inner)
            whole(theirs + "mlp.down_proj.bias", name + "mlp.proj.bias", e)
    whole("model.norm.weight", "transformer.ln_f.weight", e)
    if not model.tie_word_embeddings:
        vocabulary("lm_head.weight", "lm_head.weight")
    return sources


def _qkv(sources: dict[str, _Source], model: ModelConfig, ranks: int, theirs: str, name: str) -> None:
    d, e = model.head_dim, model.hidden_size
    q, kv = model.num_heads // ranks * d, max(model.num_kv_heads // ranks, 1) * d
    copies = max(ranks // model.num_kv_heads, 1)
    for part, first, rows, step in (("q", 0, q, 1), ("k", q, kv, copies), ("v", q + kv, kv, copies)):
        for kind, rest in (("weight", (e,)), ("bias", ())) if model.qkv_bias else (("weight", (e,)),):
            sources[f"{theirs}{part}_proj.{kind}"] = _Source(
                name + kind,
                (rows * (ranks // step), *rest),
                (q + 2 * kv, *rest),
                0,
                (first, first + rows),
                step,
            )
