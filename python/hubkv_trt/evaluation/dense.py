# SPDX-License-Identifier: Apache-2.0
"""A context that is read once and compressed many ways: dense K and V of all layers, and the scores of many scorers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Budget, EngineConfig, Evicted, HubKVConfig, Scope, Scorer, budget, require
from ..models.scoring import LayerScorer, LayerStates, PromptScorer
from ..runtime.context import CompressedContext
from ..runtime.executors.eager import EagerExecutor
from ..runtime.ledger import Ledger
from ..runtime.llm import LLM
from ..runtime.prompts import Encoder
from ..runtime.requests import KEEP_ALL
from ..runtime.stats import RequestStats
from ..scorers.create import create_scorer
from ..scorers.random import RandomScorer
from ..summarize.prefill import PrefillSummaries
from .equal_bytes import ratio_at_equal_bytes
from .methods import Method

_SEED_STEP = 1 << 20  # random scores: a layer's seed is its index away from that of the text


@dataclass(frozen=True)
class DenseContext:
    """What a prefill of T tokens makes before anything is dropped.

    Attributes:
        token_ids: int32 [T].
        ending: ``CompressedContext.ending``.
        keys, values: of each layer [T, Hkv, D], keys rotated.
        scores: float32 [L, Hkv, T] by scorer.
        seed: of whatever is drawn at random for this context.
        references: of each layer float32 [R, Hq, D], what rows for evicted pairs are fitted to; or none.
    """

    token_ids: np.ndarray
    ending: str
    keys: list[Tensor]
    values: list[Tensor]
    scores: dict[Scorer, Tensor]
    seed: int
    references: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


class Compressor:
    """Reads contexts with an engine's own model and compresses them into its own cache, each as ``LLM.compress`` would
    with an engine built for the method: the same rows, byte for byte.

    Args:
        llm: of the eager backend, with HubKV. The gate is the engine's.
        hubkv: says what is protected; None: what the engine protects.

    Raises:
        ValueError: the engine is dense or runs on a device.
    """

    def __init__(self, llm: LLM, hubkv: HubKVConfig | None = None) -> None:
        executor = llm._executor
        if not isinstance(executor, EagerExecutor):
            raise ValueError(
                f"engine: backend {llm.config.backend.value} shows no scores: build one with --backend eager"
            )
        if llm.config.hubkv is None:
            raise ValueError("engine: it is dense; build one with --hubkv")
        self.llm = llm
        self.config: EngineConfig = llm.config
        self.encoder = Encoder(llm.tokenizer, llm.config.model.vocab_size)
        self._hubkv: HubKVConfig = hubkv or llm.config.hubkv
        self._executor = executor
        self._scorers: dict[Scorer, Any] = {}

    @torch.inference_mode()
    def read(
        self, text: str, chat: bool, scorers: Iterable[Scorer], seed: int = 0, references: bool = False
    ) -> DenseContext:
        """Prefills a context and scores it.

        Args:
            text: of the context; in a chat it should end with a line break, lest its last token depend on the question.
            chat: see ``LLM.compress``.
            scorers: whose scores are wanted; the gate costs next to nothing, KVzip two prefills more.
            seed: of random scores; later of ``compress``, too.
            references: keep those; methods need them that do not drop what they evict.

        Raises:
            ValueError: the context is too long, a scorer refuses it, or the engine has no gate.
        """
        token_ids, ending = self.encoder.document(text, chat)
        limit = self.config.max_input_len
        require(len(token_ids) <= limit, "context", f"{len(token_ids)} tokens", f"at most max_input_len = {limit}")
        scorers = dict.fromkeys(scorers)
        if Scorer.FASTKVZIP in scorers:
            require(self.config.has_gate, "engine", self.config.model_name, "one with a gate: build it with --gate")
        by_layer = {s: self._scorer(s, seed) for s in scorers}
        decoder, ops = self._executor.decoder, self._executor.ops
        keys: list[Tensor] = []
        values: list[Tensor] = []
        queries: list[Tensor] = []
        summaries = PrefillSummaries(ops, decoder, self._hubkv)
        scores: dict[Scorer, list[Tensor]] = {s: [] for s in scorers}

        def see(q: Tensor) -> None:
            queries.append(q)
            if references:
                summaries.see(q)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
            for name, scorer in by_layer.items():
                if isinstance(scorer, LayerScorer):
                    scores[name].append(scorer.score(LayerStates(layer, hidden, queries[0], k, v)))
                elif scorer is None:
                    scores[name].append(decoder.gate_scores(ops, layer, hidden).T)
            queries.clear()
            keys.append(k)
            values.append(v)
            return ops.causal_attention(q, k, v, decoder.scale)

        ids = torch.from_numpy(token_ids)
        positions = torch.arange(len(token_ids), dtype=torch.int32)
        decoder.forward(ops, ids, positions, attention, last_only=True, see_queries=see)
        for name, scorer in by_layer.items():
            if isinstance(scorer, PromptScorer):
                scores[name] = list(scorer.score_prompt(ids, keys, values))
        stacked = {name: torch.stack(layers).contiguous() for name, layers in scores.items()}
        return DenseContext(token_ids, ending, keys, values, stacked, seed, summaries.references)

    def compress(self, dense: DenseContext, method: Method, scope: Scope, ratio: float) -> CompressedContext:
        """Keeps what a method keeps, in a segment of the cache; close it.

        A method that leaves rows behind for evicted pairs stores no byte more than dropping at this ratio.

        Raises:
            CacheFullError: other contexts hold the cache.
            ValueError: there is no room for such rows, ``read`` kept no references, or rows of the cache have no bias.
        """
        hubkv = method.hubkv(self._hubkv, scope)
        if hubkv.evicted is not Evicted.DROP:
            expected = "drop, all that rows without a bias can do: LLM(engine, evicted=Evicted.SUMMARIZE) has one"
            require(self.llm.cache.ledger.row_bias, "evicted", hubkv.evicted.value, expected)
            require(bool(dense.references), "references", dense.references, "those of a context: read(references=True)")
        equal = ratio_at_equal_bytes(self.config, hubkv, dense.num_tokens, ratio)
        kept = budget(self.config.model, hubkv, dense.num_tokens, equal)
        if kept.num_rows == kept.num_pairs:  # all is protected
            return self._hold(dense, *self._everything(dense), kept, ratio)
        positions, offsets = method.keep(dense.scores[method.scorer], hubkv, kept, equal, dense.seed)
        return self._hold(dense, positions, offsets, kept, ratio, hubkv)

    def keep_all(self, dense: DenseContext) -> CompressedContext:
        """The whole context, as r = 0 keeps it; close it."""
        kept = budget(self.config.model, KEEP_ALL, dense.num_tokens, 0.0)
        return self._hold(dense, *self._everything(dense), kept, 0.0)

    def protected_share(self, method: Method, scope: Scope, num_tokens: int, rows: int) -> float:
        """Share of K = ``rows`` that protected tokens take."""
        hubkv = method.hubkv(self._hubkv, scope)
        return hubkv.num_protected(num_tokens) * self.config.model.num_rows_per_token / rows

    def _everything(self, dense: DenseContext) -> tuple[Tensor, Tensor]:
        positions = torch.arange(dense.num_tokens, dtype=torch.int32)
        return self._executor.ops.select_all(positions, self.config.model.num_rows_per_token)

    def _hold(
        self,
        dense: DenseContext,
        positions: Tensor,
        offsets: Tensor,
        kept: Budget,
        ratio: float,
        hubkv: HubKVConfig | None = None,
    ) -> CompressedContext:
        cache, model = self.llm.cache, self.config.model
        segment = cache.allocate(kept.num_rows)
        try:
            ops = self._executor.ops.with_rows_into(segment.k_rows, segment.v_rows)
            if segment.row_bias is not None:
                segment.row_bias.zero_()
            if hubkv is None or hubkv.evicted is Evicted.DROP:
                ops.compact(dense.keys, dense.values, positions, offsets)
            else:
                assert segment.row_bias is not None
                summaries = PrefillSummaries(ops, self._executor.decoder, hubkv, dense.references)
                _, _, positions, offsets = summaries.compact(dense.keys, dense.values, positions, offsets)
                segment.row_bias.copy_(torch.cat(summaries.row_bias))
            segment.positions.copy_(positions)
            segment.head_offsets.copy_(offsets)
            stats = RequestStats(dense.num_tokens, ratio=ratio, effective_ratio=kept.effective_ratio)
            stats.rows = offsets.diff().numpy().reshape(model.num_layers, model.num_kv_heads)
            biased = bool(kept.summaries_per_group)  # in an engine for the method; here others may need it
            stats.bytes_kept = Ledger(model, self.config.dtype, row_bias=biased).segment_bytes(segment.rows)
            stats.bytes_dense = cache.ledger.dense_bytes(dense.num_tokens)
            context = CompressedContext(cache, segment, dense.token_ids, stats)
        finally:
            cache.release(segment)  # the context holds it now
        context.ending = dense.ending
        return context

    def _scorer(self, scorer: Scorer, seed: int) -> Any:
        if scorer is Scorer.RANDOM:  # of a seed of its own: other contexts of that length get other scores
            return RandomScorer(seed * _SEED_STEP)
        if scorer not in self._scorers:
            executor, tokenizer = self._executor, self.llm.tokenizer
            self._scorers[scorer] = create_scorer(scorer, executor.decoder, executor.ops, lambda: tokenizer)
        return self._scorers[scorer]
