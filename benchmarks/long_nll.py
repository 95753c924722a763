# SPDX-License-Identifier: Apache-2.0
"""What a model thinks of a text that is given, over a cache that is compressed as if it had generated the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hubkv_trt.config import HardKVConfig
from hubkv_trt.evaluation.statistics import bootstrap
from hubkv_trt.runtime.batch import Batch
from hubkv_trt.runtime.executors.eager import EagerExecutor
from hubkv_trt.runtime.llm import LLM, SamplingParams

PIECE = 128  # tokens of a pass without compression


@torch.inference_mode()
def forced(
    llm: LLM, prompt: list[int], text: list[int], config: HardKVConfig | None, ratio: float | None = None
) -> tuple[np.ndarray, Any]:
    """NLL of each token of a text but the first, float64 [n - 1], and the ``RequestStats`` of the run.

    The text goes through ``extend`` in pieces that end where a compression is due: the schedule is that of decoding it
    token by token.
    """
    params = SamplingParams(max_tokens=len(text) + 1, ignore_eos=True, decode_compression=config or False)
    (sequence,) = llm._requests.generation([prompt], params, ratio, None, False, False)
    scheduler, executor = llm._scheduler, llm._executor
    assert isinstance(executor, EagerExecutor)
    scheduler.add(sequence)
    llm.step()  # the prompt; what it generates is not used
    if sequence.error is not None:
        raise sequence.error
    found: list[torch.Tensor] = []
    tokens = torch.tensor(text)
    try:
        start = 0
        while start < len(text) - 1:
            room = PIECE if sequence.cascade is None else sequence.cascade.config.tail_tokens - sequence.tail_length
            piece = tokens[start : min(start + room, len(text) - 1)]
            sequence.output_ids[:] = text[: start + 1]
            end = start + len(piece)
            rows = torch.arange(len(piece), dtype=torch.int32)
            lengths = torch.tensor([len(piece)], dtype=torch.int32)
            logits = executor.extend(Batch([sequence], llm.cache), piece.int()[None], lengths, rows)
            targets = tokens[start + 1 : end + 1]
            found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double())
            sequence.output_ids[:] = text[: end + 1]
            llm._condense([sequence])
            if sequence.error is not None:
                raise sequence.error
            start = end
    finally:
        scheduler.finish(sequence, "aborted")
    return torch.cat(found).numpy(), replace(sequence.stats)


def compare(nll: np.ndarray, other: np.ndarray, block: int, resamples: int = 2000) -> dict[str, float]:
    """Mean of nll - other with its 95% interval: paired, by bootstrap over blocks of tokens (neighbours are alike)."""
    blocks = np.arange(len(nll)) // block
    found = bootstrap(nll - other, blocks.tolist(), resamples=resamples)
    return {"mean": found.mean, "low": found.low, "high": found.high}
