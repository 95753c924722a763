# SPDX-License-Identifier: Apache-2.0
"""Answers that are given, not generated: what a model thinks of every token of them, in one pass over the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..runtime.batch import Batch
from ..runtime.context import CompressedContext
from ..runtime.detokenizer import Detokenizer
from ..runtime.executors.eager import EagerExecutor
from ..runtime.llm import LLM
from ..runtime.sequence import Sequence as Request

PASS_TOKENS = 512  # of one pass, padding included


@dataclass(frozen=True)
class Forced:
    """An answer behind a context.

    Attributes:
        context: what it follows.
        prompt: int32 [n], n >= 0: what stands between context and answer.
        answer: int32 [m], m >= 1 (2 without a prompt).
    """

    context: CompressedContext
    prompt: np.ndarray
    answer: np.ndarray

    @property
    def fed(self) -> np.ndarray:
        """int32: all but the answer's last token, which nothing follows."""
        return np.concatenate([self.prompt, self.answer[:-1]]).astype(np.int32)

    @property
    def targets(self) -> Tensor:
        """int64: the tokens of the answer that have a prediction. Without a prompt the first has none of its own: it
        is that of the context's last token, and comes from the prefill."""
        return torch.from_numpy(self.answer[0 if len(self.prompt) else 1 :].astype(np.int64))


@torch.inference_mode()
def forced_logits(llm: LLM, items: Sequence[Forced]) -> Iterator[tuple[int, Tensor]]:
    """Feeds answers to their contexts, many in a pass: (index of the item, float32 [len(targets), V]), in any order.

    The logits are good until the next one is asked for.

    Raises:
        CacheFullError: the tails of a pass have no room.
    """
    executor = llm._executor
    assert isinstance(executor, EagerExecutor)
    order = sorted(range(len(items)), key=lambda i: len(items[i].fed))
    while order:
        width = len(items[order[-1]].fed)  # the longest left
        count = max(1, min(PASS_TOKENS // width, len(order)))
        group, order = order[-count:], order[:-count]
        yield from _pass(llm, executor, group, [items[i] for i in group])


def _pass(
    llm: LLM, executor: EagerExecutor, group: Sequence[int], items: Sequence[Forced]
) -> Iterator[tuple[int, Tensor]]:
    lengths = torch.tensor([len(item.fed) for item in items], dtype=torch.int32)
    width = int(lengths.max())
    tokens = torch.zeros(len(items), width, dtype=torch.int32)
    wanted: list[Tensor] = []
    for b, item in enumerate(items):
        tokens[b, : lengths[b]] = torch.from_numpy(item.fed)
        end = b * width + int(lengths[b])
        wanted.append(torch.arange(end - len(item.targets), end, dtype=torch.int32))
    cache = llm.cache
    requests = [_request(llm, item) for item in items]
    try:
        for request, item in zip(requests, items, strict=True):
            request.segment = item.context.segment
            request.tail = cache.open_tail(len(item.fed))
        logits = executor.extend(Batch(requests, cache), tokens, lengths, torch.cat(wanted))
    finally:
        for request in requests:
            if request.tail is not None:
                cache.close_tail(request.tail)
    yield from zip(group, logits.split([len(rows) for rows in wanted]), strict=True)


def _request(llm: LLM, item: Forced) -> Request:
    return Request(
        item.fed, None, max_tokens=0, end_ids=frozenset(), detokenizer=Detokenizer(llm.tokenizer, ()), stream=False,
        ratio=item.context.stats.ratio, context=item.context,
    )  # fmt: skip
