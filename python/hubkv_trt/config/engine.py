# SPDX-License-Identifier: Apache-2.0
"""What an engine directory says of itself in ``engine.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .base import INT32_MAX, Config, require
from .hardkv import HardKVConfig
from .hubkv import Evicted, HubKVConfig, Scorer
from .model import DType, ModelConfig


class Backend(str, Enum):
    EAGER = "eager"
    TENSORRT = "tensorrt"


class WeightsPlace(str, Enum):
    """Of the plans of a TensorRT engine: inputs (one copy on the device for both plans) or constants inside them."""

    SHARED = "shared"
    EMBEDDED = "embedded"


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TensorRTConfig(Config):
    """What the plans of a TensorRT engine were built for. The limits are those of their optimization profiles."""

    weights: WeightsPlace = WeightsPlace.SHARED
    max_extend_len: int = 512  # Tq: new tokens of a sequence in one enqueue
    min_ratio: float = 0.0  # the least compression ratio of a prompt of max_input_len tokens; bounds K
    last_queries: int = 0  # M: prefill also gives the queries of the last M tokens
    new_queries: bool = False  # extend also gives the queries of the new tokens
    version: str = ""  # of the TensorRT that built the plans, "10.14.1"
    compute_capability: str = ""  # of the GPU that they run on, "9.0"
    plugin_library: str = ""  # file of the plugins that were built in; running takes those of the installation

    def __post_init__(self) -> None:
        for name, least in (("max_extend_len", 1), ("last_queries", 0)):
            value = getattr(self, name)
            require(type(value) is int and least <= value <= INT32_MAX, name, value, f"an integer >= {least}")
        require(isinstance(self.weights, WeightsPlace), "weights", self.weights, "a WeightsPlace")
        ratio = self.min_ratio
        require(isinstance(ratio, (int, float)) and 0 <= ratio < 1, "min_ratio", ratio, "a ratio in [0, 1)")


@dataclass(frozen=True)
class EngineConfig(Config):
    """``engine.json``: everything a runtime must know of an engine directory."""

    model: ModelConfig
    dtype: DType
    max_input_len: int  # tokens of one prompt
    max_batch_size: int  # sequences that decode together
    hubkv: HubKVConfig | None = None  # None: a dense engine
    decode_compression: HardKVConfig | None = None  # None: the cache of a sequence grows as it decodes
    backend: Backend = Backend.EAGER
    tensorrt: TensorRTConfig | None = None  # given where the backend is tensorrt, and only there
    schema_version: int = SCHEMA_VERSION
    model_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # of the packages that built it
    files: dict[str, str] = field(default_factory=dict)  # file name -> sha256

    def __post_init__(self) -> None:
        require(
            self.schema_version == SCHEMA_VERSION,
            "schema_version",
            self.schema_version,
            f"{SCHEMA_VERSION}, the one this version reads: build the engine again",
        )
        require(
            type(self.max_input_len) is int and 1 <= self.max_input_len <= self.model.max_position_embeddings,
            "max_input_len",
            self.max_input_len,
            f"in 1..{self.model.max_position_embeddings} (the model's max_position_embeddings)",
        )
        batch = self.max_batch_size
        require(type(batch) is int and 1 <= batch <= INT32_MAX, "max_batch_size", batch, "an integer in 1..2^31 - 1")
        needed = self.backend is Backend.TENSORRT
        expected = "given" if needed else f"null where the backend is {self.backend.value}"
        require((self.tensorrt is not None) == needed, "tensorrt", self.tensorrt, expected)
        require(
            not needed or self.decode_compression is None,
            "decode_compression",
            self.decode_compression,
            "run by the backend tensorrt: leave it out, or take --backend eager",
        )
        if self.tensorrt is not None:
            check_plans(self, self.tensorrt)

    @property
    def has_row_bias(self) -> bool:
        """Whether compact rows may stand for several tokens each, and have a bias for it."""
        summarized = self.hubkv is not None and self.hubkv.evicted is not Evicted.DROP
        return summarized or (self.decode_compression is not None and self.decode_compression.condensed_rows > 0)

    @property
    def has_gate(self) -> bool:
        """Whether the engine directory holds the tensors of a gate."""
        return self.hubkv is not None and self.hubkv.scorer is Scorer.FASTKVZIP


def check_plans(config: EngineConfig, plans: TensorRTConfig) -> None:
    """Refuses limits of a TensorRT engine that contradict each other.

    Raises:
        ValueError: float32, a scorer or a discount that is not in the graph, or a limit beyond the model's positions or
            the prompt's.
    """
    require(
        config.hubkv is None or config.has_gate,
        "scorer",
        None if config.hubkv is None else config.hubkv.scorer.value,
        f"in the graph of a TensorRT engine: take {Scorer.FASTKVZIP.value}, or --backend eager",
    )
    evicted = Evicted.DROP if config.hubkv is None else config.hubkv.evicted
    require(
        evicted is Evicted.DROP, "evicted", evicted.value, "drop, all that --backend tensorrt has: or --backend eager"
    )
    strength = 0.0 if config.hubkv is None else config.hubkv.prominence
    require(strength == 0, "prominence", strength, "0, all that --backend tensorrt has: or --backend eager")
    positions = config.model.max_position_embeddings
    require(
        config.dtype is not DType.FLOAT32,
        "dtype",
        config.dtype.value,
        "a type of TensorRT's fused attention: take bfloat16 or float16, or --backend eager",
    )
    require(
        plans.max_extend_len <= positions,
        "max_extend_len",
        plans.max_extend_len,
        f"at most {positions} (the model's max_position_embeddings)",
    )
    require(
        plans.last_queries <= config.max_input_len,
        "last_queries",
        plans.last_queries,
        f"at most max_input_len = {config.max_input_len}",
    )
    require(
        plans.min_ratio == 0 or config.hubkv is not None,
        "min_ratio",
        plans.min_ratio,
        "of use in an engine without HubKV, which keeps every KV pair: leave it 0",
    )
