# SPDX-License-Identifier: Apache-2.0
"""HubKVPress around kvpress's presses, in kvpress's own pipeline: off it changes nothing, on it keeps what we keep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVPressTextGenerationPipeline,
    RandomPress,
    SnapKVPress,
    StreamingLLMPress,
    ThinKPress,
    TOVAPress,
)
from transformers import DynamicCache

from hubkv_trt.config import HubKVConfig, Scope, Scorer
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.integrations.kvpress import HubKVPress
from hubkv_trt.runtime.llm import LLM
from hubkv_trt.scorers.kvzip import chat_frame, encode
from kept_rows import as_mask

CONTEXT = topics["pass"] + "\nThe code of the workshop door is 7214.\n" + topics["del"]
RATIO = 0.5
OFF = HubKVConfig.from_preset("fastkvzip")
PRESSES = [
    SnapKVPress(RATIO),
    ExpectedAttentionPress(RATIO),
    KnormPress(RATIO),
    TOVAPress(RATIO),
    StreamingLLMPress(RATIO),
]


@pytest.fixture(scope="module")
def pipeline(demo_reference: Any, demo_tokenizer: Any) -> Any:
    """``pipeline(press)``: the answer to a question after the context, and its cache without question and answer; run
    once for each press."""
    made = KVPressTextGenerationPipeline(model=demo_reference, tokenizer=demo_tokenizer)
    results: dict[str, tuple[str, DynamicCache]] = {}

    def run(press: Any) -> tuple[str, DynamicCache]:
        if repr(press) not in results:
            cache = DynamicCache()
            question = "What is the code of the workshop door?"
            answer = made(CONTEXT, question=question, press=press, cache=cache, max_new_tokens=4)["answer"]
            results[repr(press)] = answer, cache
        return results[repr(press)]

    return run


@pytest.fixture(scope="module")
def dense(pipeline: Any) -> DynamicCache:
    """All keys of the context."""
    cache = pipeline(None)[1]
    assert isinstance(cache, DynamicCache)
    return cache


def kept_of(cache: DynamicCache, dense: DynamicCache) -> np.ndarray:
    """bool [L, Hkv, T]: which rows of the dense cache another one holds, found by their bytes."""
    kept = []
    for layer, whole in zip(cache.layers, dense.layers, strict=True):
        for some, rows in zip(layer.keys[0].numpy(), whole.keys[0].numpy(), strict=True):
            held = {row.tobytes() for row in some}
            assert len(held) == len(some)
            kept.append([row.tobytes() in held for row in rows])
    return np.array(kept).reshape(len(cache.layers), -1, len(kept[0]))


@pytest.mark.parametrize("press", PRESSES, ids=lambda p: type(p).__name__)
def test_refinement_off_is_the_press(press: Any, pipeline: Any, dense: DynamicCache) -> None:
    answer, cache = pipeline(press)
    own_answer, own_cache = pipeline(HubKVPress(press, OFF))
    theirs, ours = kept_of(cache, dense), kept_of(own_cache, dense)
    assert ours.sum() == theirs.sum()
    assert (ours != theirs).sum() <= 1e-3 * theirs.sum()  # ties: two scores that the map rounds to one
    assert own_answer == answer


@pytest.mark.parametrize(
    ("press", "ours"),
    [
        (SnapKVPress(RATIO), HubKVConfig(scorer=Scorer.SNAPKV, sink_tokens=0, window_ratio=0.0)),
        (KnormPress(RATIO), HubKVConfig(scorer=Scorer.KNORM, sink_tokens=0, window_ratio=0.0)),
        (ExpectedAttentionPress(RATIO), HubKVConfig(scorer=Scorer.EXPECTED_ATTENTION, window_ratio=0.0)),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, HubKVConfig) else "",
)
def test_refinement_on_is_ours(
    press: Any, ours: HubKVConfig, pipeline: Any, dense: DynamicCache, demo_engine: Path, demo_tokenizer: Any
) -> None:
    theirs = kept_of(pipeline(HubKVPress(press))[1], dense)
    plain = kept_of(pipeline(HubKVPress(press, OFF))[1], dense)
    engine = load_engine(demo_engine, verify=False)
    config = engine.config.replace(hubkv=ours.replace(scope=Scope.HEAD))
    llm = LLM(dataclasses.replace(engine, config=config, gate={}), cache_bytes=256 << 20)
    ids = [*encode(demo_tokenizer, chat_frame(demo_tokenizer)[0] + CONTEXT)]
    with llm.compress(ids, ratio=RATIO) as context:
        kept = as_mask(context.segment.positions, context.segment.head_offsets, config.model, len(ids))
    assert kept.shape == theirs.shape
    missing = (theirs & ~kept).sum()  # ours may have a row more in each head: kvpress rounds K down
    assert 0 <= kept.sum() - theirs.sum() <= kept.shape[0] * kept.shape[1]
    assert missing <= 2e-3 * theirs.sum()
    assert (theirs & ~plain).sum() > 4 * missing


def test_ratio_is_that_of_the_press() -> None:
    press = HubKVPress(KnormPress(0.3))
    assert press.compression_ratio == 0.3
    press.compression_ratio = 0.7
    assert press.press.compression_ratio == 0.7


def test_batches_are_refined_apart() -> None:
    press = HubKVPress(RandomPress(RATIO))
    scores = torch.rand(3, 2, 50, generator=torch.Generator().manual_seed(0))
    together = press.refine(scores)
    assert torch.equal(together, torch.cat([press.refine(each[None]) for each in scores]))
    assert not torch.equal(together, scores)


def test_what_cannot_be_refined_is_refused() -> None:
    with pytest.raises(TypeError, match="press: ThinKPress is neither a ScorerPress nor a FastKVzipPress"):
        HubKVPress(ThinKPress())
    with pytest.raises(ValueError, match=r"KeyDiffPress gives values in \[-1, .*pass a strictly increasing score_map"):
        HubKVPress(KeyDiffPress(RATIO)).refine(torch.linspace(-1, 1, 30).reshape(1, 1, 30))
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        HubKVPress(RandomPress(RATIO)).refine(torch.full((1, 1, 30), torch.nan))
    mapped = HubKVPress(KeyDiffPress(RATIO), score_map=lambda scores: (scores + 1) / 2)
    assert mapped.refine(torch.linspace(-1, 1, 30).reshape(1, 1, 30)).isfinite().all()
