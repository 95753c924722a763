# SPDX-License-Identifier: Apache-2.0
"""The bits of a request's logits do not depend on what else is in its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt.config import DType
from hubkv_trt.engine.directory import Engine, load_engine
from hubkv_trt.graph.linear import linear, pack_weights
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.runtime.sampler import sample
from hubkv_trt.runtime.scheduler import Policy
from paced_engine import ids

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(576, 1536), (192, 576)], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape: tuple[int, int], dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(getattr(torch, dtype))
    x = torch.randn(40, shape[1], generator=generator).to(weight.dtype)
    with torch.inference_mode():
        weight = pack_weights({"w": weight})["w"]
        if dtype == "float32" and not weight.is_mkldnn:
            pytest.skip("this torch packs no weights on this CPU: docs/serving.md says what holds then")
        whole = linear(x, weight)
        for first, count in [(0, 1), (39, 1), (7, 2), (3, 3), (11, 4), (1, 5), (0, 16), (5, 33)]:
            rows = linear(x[first : first + count].contiguous(), weight)
            assert torch.equal(rows, whole[first : first + count]), f"{count} rows"


def test_a_draw_does_not_depend_on_the_others() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3

    class Fixed:
        def __init__(self, value: float) -> None:
            self.value = value

        def random(self) -> float:
            return self.value

    params = [
        SamplingParams(temperature=t, top_p=p)
        for t, p in zip([1, 0, 4, 2, 9, 1], [1, 1, 0.9, 0.5, 0.99, 0.1], strict=True)
    ]
    for value in np.linspace(0, 0.999, 7):
        generators = [Fixed(float(value))] * len(params)
        together, _ = sample(logits, params, generators)  # type: ignore[arg-type]
        alone = [sample(logits[i : i + 1], params[i : i + 1], generators[:1])[0] for i in range(6)]  # type: ignore[arg-type]
        assert torch.equal(together, torch.cat(alone))


def logits_of(llm: LLM, prompts: list[list[int]], ratios: list[float], tokens: int = 12) -> list[torch.Tensor]:
    """[tokens, V] of each prompt, which run together; those that a token is chosen from."""
    seen: dict[int, list[torch.Tensor]] = {}
    drawn = llm._executor.sample

    def watched(logits: torch.Tensor, params: list[SamplingParams], *rest: object) -> object:
        for row, p in zip(logits, params, strict=True):
            seen.setdefault(id(p), []).append(row.clone())
        return drawn(logits, params, *rest)  # type: ignore[arg-type]

    params = [SamplingParams(max_tokens=tokens - i, ignore_eos=True) for i in range(len(prompts))]
    llm._executor.sample = watched  # type: ignore[method-assign, assignment]
    try:
        llm.generate(prompts, params, ratio=ratios)
    finally:
        llm._executor.sample = drawn  # type: ignore[method-assign]
    return [torch.stack(seen[id(p)]) for p in params]


def as_dtype(path: Path, dtype: str) -> Engine:
    """The engine with its weights rounded to another dtype, for batches of 8."""
    engine, torch_dtype = load_engine(path), getattr(torch, dtype)
    weights = {name: t.to(torch_dtype) for name, t in engine.weights.items()}
    gate = {name: t.to(torch_dtype) for name, t in engine.gate.items()}
    config = engine.config.replace(dtype=DType(dtype), max_batch_size=8)
    return dataclasses.replace(engine, config=config, weights=weights, gate=gate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_a_request_are_the_same_alone_and_in_a_batch(tiny_engine: Callable[..., Path], dtype: str) -> None:
    llm = LLM(as_dtype(tiny_engine("llama"), dtype))
    prompts = [ids(n, seed=n) for n in (300, 20, 77, 500, 3, 160, 64)]
    ratios = [0.5, 0.0, 0.9, 0.3, 0.5, 0.75, 0.1]
    together = logits_of(llm, prompts, ratios)
    for index in range(len(prompts)):
        (alone,) = logits_of(llm, prompts[index : index + 1], ratios[index : index + 1])
        count = min(len(alone), len(together[index]))
        assert torch.equal(alone[:count], together[index][:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_a_request_are_the_same_after_it_was_preempted(tiny_engine: Callable[..., Path], dtype: str) -> None:
    llm = LLM(as_dtype(tiny_engine("llama"), dtype), tail_tokens=96)
    preempted = []
    llm._scheduler.policy = Policy(overcommit=1.0, on_preempt=lambda: preempted.append(1))
    prompts, ratios = [ids(n, seed=n) for n in (300, 20, 77, 160)], [0.5, 0.0, 0.9, 0.3]
    together = logits_of(llm, prompts, ratios, 60)
    assert len(preempted) >= 2
    for index in range(4):
        (alone,) = logits_of(llm, prompts[index : index + 1], ratios[index : index + 1], 60)
        assert torch.equal(alone[: 60 - index], together[index])
