# SPDX-License-Identifier: Apache-2.0
"""HubKV inside TensorRT-LLM: paged prompts are compacted, and what is decoded then is exact over the kept rows."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import trtllm_standin
from hubkv_trt.config import HubKVConfig, Scope, budget
from masked_reference import masked_logits
from trtllm_executor import HUBKV, NUM_PAGES, PAGE, Executor, load_tiny, token_ids


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path], tiny_gate: Callable[..., Path]) -> Any:
    return load_tiny(tiny_model("llama"), tiny_gate("llama"))


@pytest.fixture
def trtllm() -> Iterator[Any]:
    with trtllm_standin.installed() as modules:
        yield SimpleNamespace(
            integration=importlib.import_module("hubkv_trt.integrations.tensorrt_llm"),
            llm_args=modules["tensorrt_llm.llmapi.llm_args"],
            util=modules["tensorrt_llm._torch.pyexecutor._util"],
            warnings=modules["tensorrt_llm.logger"].logger.warnings,
        )


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("chunk", [1000, 33], ids=["whole", "chunks"])
def test_decoding_equals_attention_with_the_dropped_pairs_masked(
    tiny: Any, trtllm: Any, chunk: int, overlap: bool
) -> None:
    steps, prompts = 20, [90, 61, 7]
    texts = [token_ids(tiny.config, length + steps, seed) for seed, length in enumerate(prompts)]
    executor = Executor(tiny, trtllm, texts, prompts, overlap)
    kept: dict[int, Tensor] = {}
    select = executor.compression._compressor.select
    executor.compression._compressor.select = lambda r, n: kept.setdefault(r, select(r, n))
    executor.run(steps, chunk)
    assert trtllm.warnings == []
    for request, length in zip(executor.requests, prompts, strict=True):
        positions = kept[request.py_request_id]
        rows = length if positions is None else positions.shape[2]
        assert rows == budget(tiny.config, HUBKV, length, HUBKV.ratio).rows_per_group
        mask = torch.ones(tiny.config.num_layers, tiny.config.num_kv_heads, length, dtype=torch.bool)
        if positions is not None:
            mask = torch.zeros_like(mask).scatter(2, positions.long(), True)
        logits = torch.cat(request.logits)
        # Overlapped, the first decoded token is under way before the prompt is compacted: it sees all of it.
        expected = masked_logits(tiny.reference, request.text, mask, first=length + overlap)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert request.py_num_compressed_tokens == length - rows
        cache = executor.cache.kv_cache_map[request.py_request_id]
        assert cache.capacity == rows + steps
        assert len(cache.pages) == -(-cache.capacity // PAGE)
    held = sum(len(cache.pages) for cache in executor.cache.kv_cache_map.values())
    assert len(executor.cache.free_pages) == NUM_PAGES - held
    for request in executor.requests:
        executor.compression.free_resources(request)
        executor.cache.free_resources(request)
    assert sorted(executor.cache.free_pages) == list(range(NUM_PAGES))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def executor_after_prompts(tiny: Any, trtllm: Any, lengths: list[int], spoil: Callable[[Any], None]) -> Any:
    """All but the last iteration of prefilling; ``spoil`` changes something before it."""
    executor = Executor(tiny, trtllm, [token_ids(tiny.config, n, n) for n in lengths], lengths, overlap=False)
    executor.iterate([(r, r.prompt_len - 10) for r in executor.requests], [])
    spoil(executor)
    executor.iterate([(r, 10) for r in executor.requests], [])
    return executor


def state(executor: Any) -> list[tuple[int, int]]:
    """Dropped tokens, and those that have a place in the cache."""
    caches = executor.cache.kv_cache_map
    return [(r.py_num_compressed_tokens, caches[r.py_request_id].capacity) for r in executor.requests]


def test_a_prompt_that_was_not_scored_stays_whole_and_the_others_do_not(tiny: Any, trtllm: Any) -> None:
    def lose(executor: Any) -> None:
        executor.compression._compressor.begin(10)  # what was scored until now is gone

    executor = executor_after_prompts(tiny, trtllm, [60, 80], lose)
    rows = budget(tiny.config, HUBKV, 80, HUBKV.ratio).rows_per_group
    assert state(executor) == [(0, 60), (80 - rows, rows)]
    assert trtllm.warnings == ["hubkv: request 10 keeps its whole prompt: layer 0: 0 of 60 tokens were scored"]


def test_a_suspended_cache_and_a_dummy_stay_whole(tiny: Any, trtllm: Any) -> None:
    def suspend(executor: Any) -> None:
        executor.requests[1].is_dummy = True
        executor.compression.on_request_finish(executor.requests[1])
        executor.compression.on_request_init(executor.requests[1])
        finish = executor.compression.update_resources

        def update(batch: Any) -> None:
            executor.cache.kv_cache_map[10].is_active = False
            finish(batch)

        executor.compression.update_resources = update

    executor = executor_after_prompts(tiny, trtllm, [60, 80], suspend)
    assert state(executor) == [(0, 60), (0, 80)]
    assert executor.cache.kv_cache_map[11].history_length == 80  # TensorRT-LLM's own bookkeeping, where we do nothing
    assert trtllm.warnings == []
    assert not any(request in executor.compression._compressor for request in (10, 11))


def test_a_cache_that_cannot_shrink(tiny: Any, trtllm: Any) -> None:
    def refuse(executor: Any) -> None:
        cache = executor.cache.kv_cache_map[10]
        resize = cache.resize
        cache.resize = lambda capacity, history=None: capacity != 24 and resize(capacity, history)

    with pytest.raises(RuntimeError, match="request 10 could not shrink to 24 tokens"):
        executor_after_prompts(tiny, trtllm, [60], refuse)


def test_an_attention_input_that_is_not_a_tensor(tiny: Any, trtllm: Any) -> None:
    executor = Executor(tiny, trtllm, [token_ids(tiny.config, 9, 0)], [9], overlap=False)
    executor.compression.on_request_init(executor.requests[0])
    metadata = SimpleNamespace(
        num_contexts=1,
        seq_lens=torch.tensor([9]),
        request_ids=[10],
        kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=[0]),
    )
    attention = executor.engine.model.model.layers[1].self_attn
    with pytest.raises(ValueError, match="layer 1: the attention input is a tuple, not a tensor"):
        attention(None, (torch.zeros(9, 64), torch.ones(9)), metadata)
    executor.compression.shutdown()  # the hooks are gone
    attention(None, (torch.zeros(9, 64), torch.ones(9)), metadata)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_block_reuse", True),
        ("is_disagg", True),
        ("max_beam_width", 2),
        ("kv_factor", 1),
        ("max_attention_window_vec", [None, 100]),
    ],
)
def test_caches_that_are_refused(tiny: Any, trtllm: Any, name: str, value: Any) -> None:
    executor = Executor(tiny, trtllm, [], [], overlap=False)
    setattr(executor.cache, name, value)
    with pytest.raises(ValueError, match=f"^{name.removesuffix('_vec')}: .* cannot be combined with hubkv"):
        executor.compression.bind_kv_cache_managers(executor.cache)


def test_engines_that_are_refused(tiny: Any, trtllm: Any) -> None:
    config = trtllm.integration.HubKVCompressionConfig(gate=tiny.gate_file)

    def create(block_reuse: bool = False, config: Any = config, **changes: Any) -> Any:
        engine = trtllm_standin.model_engine(tiny.reference.config, **changes)
        engine.model.model.layers[2].self_attn.rope_fusion = changes.pop("rope_fusion", False)
        cache = SimpleNamespace(enable_block_reuse=block_reuse)
        return trtllm.util.create_kv_cache_compression_manager(config, model_engine=engine, kv_cache_config=cache)

    with pytest.raises(ValueError, match="'hubkv' does not support KV-cache block reuse"):
        create(block_reuse=True)
    with pytest.raises(ValueError, match="'hubkv' does not support speculative decoding"):
        create(spec_config="eagle3")
    with pytest.raises(ValueError, match="torch_compile_config: None is needed"):
        create(llm_args=SimpleNamespace(torch_compile_config="inductor"))
    with pytest.raises(ValueError, match="layer 2: RoPE is fused"):
        create(rope_fusion=True)
    with pytest.raises(FileNotFoundError, match=r"no_gate\.pt"):
        create(config=trtllm.integration.HubKVCompressionConfig(gate="no_gate.pt"))
    executor = Executor(tiny, trtllm, [], [], overlap=False)
    with pytest.raises(ValueError, match="draft_kv_cache_manager: True cannot be combined with hubkv"):
        executor.compression.bind_kv_cache_managers(executor.cache, executor.cache)


# ---- configuration and registration ----------------------------------------------------------------------------------


def test_arguments_of_an_llm_take_the_config(trtllm: Any) -> None:
    parameters = {"sink_tokens": 8, "penalty_factor": 1, "long_context": 1000}
    config = trtllm.integration.HubKVCompressionConfig(gate="gate.pt", ratio=0.5, parameters=parameters)
    assert config.hubkv() == HubKVConfig(scope=Scope.HEAD, ratio=0.5, **parameters)
    content = {"algorithm": "hubkv", "gate": "gate.pt", "ratio": 0.5, "parameters": parameters}
    for arguments in (trtllm.llm_args.BaseLlmArgs, trtllm.llm_args.TorchLlmArgs):
        for given in (config, content):
            assert arguments(kv_cache_compression_config=given).kv_cache_compression_config == config
        other = arguments(kv_cache_compression_config={"algorithm": "triattention", "calibration_path": "x"})
        assert other.kv_cache_compression_config.algorithm == "triattention"
        assert arguments().kv_cache_compression_config is None
        with pytest.raises(ValueError, match="does not match any of the expected tags"):
            arguments(kv_cache_compression_config={"algorithm": "none_such"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio": 1.5}, "ratio: 1.5"),
        ({"preset": "magic"}, "magic"),
        ({"parameters": {"snk": 4}}, "snk"),
        ({"parameters": {"sink_tokens": -1}}, "sink_tokens: -1"),
        ({"parameters": {"ratio": 0.5}}, "parameters: ratio is a field of its own"),
        ({"scope": "model"}, "scope"),
    ],
)
def test_configs_that_are_refused(trtllm: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trtllm.integration.HubKVCompressionConfig(gate="gate.pt", **values)


def test_other_methods_are_created_as_before(trtllm: Any) -> None:
    trtllm.integration.register()  # again: it is registered once
    create = trtllm.util.create_kv_cache_compression_manager
    for config, created in (
        (None, None),
        (trtllm_standin.ColdPageQuantizationCompressionConfig(), "manager of quantization_for_cold_page"),
    ):
        assert create(config, model_engine=None, kv_cache_config=None, estimating_kv_cache=True) == created
    assert create(None, model_engine=None, kv_cache_config=None) is None


def test_a_version_that_lacks_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, req: Any) -> None: ...

    cache = trtllm_standin.KVCacheManagerV2
    with trtllm_standin.installed():
        monkeypatch.setattr(cache, "_resize_context_history", other)
        with pytest.raises(ImportError, match="_resize_context_history lacks history_length, kv_cache"):
            importlib.import_module("hubkv_trt.integrations.tensorrt_llm")
        monkeypatch.delattr(cache, "_resize_context_history")
        with pytest.raises(ImportError, match=r"KVCacheManagerV2\._resize_context_history lacks itself"):
            importlib.import_module("hubkv_trt.integrations.tensorrt_llm")


def test_without_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "tensorrt_llm":
            raise ModuleNotFoundError("No module named 'tensorrt_llm'", name="tensorrt_llm")
        return real(name, *args, **kwargs)

    with trtllm_standin.installed():
        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(ImportError, match=r"pip install 'hubkv-trt\[tensorrt-llm\]'"):
            importlib.import_module("hubkv_trt.integrations.tensorrt_llm")
