# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of TensorRT-LLM: the model that comes out is the one they were converted from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hubkv_trt import LLM, SamplingParams, build_engine
from hubkv_trt.config import DType
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.checkpoint import load_config, load_tokenizer, load_weights
from hubkv_trt.models.decoder import Decoder
from tiny_models import byte_tokenizer, edit_json, save_tiny_model


def write_trtllm(original: Path, directory: Path, ranks: int = 1, **changes: Any) -> Path:
    """Cuts a Hugging Face model as TensorRT-LLM's convert_checkpoint.py does; ``changes`` go to its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    hf, state = AutoConfig.from_pretrained(original), load_file(original / "model.safetensors")
    rope = dict(hf.rope_parameters)
    config = {
        "architecture": hf.architectures[0],
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_hidden_layers": hf.num_hidden_layers,
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_key_value_heads,
        "head_size": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "hidden_act": hf.hidden_act,
        "norm_epsilon": hf.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.max_position_embeddings,
        "rotary_base": rope.pop("rope_theta"),
        "rotary_scaling": rope if rope["rope_type"] != "default" else None,
        "rotary_embedding_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "tie_word_embeddings": hf.tie_word_embeddings,
        "attn_bias": hf.model_type == "qwen2" or getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "qk_layernorm": False,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1, "cp_size": 1, "moe_tp_size": ranks,
                    "moe_ep_size": 1, "gpus_per_node": 8, "auto_parallel": False},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128, "exclude_modules": None},
        "moe": {"num_experts": 0, "top_k": 0},
        "qwen_type": None if hf.model_type == "llama" else hf.model_type,
        "runtime_defaults": None,
        **changes,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        save_file(rank_tensors(config, state, rank, ranks), directory / f"rank{rank}.safetensors")
    return directory


NORMS = (
    ("input_layernorm", "input_layernorm"),
    ("post_layernorm", "post_attention_layernorm"),
    ("attention.q_layernorm", "self_attn.q_norm"),
    ("attention.k_layernorm", "self_attn.k_norm"),
)


def rank_tensors(config: dict[str, Any], state: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    def cut(tensor: Tensor, axis: int = 0) -> Tensor:
        return tensor.chunk(ranks, axis)[rank]

    def cut_heads(tensor: Tensor) -> Tensor:
        """Rows of KV heads; fewer heads than ranks are repeated up to the number of ranks."""
        heads = tensor.view(config["num_key_value_heads"], -1, *tensor.shape[1:])
        return cut(heads.repeat_interleave(max(ranks // heads.shape[0], 1), 0).flatten(0, 1))

    def cut_vocabulary(tensor: Tensor) -> Tensor:
        padding = -tensor.shape[0] % ranks
        return cut(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]))

    embedding = state["model.embed_tokens.weight"]
    tensors = {
        "lm_head.weight": cut_vocabulary(state.get("lm_head.weight", embedding)),
        "transformer.ln_f.weight": state["model.norm.weight"],
        "transformer.vocab_embedding.weight": embedding,
        "rotary_inv_freq": torch.ones(8),  # the tables that some versions write too
        "embed_positions_for_gpt_attention": torch.ones(1, 16),
    }
    if config["use_parallel_embedding"]:
        tensors["transformer.vocab_embedding.weight"] = cut(embedding, config["embedding_sharding_dim"])
    for layer in range(config["num_hidden_layers"]):
        theirs, name = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [state.get(f"{theirs}self_attn.{p}_proj.{kind}") for p in "qkv"]
            if parts[0] is not None:
                q, k, v = parts
                tensors[f"{name}attention.qkv.{kind}"] = torch.cat([cut(q), cut_heads(k), cut_heads(v)])
            for mine, hf in (("fc", "gate_proj"), ("gate", "up_proj")):
                if f"{theirs}mlp.{hf}.{kind}" in state:
                    tensors[f"{name}mlp.{mine}.{kind}"] = cut(state[f"{theirs}mlp.{hf}.{kind}"])
            for mine, hf in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
                if f"{theirs}{hf}.{kind}" in state:
                    tensor = state[f"{theirs}{hf}.{kind}"]
                    tensors[f"{name}{mine}.{kind}"] = cut(tensor, 1) if kind == "weight" else tensor
        for mine, hf in NORMS:
            if f"{theirs}{hf}.weight" in state:
                tensors[f"{name}{mine}.weight"] = state[f"{theirs}{hf}.weight"]
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "llama": ("llama", {}, 1, {}),
    "llama, 2 ranks": ("llama", {}, 2, {}),
    "llama, biases, untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}, 2, {}),
    "qwen2, vocabulary padded and cut": ("qwen2", {}, 2, {"use_parallel_embedding": True}),
    "qwen2, as many KV heads as heads": ("qwen2", {"num_key_value_heads": 4}, 2, {}),
    "qwen3, embedding cut by columns": ("qwen3", {}, 2, {"use_parallel_embedding": True, "embedding_sharding_dim": 1}),
    "qwen3, fewer KV heads than ranks": ("qwen3", {}, 4, {}),
    "qwen3, one KV head": ("qwen3", {"num_key_value_heads": 1}, 4, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_put_together_again(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    architecture, own, ranks, changes = CASES[case]
    original = save_tiny_model(architecture, tmp_path / "hf", **own) if own else tiny_model(architecture)
    checkpoint = write_trtllm(original, tmp_path / "trtllm", ranks, **changes)
    model, expected = load_config(checkpoint), load_config(original)
    assert model == expected.replace(bos_token_id=None, eos_token_ids=())
    weights, theirs = load_weights(checkpoint, DType.FLOAT32), load_weights(original, DType.FLOAT32)
    assert weights.keys() == theirs.keys()
    assert all(weights[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_original(architecture: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = write_trtllm(tiny_model(architecture), tmp_path, 2)
    model = load_config(checkpoint)
    ids = torch.randint(model.vocab_size, (60,), generator=torch.Generator().manual_seed(0)).int()
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(architecture), dtype=torch.float32).eval()
    with torch.inference_mode():
        ops = EagerOps(load_weights(checkpoint, DType.FLOAT32), DType.FLOAT32)
        logits = Decoder(model).dense_logits(ops, ids, torch.arange(60, dtype=torch.int32))
        expected = reference(ids[None].long()).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_what_lies_beside_it_is_read(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = write_trtllm(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded: none of tokenizer\.json"):
        load_tokenizer(checkpoint)
    byte_tokenizer().save_pretrained(checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_tokenizer(checkpoint).decode(load_tokenizer(checkpoint)("text").input_ids) == "text"
    assert load_config(checkpoint).eos_token_ids == (2, 7)


def test_engine_with_the_tokenizer_of_another_directory(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    original = tiny_model("qwen3")
    checkpoint = write_trtllm(original, tmp_path / "trtllm", 2)
    options: dict[str, Any] = {"dtype": "float32", "max_input_len": 64}
    with pytest.raises(ValueError, match=r"none of tokenizer\.json.* is there; name a directory .*--tokenizer"):
        build_engine(checkpoint, tmp_path / "engine", **options)
    build_engine(checkpoint, tmp_path / "engine", tokenizer=original, **options)
    build_engine(original, tmp_path / "expected", **options)
    engine, expected = load_engine(tmp_path / "engine"), load_engine(tmp_path / "expected")
    assert engine.config.model.eos_token_ids == expected.config.model.eos_token_ids == (2,)
    assert engine.load_tokenizer().get_vocab() == expected.load_tokenizer().get_vocab()
    outputs = [LLM(path).generate("text", SamplingParams(max_tokens=4))[0] for path in (engine.path, expected.path)]
    assert outputs[0].token_ids == outputs[1].token_ids


# ---- refused ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "MixtralForCausalLM"}, "architecture: 'MixtralForCausalLM' is not supported"),
    "no text": ({"architecture": 7}, "architecture: 7 is not supported"),
    "engine": ({"pretrained_config": {}}, "this is an engine"),
    "quantized": ({"quantization": {"quant_algo": "W8A16"}}, "quantization.quant_algo: 'W8A16' is not supported"),
    "quantized cache": ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "quantization.kv_cache_quant_algo: 'FP8'"),
    "quantization no object": ({"quantization": "FP8"}, "quantization: 'FP8' is not of type dict"),
    "experts": ({"moe": {"num_experts": 8}}, "moe.num_experts: 8"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    "positions": ({"position_embedding_type": "mrope"}, "position_embedding_type: 'mrope'"),
    "multiplier": ({"residual_multiplier": 0.5}, "residual_multiplier: 0.5"),
    "rope type": ({"rotary_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary_scaling.rope_type: 'dynamic'"),
    "rope no object": ({"rotary_scaling": 2.0}, "rotary_scaling: 2.0 is not an object"),
    "partial rotation": ({"rotary_embedding_dim": 8}, "rotary_embedding_dim: 8"),
    "qwen type": ({"qwen_type": "qwen2"}, "qwen_type: 'qwen2'"),
    "qk norm": ({"qk_layernorm": True}, "qk_layernorm: True"),
    "missing": ({"hidden_size": None}, "hidden_size: missing"),
    "type": ({"vocab_size": "259"}, "vocab_size: '259' is not of type int"),
    "heads": ({"num_attention_heads": 0}, "num_attention_heads: 0 is not an integer >= 1"),
    "head size": ({"num_attention_heads": 3, "head_size": None}, "hidden_size: 64 is not a multiple"),
    "head size not built": ({"head_size": 20, "rotary_embedding_dim": 20}, "head_dim: 20"),
}  # fmt: skip


@pytest.fixture
def checkpoint(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of two ranks that the test may break."""
    return write_trtllm(tiny_model("llama"), tmp_path / "trtllm", 2)


