# SPDX-License-Identifier: Apache-2.0
"""The embedded default: torch for the dense layers, libhubkv for the stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from ... import ops as stages
from ...config import Budget, EngineConfig
from ...graph.eager import EagerOps
from ...graph.ops import CacheInputs, ExtendInputs, PrefillInputs
from ...models.decoder import Decoder, to_the_end
from ...scorers.create import create_scorer
from ...summarize.prefill import PrefillSummaries
from ..batch import Batch
from ..cache import Cache, Segment
from ..edits import LogitEdits
from ..memory import trim_heap
from ..sampler import Sampled, SamplingParams, draw
from ..sequence import Sequence
from .condense import condense
from .executor import Prefill

MIN_ROWS_PER_ITEM = 256  # attend: less is not worth an item of its own
ITEMS_PER_THREAD = 16  # attend: how finely the rows of a layer are spread over the threads
_TRIM_BYTES = 32 << 20  # a prefill with more dense K/V than this gives the heap back afterwards


class EagerExecutor:
    """``Executor`` and ``LayerwiseExecutor`` on the CPU.

    Args:
        config: of the engine.
        weights: the model's and the gate's tensors, in the engine's dtype.
        cache: where segments and tails lie.
        load_tokenizer: the engine's; called where the scorer needs it.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: Mapping[str, torch.Tensor],
        cache: Cache,
        load_tokenizer: Callable[[], Any],
    ) -> None:
        self._model, self._hubkv = config.model, config.hubkv
        self._cache = cache
        self._decoder = Decoder(config.model, config.hubkv)
        self._dense = Decoder(config.model)
        self._ops = EagerOps(weights, config.dtype)
        self._scorer = None
        if config.hubkv is not None:
            self._scorer = create_scorer(config.hubkv.scorer, self._decoder, self._ops, load_tokenizer)

    def prefill(self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment) -> Prefill:
        """As ``Executor.prefill``. The dense K/V of the prompt is freed when this returns or raises."""
        return to_the_end(self.prefill_by_layers(token_ids, budget, alpha, window, segment))

    @torch.inference_mode()
    def prefill_by_layers(
        self, token_ids: np.ndarray, budget: Budget, alpha: float, window: int, segment: Segment
    ) -> Generator[None, None, Prefill]:
        """As ``LayerwiseExecutor.prefill_by_layers``. The prompt's dense K/V is freed when it ends or is closed."""
        ops = self._ops.with_rows_into(segment.k_rows, segment.v_rows)
        all_rows = self._model.num_rows_per_token * len(token_ids)
        decoder = self._dense if budget.num_rows == all_rows else self._decoder  # nothing to choose: nothing to score
        inputs = PrefillInputs(
            input_ids=torch.from_numpy(token_ids),
            positions=torch.arange(len(token_ids), dtype=torch.int32),
            alpha=torch.tensor([alpha], dtype=torch.float32),
            window=torch.tensor([window], dtype=torch.int32),
            rows_per_group=budget.selected_per_group,
        )
        evicted = None
        if self._hubkv is not None and budget.summaries_per_group:
            evicted = PrefillSummaries(ops, decoder, self._hubkv)
        try:
            outputs = yield from decoder.prefill_by_layers(ops, inputs, scorer=self._scorer, evicted=evicted)
        finally:
            if self._cache.ledger.dense_bytes(len(token_ids)) > _TRIM_BYTES:
                trim_heap()
        if outputs.k_rows.data_ptr() != segment.k_rows.data_ptr() or outputs.k_rows.shape != segment.k_rows.shape:
            raise RuntimeError(f"prefill kept {tuple(outputs.k_rows.shape)} rows elsewhere than in its segment")
        segment.positions.copy_(outputs.positions)
        segment.head_offsets.copy_(outputs.head_offsets)
        if segment.row_bias is not None:
            segment.row_bias.copy_(torch.cat(evicted.row_bias)) if evicted else segment.row_bias.zero_()
        rows = np.diff(outputs.head_offsets.numpy()).reshape(self._model.num_layers, self._model.num_kv_heads)
        return Prefill(outputs.logits.unsqueeze(0), lambda: rows, dict(ops.seconds))

    @property
    def ops(self) -> EagerOps:
        """What runs the model, over its weights."""
        return self._ops

    @property
    def decoder(self) -> Decoder:
        """The model itself, without compression."""
        return self._dense

    def prefill_bytes(self, num_tokens: int, budget: Budget) -> int:
        """As ``Executor.prefill_bytes``: none of the cache; activations come from the heap."""
        return 0

    def sample(
        self,
        logits: torch.Tensor,
        params: Seq[SamplingParams],
        generators: Seq[random.Random],
        edits: Seq[LogitEdits | None] = (),
    ) -> Sampled:
        """As ``Executor.sample``."""
        return draw(logits, params, generators, edits)

    @torch.inference_mode()
    def extend(
        self,
        batch: Batch,
        token_ids: torch.Tensor,
        new_lengths: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``Executor.extend``.

        Args:
            rows: int32 [M], which of the B*Tq new tokens (sequence-major) to give logits of, float32 [M, V], in place
                of each sequence's last.
        """
        tables, ledger = batch.tables(token_ids.shape[1], new_lengths), self._cache.ledger
        if batch.work is None or batch.stale:
            self._replan(batch)
        assert batch.work is not None
        work, work_count = batch.work
        cache = CacheInputs(
            arena=self._cache.arena,
            segments=tables.segments,
            block_table=tables.block_table,
            tail_lengths=tables.tail_lengths,
            new_lengths=tables.new_lengths,
            work=work,
            work_count=work_count,
            page_tokens=ledger.page_tokens,
            page_base=self._cache.page_base,
        )
        wanted = tables.last_tokens if rows is None else rows
        inputs = ExtendInputs(token_ids.flatten(), tables.positions, wanted, cache, len(batch))
        watching = batch.watching(token_ids.shape[1])
        outputs = self._decoder.extend(self._ops, inputs, new_queries=bool(watching))
        for b, cascade in watching:
            assert outputs.q_new is not None
            cascade.see(outputs.q_new[:, b, : cache.new_lengths[b]])
        stages.append(
            outputs.k_new,
            outputs.v_new,
            cache.arena,
            cache.block_table,
            cache.tail_lengths,
            cache.new_lengths,
            cache.page_tokens,
            cache.page_base,
        )
        batch.advance(cache.new_lengths)
        return outputs.logits

    def _replan(self, batch: Batch) -> None:
        segments = [s.segment for s in batch.sequences if s.segment is not None]
        grow = any(s.cascade is not None for s in batch.sequences)  # then there is room for any segments, and it stays
        fresh = self._plan(segments, self._capacity * len(segments) if grow else 0)
        if batch.work is None:
            batch.work = fresh
        else:
            for old, new in zip(batch.work, fresh, strict=True):
                old.copy_(new)
        batch.stale = False

    @property
    def _capacity(self) -> int:
        """Items of work that a layer of one sequence has at most."""
        return self._model.num_kv_heads + ITEMS_PER_THREAD * stages.num_threads()

    def _plan(self, segments: Seq[Segment], capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The work list of attend for B segments: work int32 [L, at least capacity, 4], work_count int32 [L].

        Each segment is cut as if it were alone: how its rows are summed must not depend on what runs beside it.
        """
        for segment in segments:
            if segment.work is None:
                segment.work = self._plan_one(segment)
        pieces = [segment.work for segment in segments if segment.work is not None]
        work = np.concatenate([work for work, _ in pieces], axis=1)  # [L, sum of capacities, 4]
        owner = np.repeat(np.arange(len(pieces)), [work.shape[1] for work, _ in pieces])
        work[:, :, 0] = owner
        used = np.concatenate([np.arange(work.shape[1]) < count[:, None] for work, count in pieces], axis=1)
        order = np.argsort(~used, axis=1, kind="stable")  # the items of a layer side by side, in their order
        work = np.take_along_axis(work, order[:, :, None], axis=1)
        work = np.pad(work, ((0, 0), (0, max(0, capacity - work.shape[1])), (0, 0)))
        return torch.from_numpy(work), torch.from_numpy(used.sum(axis=1, dtype=np.int32))

    def _plan_one(self, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
        model = self._model
        entry = torch.tensor([segment.entry], dtype=torch.int64)
        work, count = stages.plan(
            self._cache.arena, entry, model.num_layers, model.num_kv_heads, self._capacity, MIN_ROWS_PER_ITEM
        )
        most = max(model.num_kv_heads, int(count.max()))  # most segments are short
        return work[:, :most].numpy(), count.numpy()

    def condense(self, sequence: Sequence, moved: int, target: Segment) -> np.ndarray:
        """As ``Condenser.condense``."""
        return condense(self._model, self._cache, sequence, moved, target)
