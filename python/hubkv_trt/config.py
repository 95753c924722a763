# SPDX-License-Identifier: Apache-2.0
"""Every setting that outlives a call, as frozen dataclasses. Unknown keys, wrong types and bad values are errors.

Each class reads itself from plain JSON data with ``from_dict`` and gives it back with ``to_dict``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

C = TypeVar("C", bound="Config")


class Scope(str, Enum):
    """Which KV pairs compete for one budget: all of the model, those of a layer, or those of a head."""

    MODEL = "model"
    LAYER = "layer"
    HEAD = "head"


class Scorer(str, Enum):
    """What gives KV pairs their scores (docs/scorers.md). Engines of TensorRT have the first one in their graph."""

    FASTKVZIP = "fastkvzip"
    KVZIP = "kvzip"
    SNAPKV = "snapkv"
    EXPECTED_ATTENTION = "expected_attention"
    KNORM = "knorm"
    TOVA = "tova"
    RANDOM = "random"
    STREAMING_LLM = "streaming_llm"

    @property
    def observed(self) -> int:
        """The last tokens of a prompt whose attention it looks at; they are kept, for it says nothing about them."""
        return {Scorer.SNAPKV: 64, Scorer.TOVA: 1}.get(self, 0)


class Backend(str, Enum):
    EAGER = "eager"
    TENSORRT = "tensorrt"


class WeightsPlace(str, Enum):
    """Of the plans of a TensorRT engine: inputs (one copy on the device for both plans) or constants inside them."""

    SHARED = "shared"
    EMBEDDED = "embedded"


class DType(str, Enum):
    """Type of weights, activations and cache rows. Scores and statistics are float32 everywhere."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is DType.FLOAT32 else 2


_INT32_MAX = 2**31 - 1
_FLOAT32_MIN, _FLOAT32_MAX = 1.2e-38, 3.4e38  # positive and normal


def require(condition: bool, field_name: str, value: object, expected: str) -> None:
    """Raises ``ValueError("field: value is not expected")`` unless the condition holds."""
    if not condition:
        raise ValueError(f"{field_name}: {value!r} is not {expected}")