@pytest.mark.parametrize("case", REFUSED)
def test_config_is_refused_by_name(case: str, checkpoint: Path) -> None:
    changes, message = REFUSED[case]
    edit_json(checkpoint / "config.json", lambda data: data.update(changes))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_config(checkpoint)
    assert str(checkpoint / "config.json") in str(error.value)


MAPPINGS: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"pp_size": 2, "world_size": 4}, "mapping.pp_size: 2 is not supported"),
    "context": ({"cp_size": 2, "world_size": 4}, "mapping.cp_size: 2"),
    "automatic": ({"auto_parallel": True}, "mapping.auto_parallel: True"),
    "world": ({"world_size": 8}, "world_size 8 and tp_size 2 disagree"),
    "heads": ({"tp_size": 3, "world_size": 3, "moe_tp_size": 3}, "3 does not divide num_attention_heads = 4"),
    "no ranks": ({"tp_size": 0}, "world_size 2 and tp_size 0 disagree"),
    "type": ({"tp_size": "2"}, "tp_size: '2' is not of type int"),
}


@pytest.mark.parametrize("case", MAPPINGS)
def test_cuts_that_are_not_put_together(case: str, checkpoint: Path) -> None:
    changes, message = MAPPINGS[case]
    edit_json(checkpoint / "config.json", lambda data: data["mapping"].update(changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(checkpoint)


def test_ranks_that_do_not_fit(checkpoint: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_weights(checkpoint, DType.FLOAT32)

    shutil.copy(checkpoint / "rank0.safetensors", checkpoint / "rank2.safetensors")
    refused(r"has 3 rank files, but mapping\.tp_size is 2")
    (checkpoint / "rank2.safetensors").unlink()
    (checkpoint / "rank1.safetensors").rename(checkpoint / "aside")
    refused(r"rank1\.safetensors: there is no such file")
    (checkpoint / "rank1.safetensors").write_bytes((checkpoint / "aside").read_bytes()[:-100])
    refused(r"rank1\.safetensors: corrupt or truncated")


def test_tensors_that_do_not_fit(checkpoint: Path) -> None:
    file = checkpoint / "rank1.safetensors"
    good = load_file(file)
    name = "transformer.layers.1.attention.qkv.weight"

    def refused(tensors: dict[str, Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ValueError, match=re.escape(message)):
            load_weights(checkpoint, DType.FLOAT32)

    refused({n: t for n, t in good.items() if n != name}, f"rank1.safetensors: tensor {name} is missing")
    refused({**good, name: good[name][:-1].clone()}, f"tensor {name} has shape [63, 64], the config asks for [64, 64]")
    refused({**good, "transformer.layers.1.mlp.router.weight": torch.ones(2)}, "mlp.router.weight has no place")
    refused({**good, name: good[name].to(torch.int8)}, f"tensor {name} has dtype I8")
    norm = "transformer.layers.1.input_layernorm.weight"
    refused({**good, norm: good[norm] + 1}, f"tensor {norm} is not that of rank 0")
