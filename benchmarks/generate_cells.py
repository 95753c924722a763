# SPDX-License-Identifier: Apache-2.0
"""The measurements of benchmarks/generate.py. Each runs in a process of its own, so that peak memory is its own.

All three work alike: prefill one prompt, decode from its cache with batch 1, then give each of B sequences a copy of
that cache in memory of its own and decode them together. Nothing is shared between sequences.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

import common

TAIL = 64  # tokens that each sequence may add


def prompt_tokens(tokenizer: Any, count: int) -> list[int]:
    """Real text, the same for everyone: Python's own help topics, in alphabetical order."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return list(tokenizer(text[: count * 12], add_special_tokens=False, verbose=False)["input_ids"][:count])


def memory(before: int) -> dict[str, int]:
    """Peak since reset_peak, what of it came on top of `before`, and what is resident now."""
    gc.collect()
    peak = common.peak_resident()
    return {"peak": peak, "peak_above_start": peak - before, "resident": common.resident()}


# ---- hubkv-trt ------------------------------------------------------------------------------------------------------


def hubkv(cell: dict[str, Any]) -> dict[str, Any]:
    """`engine`, `tokens`, `ratio`, `batch`, `new_tokens`, `repeat`, `prefills`."""
    from hubkv_trt.config import budget
    from hubkv_trt.engine.directory import load_engine
    from hubkv_trt.runtime.ledger import Ledger
    from hubkv_trt.runtime.llm import LLM
    from hubkv_trt.runtime.memory import trim_heap

    engine = load_engine(cell["engine"], verify=False)
    config = engine.config
    assert config.hubkv is not None
    ledger, tokens, batch = Ledger(config.model, config.dtype), cell["tokens"], cell["batch"]
    rows = budget(config.model, config.hubkv, tokens, cell["ratio"]).num_rows
    room = (batch + 1) * (ledger.segment_bytes(rows) + ledger.tail_bytes(TAIL)) + (64 << 20)
    llm = LLM(engine, cache_bytes=room, tail_tokens=(batch + 1) * TAIL)
    weights = sum(w.numel() * w.element_size() for w in engine.weights.values())
    del engine
    ids = prompt_tokens(llm.tokenizer, tokens)
    llm.compress(ids[:256], ratio=cell["ratio"]).close()
    trim_heap()
    common.reset_peak()
    before = common.resident()

    prefills = []
    for _ in range(cell["prefills"]):
        context = llm.compress(ids, ratio=cell["ratio"])
        prefills.append(context.stats.seconds)
        if len(prefills) < cell["prefills"]:
            context.close()
    best = min(prefills, key=lambda s: s["prefill"])
    result: dict[str, Any] = {"prefill": best, "rows": rows, "weights": weights, "prefill_memory": memory(before)}
    result["row_bytes"] = ledger.dense_bytes(1) // config.model.num_rows_per_token
    result["dense_rows"] = tokens * config.model.num_rows_per_token
    result["decode"] = {}
    contexts = [context]
    for size in dict.fromkeys((1, batch)):
        common.reset_peak()
        while len(contexts) < size:
            contexts.append(_copy(llm, context))
        seconds = min(_decode(llm, contexts[:size], ids[-1], cell["new_tokens"]) for _ in range(cell["repeat"]))
        result["decode"][str(size)] = {
            "step": seconds,
            "cache": sum(c.num_bytes for c in contexts) + size * ledger.tail_bytes(cell["new_tokens"]),
            **memory(before),
        }
    llm.cache.audit()
    return result


def _copy(llm: Any, context: Any) -> Any:
    """A context with a segment of its own that holds the same bytes."""
    from hubkv_trt.runtime.context import CompressedContext

    segment = llm.cache.allocate(context.segment.rows)
    for name in ("k_rows", "v_rows", "head_offsets", "positions"):
        getattr(segment, name).copy_(getattr(context.segment, name))
    copy = CompressedContext(llm.cache, segment, context.num_tokens, context.stats)
    llm.cache.release(segment)
    return copy


