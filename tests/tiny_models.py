# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in the Hugging Face format, one of every architecture; and what tests do to files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # wide enough that attention is far from uniform
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 24}),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the three special tokens of the demo model's chat format."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(
    architecture: str, directory: Path, seed: int = 0, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """Writes config, float32 weights and tokenizer of a random model; ``changes`` go to the transformers config."""
    cls, own = CONFIGS[architecture]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cls(**{**_COMMON, **own, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1
                tensor.add_(0.2 * torch.randn_like(tensor))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    return directory


def snapshot(directory: Path) -> dict[str, str]:
    """Every file below a directory and its sha256."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Applies a change to the object in a JSON file."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
