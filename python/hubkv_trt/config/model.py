# SPDX-License-Identifier: Apache-2.0
"""The decoder: its shapes, its number type, its position embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .base import Config, require


class DType(str, Enum):
    """Type of weights, activations and cache rows. Scores and statistics are float32 everywhere."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is DType.FLOAT32 else 2


@dataclass(frozen=True)
class RopeConfig(Config):
    """Rotary position embedding.

    ``type`` is ``default``, ``linear``, ``llama3`` (Llama 3.1) or ``yarn`` (arXiv 2309.00071); the remaining fields are
    used by the types that name them, with the meaning they have in a Hugging Face ``config.json``.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        require(self.theta > 0, "rope.theta", self.theta, "a number > 0")
        types = ("default", "linear", "llama3", "yarn")
        require(self.type in types, "rope.type", self.type, f"one of {', '.join(types)}")
        require(self.factor >= 1, "rope.factor", self.factor, "a number >= 1")
        for name in ("low_freq_factor", "high_freq_factor") if self.type == "llama3" else ():
            require(getattr(self, name) is not None, f"rope.{name}", None, "a number: llama3 needs it")


@dataclass(frozen=True)
class ModelConfig(Config):
    """A decoder of the Llama family (Llama, Qwen2, Qwen3), in the terms of the shapes' alphabet."""

    architecture: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "an integer >= 1")
        require(self.num_layers <= 65536, "model.num_layers", self.num_layers, "at most 65536")
        require(self.rms_norm_eps > 0, "model.rms_norm_eps", self.rms_norm_eps, "a number > 0")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        require(self.group_size <= 16, "model.num_heads / num_kv_heads", self.group_size, "at most 16")
        require(
            self.head_dim % 8 == 0 and self.head_dim <= 256,
            "model.head_dim",
            self.head_dim,
            "a multiple of 8 up to 256",
        )

    @property
    def group_size(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_rows_per_token(self) -> int:
        """L * Hkv: the KV pairs that one token adds."""
        return self.num_layers * self.num_kv_heads

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of dense K and V that one token adds."""
        return 2 * self.num_rows_per_token * self.head_dim * dtype.itemsize
