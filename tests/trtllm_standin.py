# SPDX-License-Identifier: Apache-2.0
"""What of TensorRT-LLM the integration touches, rebuilt small: TensorRT-LLM itself runs on GPUs only.

Names, parameters, tensor layouts and the rules of the cache are those read in the public source at commit 0004396
(files in docs/tensorrt-llm.md). Memory, attention and scheduling are real, on the CPU; nothing here knows of HubKV.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, Optional, Union

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

BAD_PAGE_INDEX = -1


# ---- llmapi/llm_args.py ----------------------------------------------------------------------------------------------


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvCacheCompressionConfig(StrictBaseModel):
    changes_physical_kv_length: ClassVar[bool] = False
    algorithm: str

    def supports_block_reuse(self) -> bool:
        return False

    def supports_speculative_decoding(self) -> bool:
        return False


class ColdPageQuantizationCompressionConfig(KvCacheCompressionConfig):
    algorithm: Literal["quantization_for_cold_page"] = "quantization_for_cold_page"


class TriAttentionKvCacheCompressionConfig(KvCacheCompressionConfig):
    changes_physical_kv_length: ClassVar[bool] = True
    algorithm: Literal["triattention"] = "triattention"
    calibration_path: str


KvCacheCompressionConfigType = Annotated[
    Union[ColdPageQuantizationCompressionConfig, TriAttentionKvCacheCompressionConfig],  # noqa: UP007
    Field(discriminator="algorithm"),
]


def make_arguments() -> tuple[type[BaseModel], type[BaseModel]]:
    """``BaseLlmArgs`` and ``TorchLlmArgs``, new ones for every import of the stand-in."""

    class BaseLlmArgs(StrictBaseModel):
        kv_cache_compression_config: Optional[KvCacheCompressionConfigType] = None  # noqa: UP045

    class TorchLlmArgs(BaseLlmArgs):
        torch_compile_config: Optional[str] = None  # noqa: UP045

    return BaseLlmArgs, TorchLlmArgs


# ---- runtime/kv_cache_manager_v2: _KVCache ---------------------------------------------------------------------------


class KVCache:
    """The pages of one sequence. History cannot shrink, capacity cannot fall below history, pages may run out."""

    def __init__(self, manager: KVCacheManagerV2) -> None:
        self._manager = manager
        self.pages: list[int] = []
        self.capacity = self.history_length = 0
        self.is_active = True

    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        assert self.is_active
        capacity = self.capacity if capacity is None else capacity
        history_length = self.history_length if history_length is None else history_length
        if history_length < self.history_length:
            raise ValueError("History length cannot be decreased")
        if capacity < history_length:
            raise ValueError("History length cannot be greater than capacity")
        needed = -(-capacity // self._manager.tokens_per_block)
        if needed - len(self.pages) > len(self._manager.free_pages):
            return False
        while len(self.pages) < needed:
            self.pages.append(self._manager.free_pages.pop())
        while len(self.pages) > needed:
            self._manager.free_pages.insert(0, self.pages.pop())
        self.capacity, self.history_length = capacity, history_length
        return True


# ---- _torch/pyexecutor -----------------------------------------------------------------------------------------------


class KVCacheManagerV2:
    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, tokens_per_block: int, num_pages: int, seed: int = 0
    ) -> None:
        shape = (num_pages, 2, num_kv_heads, tokens_per_block, head_dim)
        self._pools = [torch.full(shape, float("nan")) for _ in range(num_layers)]
        self.free_pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tokens_per_block = tokens_per_block
        self.kv_cache_map: dict[int, KVCache] = {}
        self.kv_compression_manages_history = False
        self.enable_block_reuse = self.is_disagg = False
        self.max_beam_width, self.kv_factor, self.num_extra_kv_tokens = 1, 2, 0
        self.max_seq_len = 4096
        self.max_attention_window_vec: list[int | None] = [None, self.max_seq_len]

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Tensor | None:
        assert kv_layout == "HND", "pools are [page, K/V, head, token, dim]"
        return self._pools[layer_idx]

    def get_batch_cache_indices(
        self, request_ids: list[int], layer_idx: int | None = None, num_blocks_per_seq: Any = None
    ) -> list[list[int]]:
        return [list(self.kv_cache_map[request].pages) for request in request_ids]

    def resize_context(self, req: Any, num_tokens: int) -> bool:
        target = req.context_current_position + num_tokens + self.num_extra_kv_tokens
        cache = self.kv_cache_map[req.py_request_id]
        return cache.resize(max(cache.capacity, target))

    def try_allocate_generation(self, req: Any) -> bool:
        cache = self.kv_cache_map[req.py_request_id]
        return cache.resize(cache.capacity + 1)

    def update_context_resources(self, scheduled_batch: Any) -> None:
        for req in scheduled_batch.context_requests:
            self._resize_context_history(req, self.kv_cache_map[req.py_request_id], req.context_current_position)

    def _resize_context_history(self, req: Any, kv_cache: KVCache, history_length: int) -> None:
        if not kv_cache.resize(None, history_length):
            raise ValueError("Failed to resize history length")

    def update_resources(self, scheduled_batch: Any) -> None:
        for req in scheduled_batch.generation_requests:
            history = None if self.kv_compression_manages_history else req.max_beam_num_tokens - 1
            assert self.kv_cache_map[req.py_request_id].resize(None, history)

    def free_resources(self, request: Any) -> None:
        assert self.kv_cache_map.pop(request.py_request_id).resize(0, None)


class KVCacheCompressionManager:
    uses_iteration_lifecycle = True
    provides_cold_page_codec = False

    def __init__(self, config: Any, *, pretrained_config: Any = None) -> None:
        self.config = config
        self.pretrained_config = pretrained_config
        self.kv_cache_manager: Any = None
        self.draft_kv_cache_manager: Any = None

    def bind_kv_cache_managers(self, kv_cache_manager: Any, draft_kv_cache_manager: Any = None) -> None:
        if not isinstance(kv_cache_manager, KVCacheManagerV2):
            raise TypeError("KV-cache compression requires KVCacheManagerV2")
        self.kv_cache_manager = kv_cache_manager
        self.draft_kv_cache_manager = draft_kv_cache_manager
        kv_cache_manager.kv_compression_manages_history = self.config.changes_physical_kv_length

    def on_request_init(self, request: Any, **kwargs: Any) -> None: ...

    def on_context_step_end(self, requests: list[Any], **kwargs: Any) -> None: ...

    def on_generation_step_begin(self, scheduled_batch: Any, **kwargs: Any) -> None: ...

    def on_generation_step_end(self, scheduled_batch: Any, **kwargs: Any) -> None: ...

    def on_request_finish(self, request: Any, **kwargs: Any) -> None: ...

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for req in scheduled_batch.context_requests:
            if req.is_first_context_chunk:
                self.on_request_init(req)
        self.on_generation_step_begin(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        if scheduled_batch.context_requests_last_chunk:
            self.on_context_step_end(scheduled_batch.context_requests_last_chunk)
        self.on_generation_step_end(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        self.on_request_finish(request)

    def shutdown(self) -> None: ...


def create_kv_cache_compression_manager(
    config: Any, *, model_engine: Any, kv_cache_config: Any, estimating_kv_cache: bool = False
) -> Any:
    return None if config is None else f"manager of {config.algorithm}"


def validate_kv_cache_compression_compatibility(config: Any, kv_cache_config: Any, spec_config: Any) -> None:
    if kv_cache_config.enable_block_reuse and not config.supports_block_reuse():
        raise ValueError(f"algorithm {config.algorithm!r} does not support KV-cache block reuse")
    if spec_config is not None and not config.supports_speculative_decoding():
        raise ValueError(f"algorithm {config.algorithm!r} does not support speculative decoding")


# ---- modules ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """An attention layer as hooks see it; ``rope_fusion`` is what TensorRT-LLM sets for methods that evict."""

    def __init__(self) -> None:
        super().__init__()
        self.rope_fusion = False

    def forward(
        self, position_ids: Tensor | None, hidden_states: Tensor, attn_metadata: Any, attention_mask: Any = None
    ) -> Tensor:
        return hidden_states


def model_engine(pretrained_config: Any, **changes: Any) -> Any:
    """A ``PyTorchModelEngine`` with a model of that many layers, loaded."""
    num_layers = pretrained_config.num_hidden_layers
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Attention()}) for _ in range(num_layers))
    for layer in model.model.layers:
        layer.self_attn = layer["self_attn"]
    model.model.embed_tokens = nn.Embedding(2, 2)
    model.model_config = SimpleNamespace(pretrained_config=pretrained_config)  # type: ignore[assignment]
    mapping = SimpleNamespace(tp_size=1, tp_rank=0, enable_attention_dp=False, pp_layers=lambda n: list(range(n)))
    return SimpleNamespace(
        **{
            "model": model,
            "mapping": mapping,
            "llm_args": SimpleNamespace(torch_compile_config=None),
            "spec_config": None,
            **changes,
        }
    )


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """``import tensorrt_llm`` finds the stand-in, and the integration is imported anew."""
    base, torch_args = make_arguments()
    warnings: list[str] = []
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {},
        "tensorrt_llm.logger": {"logger": SimpleNamespace(warning=warnings.append, warnings=warnings)},
        "tensorrt_llm.llmapi": {},
        "tensorrt_llm.llmapi.llm_args": {
            "KvCacheCompressionConfig": KvCacheCompressionConfig,
            "KvCacheCompressionConfigType": KvCacheCompressionConfigType,
            "BaseLlmArgs": base,
            "TorchLlmArgs": torch_args,
        },
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor._util": {
            "create_kv_cache_compression_manager": create_kv_cache_compression_manager,
            "validate_kv_cache_compression_compatibility": validate_kv_cache_compression_compatibility,
        },
        "tensorrt_llm._torch.pyexecutor.kv_cache": {},
        "tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2": {"KVCacheManagerV2": KVCacheManagerV2},
        "tensorrt_llm._torch.pyexecutor.resource_manager": {"KVCacheCompressionManager": KVCacheCompressionManager},
    }
    integration = "hubkv_trt.integrations.tensorrt_llm"
    before = {name: sys.modules.pop(name, None) for name in (*contents, integration)}
    modules = {name: types.ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name], __path__=[])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