@dataclass(frozen=True)
class Config:
    """Base of all settings: strict conversion from and to JSON data."""

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any]) -> C:
        """Builds the config from JSON data.

        Raises:
            ValueError: a key is unknown or missing, or a value has the wrong type or is out of range.
        """
        if not isinstance(data, dict):
            raise ValueError(f"{cls.__name__}: {data!r} is not an object")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise ValueError(f"{cls.__name__}.{key}: unknown key (known: {', '.join(sorted(fields))})")
        values = {}
        for name, f in fields.items():
            if name in data:
                values[name] = _convert(data[name], hints[name], f"{cls.__name__}.{name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__}.{name}: missing")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON data that ``from_dict`` reads back to an equal config."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def replace(self: C, **changes: Any) -> C:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), name)
    if origin is tuple:
        require(isinstance(value, (list, tuple)), name, value, "a list")
        return tuple(_convert(v, args[0], f"{name}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        require(isinstance(value, dict), name, value, "an object")
        return {str(k): _convert(v, args[1], f"{name}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [e.value for e in hint]
        require(value in choices or isinstance(value, hint), name, value, f"one of {', '.join(choices)}")
        return hint(value)
    if hint is float:
        require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, "a number")
        require(abs(value) <= sys.float_info.max, name, value, "a finite number")  # also of an int past any float
        return float(value)
    if hint in (int, bool, str):
        require(type(value) is hint, name, value, {int: "an integer", bool: "true or false", str: "a text"}[hint])
    return value


# ---- the model -----------------------------------------------------------------------------------------------------


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


# ---- HubKV -----------------------------------------------------------------------------------------------------------

DEFAULT_PRESET = "fastkvzip_head_nms_gated_k5_p0.5_mild"


@dataclass(frozen=True)
class HubKVConfig(Config):
    """Parameters of the compression at prefill (the stages of ``include/hubkv/hubkv.h``).

    The defaults are the paper's final method, ``fastkvzip_head_nms_gated_k5_p0.5_mild``.
    """

    ratio: float = 0.75  # r, the fraction of KV pairs removed where a request names none
    scope: Scope = Scope.MODEL
    preset: str = DEFAULT_PRESET
    nms_kernel: int = 5  # k, odd
    penalty_factor: float = 0.5  # gamma
    head_weight_temperature: float = 0.5  # tau
    min_head_weight: float = 0.8
    max_head_weight: float = 1.2
    gate_power: float = 2.0  # p: alpha = r^p
    sink_tokens: int = 4
    window_ratio: float = 0.02  # of the prompt, where it is shorter than long_context
    window_tokens: int = 4096  # for prompts of long_context tokens and more
    long_context: int = 32000
    scorer: Scorer = Scorer.FASTKVZIP

    def __post_init__(self) -> None:
        for name in ("nms_kernel", "sink_tokens", "window_tokens", "long_context"):  # the stages read int32
            value = getattr(self, name)
            require(type(value) is int and value <= _INT32_MAX, name, value, "an integer below 2^31")
        require(self.scope in list(Scope), "scope", self.scope, f"one of {', '.join(Scope)}")
        require(isinstance(self.scorer, Scorer), "scorer", self.scorer, "a Scorer")
        require(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        check_ratio(self.ratio)
        require(self.nms_kernel >= 1 and self.nms_kernel % 2 == 1, "nms_kernel", self.nms_kernel, "an odd number >= 1")
        require(0 <= self.penalty_factor <= 1, "penalty_factor", self.penalty_factor, "in [0, 1]")
        require(self.head_weight_temperature >= 0, "head_weight_temperature", self.head_weight_temperature, ">= 0")
        require(
            _FLOAT32_MIN <= self.min_head_weight <= self.max_head_weight,
            "min_head_weight",
            self.min_head_weight,
            f"a float32 in (0, max_head_weight = {self.max_head_weight}]",
        )
        require(self.gate_power >= 0, "gate_power", self.gate_power, ">= 0")
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, ">= 0")
        require(0 <= self.window_ratio <= 1, "window_ratio", self.window_ratio, "in [0, 1]")
        require(self.window_tokens >= 0, "window_tokens", self.window_tokens, ">= 0")
        require(self.long_context >= 1, "long_context", self.long_context, ">= 1")
        for name in ("head_weight_temperature", "max_head_weight", "gate_power"):  # they read float32
            require(getattr(self, name) <= _FLOAT32_MAX, name, getattr(self, name), "a finite float32")

    @classmethod
    def from_preset(cls, preset: str = DEFAULT_PRESET, **changes: Any) -> HubKVConfig:
        """The parameters that the paper's name stands for, with some changed.

        Raises:
            ValueError: there is no such preset.
        """
        if preset not in PRESETS:
            raise ValueError(f"preset: {preset!r} is not one of {', '.join(PRESETS)}")
        return cls(**{"preset": preset, **PRESETS[preset], **changes})

    def alpha(self, ratio: float) -> float:
        """Strength of the refinement, r^p; 0 at r = 0 for every p: where nothing is removed, nothing is refined."""
        return 0.0 if ratio == 0 else float(ratio) ** self.gate_power

    def window(self, num_tokens: int) -> int:
        """The last w positions of a prompt of T tokens that are always kept (FastKVzip's rule, or what the scorer has
        to look at)."""
        w = int(self.window_ratio * num_tokens) if num_tokens < self.long_context else self.window_tokens
        return min(max(w, self.scorer.observed), num_tokens)

    def num_protected(self, num_tokens: int) -> int:
        """Positions of a prompt of T tokens that every head keeps: sinks and window, counted once."""
        return min(num_tokens, min(self.sink_tokens, num_tokens) + self.window(num_tokens))


def check_ratio(ratio: float) -> float:
    """The compression ratio as a float in [0, 1).

    Raises:
        ValueError: it is not a number in [0, 1).
    """
    ok = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 <= ratio < 1  # NaN fails too
    require(ok, "ratio", ratio, "a compression ratio in [0, 1), the fraction of KV pairs removed")
    return float(ratio)


_MILD = {"head_weight_temperature": 0.5, "min_head_weight": 0.8, "max_head_weight": 1.2}
_TINY = {"head_weight_temperature": 0.25, "min_head_weight": 0.9, "max_head_weight": 1.1}
_OFF = {"head_weight_temperature": 0.0, "gate_power": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "fastkvzip": {"nms_kernel": 1, "penalty_factor": 1.0, **_OFF},
    "fastkvzip_nms": {"nms_kernel": 5, "penalty_factor": 0.5, **_OFF},
    "fastkvzip_head_nms_k5_p0.5_mild": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 0.0, **_MILD},
    "fastkvzip_head_nms_k5_p0.5_tiny": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 0.0, **_TINY},
    DEFAULT_PRESET: {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 2.0, **_MILD},
    "fastkvzip_head_nms_gated_k5_p0.5_tiny": {"nms_kernel": 5, "penalty_factor": 0.5, "gate_power": 2.0, **_TINY},
    "fastkvzip_head_nms_gated_k7_p0.2_mild": {"nms_kernel": 7, "penalty_factor": 0.2, "gate_power": 2.0, **_MILD},
}
"""The paper's names (seed parameters of the one refine stage)."""


@dataclass(frozen=True)
class Budget:
    """How many rows a prompt keeps; computed once, on the host, in double, before anything runs."""

    num_groups: int  # S of select: 1 (model), L (layer) or L*Hkv (head)
    rows_per_group: int  # K of select
    num_pairs: int  # N = L*Hkv*T

    @property
    def num_rows(self) -> int:
        """K, the rows of the whole compact segment."""
        return self.num_groups * self.rows_per_group

    @property
    def effective_ratio(self) -> float:
        """The fraction of KV pairs really removed: below the one asked for where protection takes more."""
        return 1.0 - self.num_rows / self.num_pairs


def budget(model: ModelConfig, hubkv: HubKVConfig, num_tokens: int, ratio: float) -> Budget:
    """K = N - floor(r*N) for each group of heads that shares a budget, never fewer than the protected rows.

    Args:
        model: gives L and Hkv.
        hubkv: gives scope and protection.
        num_tokens: T, >= 1.
        ratio: r in [0, 1).
    """
    ratio = check_ratio(ratio)
    require(num_tokens >= 1, "num_tokens", num_tokens, "an integer >= 1")
    groups = {Scope.MODEL: 1, Scope.LAYER: model.num_layers, Scope.HEAD: model.num_rows_per_token}[hubkv.scope]
    heads = model.num_rows_per_token // groups
    pairs = heads * num_tokens
    kept = pairs - math.floor(ratio * pairs)
    return Budget(groups, max(kept, heads * hubkv.num_protected(num_tokens)), groups * pairs)


# ---- the engine directory ------------------------------------------------------------------------------------------

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
            require(type(value) is int and least <= value <= _INT32_MAX, name, value, f"an integer >= {least}")
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
        require(type(batch) is int and 1 <= batch <= _INT32_MAX, "max_batch_size", batch, "an integer in 1..2^31 - 1")
        needed = self.backend is Backend.TENSORRT
        expected = "given" if needed else f"null where the backend is {self.backend.value}"
        require((self.tensorrt is not None) == needed, "tensorrt", self.tensorrt, expected)
        if self.tensorrt is not None:
            check_plans(self, self.tensorrt)

    @property
    def has_gate(self) -> bool:
        """Whether the engine directory holds the tensors of a gate."""
        return self.hubkv is not None and self.hubkv.scorer is Scorer.FASTKVZIP


def check_plans(config: EngineConfig, plans: TensorRTConfig) -> None:
    """Refuses limits of a TensorRT engine that contradict each other.

    Raises:
        ValueError: float32, a scorer that is not in the graph, or a limit beyond the model's positions or the prompt's.
    """
    require(
        config.hubkv is None or config.has_gate,
        "scorer",
        None if config.hubkv is None else config.hubkv.scorer.value,
        f"in the graph of a TensorRT engine: take {Scorer.FASTKVZIP.value}, or --backend eager",
    )
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