def _decode(llm: Any, contexts: list[Any], token: int, new_tokens: int) -> float:
    """Seconds of a decode step of all contexts together: one token follows each, then new_tokens are generated."""
    from hubkv_trt.runtime.sampler import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([[token]] * len(contexts), params, context=contexts)
    stats = [output.stats for output in outputs]
    assert all(s.decode_steps == new_tokens - 1 for s in stats)
    return float(max(s.seconds_per_token for s in stats))


# ---- transformers and kvpress ---------------------------------------------------------------------------------------


def transformers(cell: dict[str, Any]) -> dict[str, Any]:
    """Dense `generate` of transformers with sdpa, float32, DynamicCache."""
    return _peer(cell, None)


def kvpress(cell: dict[str, Any]) -> dict[str, Any]:
    """kvpress's FastKVzipPress with the same gate, then the same `generate`. It masks, and frees nothing."""
    from kvpress import FastKVzipPress

    press = FastKVzipPress(compression_ratio=cell["ratio"])
    press.gates = kvpress_gates(Path(cell["model"]), Path(cell["gate"]))
    return _peer({**cell, "batch": 1}, press)  # its gates score one sequence at a time


def _peer(cell: dict[str, Any], press: Any) -> dict[str, Any]:
    from contextlib import nullcontext

    from transformers import DynamicCache

    model, tokenizer = load_transformers(Path(cell["model"]))
    ids = torch.tensor([prompt_tokens(tokenizer, cell["tokens"])])
    with torch.inference_mode():
        model(ids[:, :256], past_key_values=DynamicCache(), logits_to_keep=1)
        common.reset_peak()
        before = common.resident()
        seconds = []
        for _ in range(cell["prefills"]):
            cache = DynamicCache()
            start = time.perf_counter()
            with press(model) if press is not None else nullcontext():
                model(ids, past_key_values=cache, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
        result: dict[str, Any] = {"prefill": {"prefill": min(seconds)}, "prefill_memory": memory(before), "decode": {}}
        for size in dict.fromkeys((1, cell["batch"])):
            common.reset_peak()
            if size > 1:
                cache.batch_repeat_interleave(size)
            step = min(_generate(model, cache, ids, size, cell["new_tokens"]) for _ in range(cell["repeat"]))
            held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
            result["decode"][str(size)] = {"step": step, "cache": held, **memory(before)}
    return result


def _generate(model: Any, cache: Any, ids: torch.Tensor, size: int, new_tokens: int) -> float:
    """Seconds of a step of model.generate behind the cached prompt, the first left out. The cache is left as it was."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    text = torch.cat([ids, ids[:, -1:]], 1).expand(size, -1)
    model.generate(
        text,
        attention_mask=torch.ones_like(text),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([Clock()]),
    )
    cache.crop(ids.shape[1])
    return (times[-1] - times[0]) / (len(times) - 1)


def load_transformers(path: Path) -> tuple[Any, Any]:
    """Model (float32, sdpa, eval) and tokenizer of a directory or GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    where, gguf = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="sdpa", **gguf)
    return model.eval(), AutoTokenizer.from_pretrained(where, **gguf)


def kvpress_gates(model_path: Path, gate_path: Path) -> list[Any]:
    """kvpress's gate modules with the weights of our gate file, float32."""
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    from hubkv_trt.models.checkpoint import load_config
    from hubkv_trt.scorers.fastkvzip import load_gate

    model = load_config(model_path)
    gate = load_gate(gate_path, model)
    modules = []
    for layer in range(model.num_layers):
        state = {n.partition(".")[2]: t.float() for n, t in gate.tensors.items() if n.startswith(f"{layer}.")}
        state["k_base"], state["b"] = state["k_base"].unsqueeze(1), state["b"].unsqueeze(1)
        module = FastKVzipGate(
            layer, model.hidden_size, model.num_kv_heads, model.group_size, torch.float32, sink=gate.num_sinks
        )
        module.load_state_dict(state)
        modules.append(module)
    return modules
