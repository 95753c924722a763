# SPDX-License-Identifier: Apache-2.0
"""HubKV as a KV-cache compression method of TensorRT-LLM's PyTorch backend (1.3 and later).

Importing this module registers it. Then::

    from hubkv_trt.integrations.tensorrt_llm import HubKVCompressionConfig

    llm = LLM(model, kv_cache_config=KvCacheConfig(use_kv_cache_manager_v2=True, enable_block_reuse=False),
              kv_cache_compression_config=HubKVCompressionConfig(gate="gate.pt", ratio=0.75))

Written against the public source of TensorRT-LLM at commit 0004396; it has not run there. What it needs of TensorRT-LLM
stands in ``_REQUIRED`` and is compared with the installed version at import. docs/tensorrt-llm.md says how it works and
what it refuses.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Optional, Union

import torch
from torch import Tensor

from ..config import DEFAULT_PRESET, DType, HubKVConfig, Scope
from ..models.checkpoint import read_config
from ..scorers.fastkvzip import load_gate
from .paged_rows import compact_pages
from .prompt_compressor import Chunk, PromptCompressor, local_heads

try:
    from pydantic import Field, model_validator
    from tensorrt_llm._torch.pyexecutor import _util
    from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
    from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheCompressionManager
    from tensorrt_llm.llmapi import llm_args
    from tensorrt_llm.logger import logger
except ImportError as error:
    raise ImportError(
        f"hubkv_trt.integrations.tensorrt_llm needs TensorRT-LLM >= 1.3 with its KV-cache compression framework "
        f"(pip install 'hubkv-trt[tensorrt-llm]'): {error}"
    ) from error

ALGORITHM: Final = "hubkv"
_FIELD = "kv_cache_compression_config"
_REQUIRED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (KVCacheCompressionManager, "bind_kv_cache_managers", ("kv_cache_manager", "draft_kv_cache_manager")),
    (KVCacheCompressionManager, "on_request_init", ("request",)),
    (KVCacheCompressionManager, "on_context_step_end", ("requests",)),
    (KVCacheCompressionManager, "on_request_finish", ("request",)),
    (KVCacheManagerV2, "_resize_context_history", ("req", "kv_cache", "history_length")),
    (KVCacheManagerV2, "get_buffers", ("layer_idx", "kv_layout")),
    (KVCacheManagerV2, "get_batch_cache_indices", ("request_ids", "layer_idx")),
    (
        _util,
        "create_kv_cache_compression_manager",
        ("config", "model_engine", "kv_cache_config", "estimating_kv_cache"),
    ),
    (_util, "validate_kv_cache_compression_compatibility", ("config", "kv_cache_config", "spec_config")),
)
"""Owner, name and parameters of what this module calls, overrides or wraps."""


class HubKVCompressionConfig(llm_args.KvCacheCompressionConfig):
    """``kv_cache_compression_config`` of TensorRT-LLM's ``LLM``.

    Raises:
        ValueError: a parameter that there is not, or a value out of range; names it.
    """

    changes_physical_kv_length: ClassVar[bool] = True  # TensorRT-LLM then leaves RoPE to logical positions

    algorithm: Literal["hubkv"] = ALGORITHM
    gate: str = Field(description="File of the model's FastKVzip gate, .pt or .safetensors.")
    ratio: float = Field(default=HubKVConfig.ratio, description="Fraction of a prompt's KV pairs removed, in [0, 1).")
    preset: str = Field(default=DEFAULT_PRESET, description="A method of the paper; sets the parameters.")
    parameters: dict[str, int | float | None] = Field(
        default_factory=dict, description="Fields of HubKVConfig that differ from the preset."
    )

    @model_validator(mode="after")
    def _check(self) -> HubKVCompressionConfig:
        self.hubkv()
        return self

    def hubkv(self) -> HubKVConfig:
        """The parameters of the stages; ``head`` scope."""
        for name in {"preset", "ratio"} & set(self.parameters):
            raise ValueError(f"parameters: {name} is a field of its own")
        preset = HubKVConfig.from_preset(self.preset, ratio=self.ratio, scope=Scope.HEAD)
        return HubKVConfig.from_dict({**preset.to_dict(), **self.parameters})


class HubKVCompressionManager(KVCacheCompressionManager):
    """Scores prompts in hooks on the attention layers, and compacts their pages when the last chunk is through.

    Args:
        config: a ``HubKVCompressionConfig``.
        model_engine: TensorRT-LLM's ``PyTorchModelEngine``, its model loaded.

    Raises:
        ValueError: the model, the gate or an option of the engine is refused; says which.
        FileNotFoundError: the gate is not there.
    """

    def __init__(self, config: Any, *, model_engine: Any) -> None:
        pretrained = model_engine.model.model_config.pretrained_config
        super().__init__(config, pretrained_config=pretrained)
        if model_engine.llm_args.torch_compile_config is not None:
            raise ValueError("torch_compile_config: None is needed: the gate runs in module hooks")
        model = read_config(pretrained.to_dict(), "model")
        mapping = model_engine.mapping
        ranks, rank = (1, 0) if mapping.enable_attention_dp else (mapping.tp_size, mapping.tp_rank)
        blocks = model_engine.model.model.layers
        attention = {layer: blocks[layer].self_attn for layer in mapping.pp_layers(model.num_layers)}
        for layer, module in attention.items():
            if module.rope_fusion:
                raise ValueError(f"layer {layer}: RoPE is fused into attention, which would rotate by physical lengths")
        self._compressor = PromptCompressor(
            model,
            config.hubkv(),
            load_gate(config.gate, model),
            DType(str(pretrained.torch_dtype).removeprefix("torch.")),
            next(model_engine.model.parameters()).device,
            tuple(attention),
            local_heads(model.num_kv_heads, ranks, rank),
        )
        self._hooks = [
            module.register_forward_pre_hook(self._scorer(layer, module), with_kwargs=True)
            for layer, module in attention.items()
        ]

    def _scorer(self, layer: int, module: Any) -> Callable[..., None]:
        """The hook before an attention layer. In a batch, tokens of prompts come before those that decode."""
        signature = inspect.signature(module.forward)

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            hidden, metadata = given["hidden_states"], given["attn_metadata"]
            chunks = _chunks(metadata)
            if any(chunk.request in self._compressor for chunk in chunks):
                if not isinstance(hidden, Tensor):
                    raise ValueError(f"layer {layer}: the attention input is a {type(hidden).__name__}, not a tensor")
                self._compressor.score(layer, hidden, chunks)

        return hook

    def bind_kv_cache_managers(self, kv_cache_manager: Any, draft_kv_cache_manager: Any = None) -> None:
        """Takes over the cache; refuses what the method cannot serve."""
        super().bind_kv_cache_managers(kv_cache_manager, draft_kv_cache_manager)
        windows = [w for w in kv_cache_manager.max_attention_window_vec if w is not None]
        for name, bad in (
            ("draft_kv_cache_manager", draft_kv_cache_manager is not None),
            ("enable_block_reuse", kv_cache_manager.enable_block_reuse),
            ("is_disagg", kv_cache_manager.is_disagg),
            ("max_beam_width", kv_cache_manager.max_beam_width != 1),
            ("kv_factor", kv_cache_manager.kv_factor != 2),
            ("max_attention_window", any(w < kv_cache_manager.max_seq_len for w in windows)),
        ):
            if bad:
                raise ValueError(f"{name}: {getattr(kv_cache_manager, name, True)} cannot be combined with {ALGORITHM}")
        advance = kv_cache_manager._resize_context_history

        def hold(req: Any, kv_cache: Any, history_length: int) -> None:
            """A prompt's tokens are declared final before the hook runs, and final ones cannot be given back."""
            if req.py_request_id not in self._compressor:
                advance(req, kv_cache, history_length)

        kv_cache_manager._resize_context_history = hold

    def on_request_init(self, request: Any, **kwargs: Any) -> None:
        if not request.is_dummy:
            request.py_num_compressed_tokens = 0  # also where a preempted request starts over
            self._compressor.begin(request.py_request_id)

    def on_request_finish(self, request: Any, **kwargs: Any) -> None:
        self._compressor.forget(request.py_request_id)

    def on_context_step_end(self, requests: Sequence[Any], **kwargs: Any) -> None:
        """Compacts the prompts that are through; one that cannot be compacted stays dense."""
        compacted: list[tuple[Any, Any, int, int]] = []
        for request in requests:
            cache = self.kv_cache_manager.kv_cache_map.get(request.py_request_id)
            if request.py_request_id not in self._compressor or cache is None or not cache.is_active:
                self._compressor.forget(request.py_request_id)
                continue
            num_tokens = int(request.context_current_position)  # all that was prefilled
            try:
                kept = self._compressor.select(request.py_request_id, num_tokens)
            except ValueError as error:
                logger.warning(f"{ALGORITHM}: request {request.py_request_id} keeps its whole prompt: {error}")
                continue
            if kept is not None:
                self._compact(request.py_request_id, kept, num_tokens, int(cache.capacity))
                compacted.append((request, cache, num_tokens, kept.shape[2]))
        self._wait()
        for request, cache, num_tokens, rows in compacted:
            request.py_num_compressed_tokens += num_tokens - rows  # cached length = logical length - this
            capacity = int(cache.capacity) - num_tokens + rows
            if not cache.resize(capacity, None):
                raise RuntimeError(
                    f"{ALGORITHM}: request {request.py_request_id} could not shrink to {capacity} tokens"
                )

    def _compact(self, request: int, kept: Tensor, num_tokens: int, capacity: int) -> None:
        """Moves the kept rows, and behind them what the cache holds beyond the prompt: with overlapped scheduling the
        first decoded token is under way already."""
        tail = torch.arange(num_tokens, capacity, dtype=kept.dtype, device=kept.device).expand(kept.shape[1], -1)
        for layer, positions in zip(self._compressor.layers, kept, strict=True):
            (pages,) = self.kv_cache_manager.get_batch_cache_indices([request], layer)
            pool = self.kv_cache_manager.get_buffers(layer, kv_layout="HND")
            numbers = torch.tensor(pages, dtype=torch.int64).to(pool.device, non_blocking=True)
            compact_pages(pool, numbers, torch.cat([positions, tail], 1).to(pool.device))

    def _wait(self) -> None:
        """Pages are given back in the order of the cache's own stream."""
        if torch.cuda.is_available():
            self.kv_cache_manager._stream.wait_stream(torch.cuda.current_stream())

    def shutdown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _chunks(metadata: Any) -> list[Chunk]:
    """The prompts of a batch, from TensorRT-LLM's ``AttentionMetadata``."""
    count = metadata.num_contexts
    lengths = metadata.seq_lens[:count].tolist()  # on the host
    cached = metadata.kv_cache_params.num_cached_tokens_per_seq[:count]
    return [Chunk(*chunk) for chunk in zip(metadata.request_ids[:count], cached, lengths, strict=True)]


