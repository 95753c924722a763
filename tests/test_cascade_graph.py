# SPDX-License-Identifier: Apache-2.0
"""A decode step that is captured once stays right: compressions change what tables hold, never where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hubkv_trt.config import HardKVConfig
from hubkv_trt.graph.ops import ExtendInputs
from hubkv_trt.runtime.llm import LLM, SamplingParams

CASCADE = HardKVConfig(p=0.8, query_window=8, interval=16, recent=16, layer_budget=64, upper_budget=96)
STEPS = 400


class Captured:
    """In place of a decoder's ``extend``: as a CUDA graph would, every step after the first of its batch size reads the
    buffers of that first one, into which only the token ids are copied.

    Attributes:
        inputs: of the first step with B sequences, by B.
        replays: steps that ran over inputs of an earlier one.
        segments: the tables of segments that were seen.
    """

    def __init__(self, extend: Callable[..., Any]) -> None:
        self._extend = extend
        self.inputs: dict[int, ExtendInputs] = {}
        self.replays = 0
        self.segments: set[tuple[int, ...]] = set()

    def __call__(self, ops: Any, inputs: ExtendInputs, **options: Any) -> Any:
        size = inputs.batch_size
        if inputs.input_ids.numel() != size or size < 2:
            return self._extend(ops, inputs, **options)
        first = self.inputs.setdefault(size, inputs)
        if first is not inputs:
            self.replays += 1
            assert tables(inputs) == tables(first)
            first.input_ids.copy_(inputs.input_ids)
        self.segments.add(tuple(inputs.cache.segments.flatten().tolist()))
        return self._extend(ops, first, **options)


def tables(inputs: ExtendInputs) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Address and shape of all that a step reads but its token ids and the weights."""
    given = {**vars(inputs.cache), "positions": inputs.positions, "last_tokens": inputs.last_tokens}
    return {k: (x.data_ptr(), tuple(x.shape)) for k, x in given.items() if isinstance(x, torch.Tensor)}


def test_a_captured_step_stays_right(tiny_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_engine("llama"), decode_compression=CASCADE, cache_bytes=64 << 20)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    own = dataclasses.replace(params, decode_compression=CASCADE.replace(p=0.5, interval=24))
    prompts = [[5 + i for i in range(40)], [100 - i for i in range(60)]]
    expected = llm.generate(prompts, [params, own])
    captured = Captured(llm._executor._decoder.extend)  # type: ignore[attr-defined]
    monkeypatch.setattr(llm._executor._decoder, "extend", captured)  # type: ignore[attr-defined]
    outputs = llm.generate(prompts, [params, own])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert captured.replays >= STEPS - 3
    assert sum(o.stats.condensations for o in outputs) >= 30
    assert len(captured.segments) >= 3  # the segments did move
