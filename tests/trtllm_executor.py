# SPDX-License-Identifier: Apache-2.0
"""Iterations of TensorRT-LLM's executor over a paged cache, with a tiny model that computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import trtllm_standin
from hubkv_trt.config import DType, HubKVConfig, ModelConfig, Scope
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.checkpoint import load_config, load_weights
from hubkv_trt.models.decoder import Decoder
from hubkv_trt.scorers.fastkvzip import load_gate

PAGE, NUM_PAGES = 8, 120
HUBKV = HubKVConfig(scope=Scope.HEAD, ratio=0.6)


def load_tiny(directory: Path, gate_file: Path) -> Any:
    """A random Llama with grouped heads: config, weights, gate, and transformers' own reading of it."""
    config = load_config(directory)
    return SimpleNamespace(
        config=config,
        weights=load_weights(directory, DType.FLOAT32),
        gate=load_gate(gate_file, config),
        gate_file=str(gate_file),
        reference=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(),
    )


def token_ids(config: ModelConfig, count: int, seed: int) -> list[int]:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Executor:
    """``PyExecutor`` and its model engine: whole iterations over a paged cache, with the calls in TensorRT-LLM's order.

    Decoded tokens are those of ``texts`` behind the prompts, whatever the logits say.
    """

    def __init__(self, tiny: Any, trtllm: Any, texts: list[list[int]], prompts: list[int], overlap: bool) -> None:
        self.tiny, self.texts, self.overlap = tiny, texts, overlap
        config = tiny.config
        self.cache = trtllm_standin.KVCacheManagerV2(
            config.num_layers, config.num_kv_heads, config.head_dim, PAGE, num_pages=NUM_PAGES
        )
        self.engine = trtllm_standin.model_engine(tiny.reference.config)
        self.compression = trtllm.util.create_kv_cache_compression_manager(
            trtllm.integration.HubKVCompressionConfig(gate=tiny.gate_file, ratio=HUBKV.ratio),
            model_engine=self.engine,
            kv_cache_config=SimpleNamespace(enable_block_reuse=False),
        )
        self.compression.bind_kv_cache_managers(self.cache)
        self.decoder, self.ops = Decoder(config), EagerOps(dict(tiny.weights), DType.FLOAT32)
        self.requests = [
            SimpleNamespace(
                py_request_id=10 + i, prompt_len=length, context_current_position=0, context_chunk_size=0,
                py_num_compressed_tokens=3, is_dummy=False, is_first_context_chunk=True, max_beam_num_tokens=length,
                text=text, logits=[],
            )
            for i, (text, length) in enumerate(zip(texts, prompts, strict=True))
        ]  # fmt: skip
        self._previous: Any = None

    def iterate(self, context: list[tuple[Any, int]], generation: list[Any]) -> None:
        """One iteration: chunks of prompts, and requests that decode a token."""
        for request, size in context:
            if request.is_first_context_chunk:
                self.cache.kv_cache_map[request.py_request_id] = trtllm_standin.KVCache(self.cache)
            request.context_chunk_size = size
            assert self.cache.resize_context(request, size)
        for request in generation:
            assert self.cache.try_allocate_generation(request)
        batch = SimpleNamespace(context_requests=[r for r, _ in context], generation_requests=generation)
        self.compression.prepare_resources(batch)
        if context or generation:
            self._forward(batch)
        for request, size in context:
            request.context_current_position += size
            request.is_first_context_chunk = False
        batch.context_requests_last_chunk = [r for r, _ in context if r.context_current_position == r.prompt_len]
        for request in [*batch.context_requests_last_chunk, *generation]:
            request.max_beam_num_tokens += 1
        self.cache.update_context_resources(batch)
        finished = self._previous if self.overlap else batch  # overlapped, an iteration is finished by the next one
        self._previous = batch
        if finished is not None:
            self.cache.update_resources(finished)
            self.compression.update_resources(finished)

    def _forward(self, batch: Any) -> None:
        spans = [(r, r.context_current_position, r.context_chunk_size) for r in batch.context_requests]
        num_contexts = len(spans)
        spans += [(r, r.max_beam_num_tokens - 1, 1) for r in batch.generation_requests]
        cached = [first - r.py_num_compressed_tokens for r, first, _ in spans]
        metadata = SimpleNamespace(
            num_contexts=num_contexts,
            seq_lens=torch.tensor([n for _, _, n in spans], dtype=torch.int32),
            request_ids=[r.py_request_id for r, _, _ in spans],
            kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=cached),
        )
        ids = torch.tensor([t for r, first, n in spans for t in r.text[first : first + n]], dtype=torch.int32)
        positions = torch.tensor([p for _, first, n in spans for p in range(first, first + n)], dtype=torch.int32)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
            module = self.engine.model.model.layers[layer].self_attn
            module(position_ids=positions, hidden_states=hidden, attn_metadata=metadata)
            parts, start = [], 0
            for (request, _, n), length in zip(spans, cached, strict=True):
                rows = slice(start, start + n)
                keys, values = self._write(request.py_request_id, layer, length, k[rows], v[rows])
                parts.append(self.ops.causal_attention(q[rows], keys, values, self.decoder.scale))
                start += n
            return torch.cat(parts)

        with torch.inference_mode():
            hidden = self.decoder.forward(self.ops, ids, positions, attention)
            logits = self.decoder.logits(self.ops, hidden).split([n for _, _, n in spans])
        for (request, _, _), rows in zip(spans, logits, strict=True):
            request.logits.append(rows)

    def _write(self, request: int, layer: int, length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts new rows behind ``length`` cached ones, and gives all of them: [n, Hkv, D] twice."""
        pool = self.cache.get_buffers(layer, kv_layout="HND")
        assert pool is not None
        pages = torch.tensor(self.cache.kv_cache_map[request].pages)
        for i in range(len(k)):
            page, slot = divmod(length + i, PAGE)
            pool[pages[page], 0, :, slot], pool[pages[page], 1, :, slot] = k[i], v[i]
        rows = pool[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : length + len(k)]
        assert not rows.isnan().any(), "a row is read that was never written"
        return rows[0], rows[1]

    def run(self, steps: int, chunk: int) -> None:
        """Prefills all requests in chunks, each request beginning one iteration after the other, and decodes."""
        waiting, decoding = list(self.requests), []
        active: list[Any] = []
        while waiting or active or any(r.max_beam_num_tokens < r.prompt_len + steps + 1 for r in self.requests):
            if waiting:
                active.append(waiting.pop(0))
            context = [(r, min(chunk, r.prompt_len - r.context_current_position)) for r in active]
            self.iterate(context, [r for r in decoding if r.max_beam_num_tokens <= r.prompt_len + steps])
            decoding += [r for r in active if r.context_current_position == r.prompt_len]
            active = [r for r in active if r.context_current_position < r.prompt_len]
        if self.overlap:
            self.iterate([], [])