# ---- registration ----------------------------------------------------------------------------------------------------


def register() -> None:
    """Makes TensorRT-LLM accept ``HubKVCompressionConfig``; done at import, so in its worker processes too.

    Raises:
        ImportError: the installed version differs in something that this module needs; names it.
    """
    if getattr(_util.create_kv_cache_compression_manager, ALGORITHM, False):
        return
    for owner, name, parameters in _REQUIRED:
        found = getattr(owner, name, None)
        missing = set(parameters) - set(inspect.signature(found).parameters) if found is not None else {"itself"}
        if missing:
            where = getattr(owner, "__qualname__", owner.__name__)
            raise ImportError(
                f"this TensorRT-LLM is another than hubkv-trt was written for: {where}.{name} lacks "
                f"{', '.join(sorted(missing))} (docs/tensorrt-llm.md)"
            )
    _util.create_kv_cache_compression_manager = _with_hubkv(_util.create_kv_cache_compression_manager)
    _accept_config()


def _with_hubkv(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_kv_cache_compression_manager(
        config: Any, *, model_engine: Any, kv_cache_config: Any, estimating_kv_cache: bool = False
    ) -> Any:
        if not isinstance(config, HubKVCompressionConfig):
            return create(
                config,
                model_engine=model_engine,
                kv_cache_config=kv_cache_config,
                estimating_kv_cache=estimating_kv_cache,
            )
        _util.validate_kv_cache_compression_compatibility(config, kv_cache_config, model_engine.spec_config)
        return HubKVCompressionManager(config, model_engine=model_engine)

    setattr(create_kv_cache_compression_manager, ALGORITHM, True)
    return create_kv_cache_compression_manager


def _accept_config() -> None:
    """Adds the config to the union of those that ``LLM`` takes, in every class of arguments that has the field."""
    union = typing.get_args(llm_args.KvCacheCompressionConfigType)[0]
    accepted: Any = Annotated[Union[union, HubKVCompressionConfig], Field(discriminator="algorithm")]  # noqa: UP007
    llm_args.KvCacheCompressionConfigType = accepted
    for arguments in list(vars(llm_args).values()):
        field = getattr(arguments, "model_fields", {}).get(_FIELD) if isinstance(arguments, type) else None
        if field is not None:
            field.annotation = Optional[accepted]  # noqa: UP045
            arguments.model_rebuild(force=True)


register()
