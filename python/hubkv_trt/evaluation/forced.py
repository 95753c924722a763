# SPDX-License-Identifier: Apache-2.0
"""Answers that are given, not generated: what a model thinks of every token of them, in few passes over the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from ..runtime.batch import Batch
from ..runtime.cache import Cache
from ..runtime.context import CompressedContext
from ..runtime.detokenizer import Detokenizer
from ..runtime.executors.eager import EagerExecutor
from ..runtime.llm import LLM
from ..runtime.sequence import Sequence as Request

PASS_TOKENS = 512  # of one pass, padding included


@dataclass(frozen=True)
class Continuation:
    """Tokens int32 [n], n >= 1, of which the last ``scored`` are looked at."""

    tokens: np.ndarray
    scored: int


@dataclass(frozen=True)
class Forced:
    """A question and what may follow it; the question goes through the model once.

    Attributes:
        context: what it follows.
        prompt: int32 [n]; n = 0 where answers follow the context itself. An answer's first token then has no
            prediction here (it is the last one of the prefill, whatever is kept) and is not looked at.
        continuations: one or more, each for itself.
    """

    context: CompressedContext
    prompt: np.ndarray
    continuations: tuple[Continuation, ...]

    def targets(self, index: int) -> Tensor:
        """int64: the tokens of a continuation that are looked at."""
        tokens, scored = self.continuations[index].tokens, self.continuations[index].scored
        return torch.from_numpy(tokens[max(len(tokens) - scored, 0 if len(self.prompt) else 1) :].astype(np.int64))


@torch.inference_mode()
def forced_logits(llm: LLM, items: Sequence[Forced]) -> Iterator[tuple[int, int, Tensor]]:
    """Feeds answers to their contexts, many in a pass.

    Returns:
        Index of the item, of its continuation, and float32 [len(targets), V], the logits of each token looked at; in
        any order. Logits are good until the next ones are asked for.

    Raises:
        CacheFullError: the tails of a pass have no room.
    """
    executor = llm._executor
    assert isinstance(executor, EagerExecutor)
    for asks in (True, False):  # a batch asks its questions together, or has none
        order = [i for i, item in enumerate(items) if bool(len(item.prompt)) == asks]
        order.sort(key=lambda i: _longest(items[i]))
        while order:
            count = max(1, min(PASS_TOKENS // _longest(items[order[-1]]), len(order)))
            group, order = order[-count:], order[:-count]
            with ExitStack() as opened:
                yield from _Group(llm, executor, opened, [items[i] for i in group]).run(group)


def _longest(item: Forced) -> int:
    return max(len(item.prompt), *(len(c.tokens) for c in item.continuations))


class _Group:
    """Questions that go together. Their tails take one continuation after the other, each over the one before."""

    def __init__(self, llm: LLM, executor: EagerExecutor, opened: ExitStack, items: Sequence[Forced]) -> None:
        self._executor, self._items = executor, items
        self._requests = [_request(llm, opened, item) for item in items]
        self._cache: Cache = llm.cache

    def run(self, group: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Indices are those of ``group``."""
        batch = Batch(self._requests, self._cache)
        first = None
        if len(self._items[0].prompt):
            lengths = torch.tensor([len(item.prompt) for item in self._items], dtype=torch.int32)
            first = self._executor.extend(batch, _padded([item.prompt for item in self._items]), lengths)
        for index, _ in enumerate(zip_longest(*(item.continuations for item in self._items))):
            yield from self._continue(batch, index, group, first)

    def _continue(
        self, batch: Batch, index: int, group: Sequence[int], first: Tensor | None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The continuation of that index of every item; items that have fewer repeat their last one."""
        which = [min(index, len(item.continuations) - 1) for item in self._items]
        fed = [item.continuations[w].tokens for item, w in zip(self._items, which, strict=True)]
        fed = [tokens[: max(1, len(tokens) - 1)] for tokens in fed]  # nothing follows the last one
        lengths = torch.tensor([len(tokens) for tokens in fed], dtype=torch.int32)
        tokens = _padded(fed)
        counts = []
        rows: list[Tensor] = []
        for b, (item, w) in enumerate(zip(self._items, which, strict=True)):
            targets, end = len(item.targets(w)), len(item.continuations[w].tokens) - 1
            counts.append(min(targets, end))  # the first token's is that of the prompt
            start = b * tokens.shape[1] + end
            rows.append(torch.arange(start - counts[-1], start, dtype=torch.int32))
        logits = self._executor.extend(batch, tokens, lengths, torch.cat(rows))
        batch.advance(-lengths)  # back to the end of the question
        for b, part in enumerate(logits.split(counts)):
            if which[b] != index:
                continue
            if counts[b] < len(self._items[b].targets(index)):
                assert first is not None
                part = torch.cat([first[b : b + 1], part])
            yield group[b], index, part


def _request(llm: LLM, opened: ExitStack, item: Forced) -> Request:
    longest = max(len(c.tokens) for c in item.continuations)
    request = Request(
        item.prompt, None, max_tokens=longest + 1, end_ids=frozenset(), detokenizer=Detokenizer(llm.tokenizer, ()),
        stream=False, ratio=item.context.stats.ratio, context=item.context,
    )  # fmt: skip
    request.segment = item.context.segment
    request.tail = llm.cache.open_tail(request.tail_limit)
    opened.callback(llm.cache.close_tail, request.tail)
    return request


def _padded(rows: Sequence[np.ndarray]) -> Tensor:
    """int32 [B, longest]."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.from_numpy(ids)
    return tokens
