# SPDX-License-Identifier: Apache-2.0
"""The decoder, written once: Llama, Qwen2 and Qwen3 differ in what their ``ModelConfig`` says.

Dense forward, prefill with compression and extension over a compacted cache are three ways to fill in the attention of
one layer loop. Nothing here looks inside a tensor: ``ops`` runs the graph (eager) or writes it down (TensorRT).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

from ..config import HubKVConfig, ModelConfig, Scope
from ..graph.ops import ExtendInputs, ExtendOutputs, Ops, PrefillInputs, PrefillOutputs
from .gate import gate_scores
from .rope import rope_frequencies
from .scoring import EvictedRows, LayerScorer, LayerStates, PromptScorer

X = TypeVar("X")
Y = TypeVar("Y")

Attention = Callable[[int, X, X, X, X], X]
"""(layer, q [M, Hq, D], k [N, Hkv, D], v [N, Hkv, D], hidden [N, E]) -> [M, Hq, D].

q and k are rotated; hidden is the attention's input (after ``input_norm``), which scorers read. M is N, but 1 in the
last layer of a ``last_only`` forward: q is then that of the last token.
"""


class Decoder:
    """A decoder-only model as a function of ``ops``.

    Args:
        model: the architecture.
        hubkv: compression at prefill; None keeps every KV pair (a dense engine).
    """

    def __init__(self, model: ModelConfig, hubkv: HubKVConfig | None = None) -> None:
        self.model = model
        self.hubkv = hubkv
        self.scale = model.head_dim**-0.5
        self.inv_freq, self.attention_factor = rope_frequencies(
            model.rope, model.head_dim, model.max_position_embeddings
        )

    def forward(
        self,
        ops: Ops[X],
        input_ids: X,
        positions: X,
        attention: Attention[X],
        last_only: bool = False,
        see_queries: Callable[[X], None] | None = None,
    ) -> X:
        """``forward_by_layers`` without a pause."""
        return to_the_end(self.forward_by_layers(ops, input_ids, positions, attention, last_only, see_queries))

    def forward_by_layers(
        self,
        ops: Ops[X],
        input_ids: X,
        positions: X,
        attention: Attention[X],
        last_only: bool = False,
        see_queries: Callable[[X], None] | None = None,
    ) -> Generator[None, None, X]:
        """All layers and the final norm. It stops before each layer but the first.

        Args:
            input_ids: int32 [N].
            positions: int32 [N], true positions in the text.
            attention: see ``Attention``.
            last_only: give only the last token's row, and spare the last layer the others.
            see_queries: called with the rotated q [N, Hq, D] of each layer, the last one's too.

        Returns:
            [N, E], or [1, E] with ``last_only``.
        """
        m = self.model
        tables = ops.rope_tables(positions, self.inv_freq, self.attention_factor)
        hidden = ops.embedding(ops.weight("embedding.weight"), input_ids)
        for layer in range(m.num_layers):
            if layer > 0:
                yield
            name = f"layers.{layer}."
            q, k, v, x = ops.by_tokens(partial(self._before_attention, ops, name), hidden, *tables)
            if see_queries is not None:
                see_queries(q)
            if last_only and layer == m.num_layers - 1:
                q, hidden = ops.last(q), ops.last(hidden)
            x = attention(layer, q, k, v, x)
            del q, k, v  # the callee decides what outlives the layer
            (hidden,) = ops.by_tokens(partial(self._after_attention, ops, name), hidden, x)
        return ops.rms_norm(hidden, ops.weight("final_norm.weight"), m.rms_norm_eps)

    def _before_attention(self, ops: Ops[X], name: str, hidden: X, *tables: X) -> tuple[X, X, X, X]:
        """[N, E] -> rotated q [N, Hq, D] and k [N, Hkv, D], v [N, Hkv, D], the normalized input [N, E]."""
        m = self.model
        num_q, num_kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        x = ops.rms_norm(hidden, ops.weight(name + "input_norm.weight"), m.rms_norm_eps)
        qkv = ops.linear(x, ops.weight(name + "qkv.weight"), _optional(ops, name + "qkv.bias"))
        q = ops.split_heads(ops.slice_last(qkv, 0, num_q), m.num_heads, m.head_dim)
        k = ops.split_heads(ops.slice_last(qkv, num_q, num_q + num_kv), m.num_kv_heads, m.head_dim)
        v = ops.split_heads(ops.slice_last(qkv, num_q + num_kv, num_q + 2 * num_kv), m.num_kv_heads, m.head_dim)
        if m.qk_norm:
            q = ops.rms_norm(q, ops.weight(name + "q_norm.weight"), m.rms_norm_eps)
            k = ops.rms_norm(k, ops.weight(name + "k_norm.weight"), m.rms_norm_eps)
        return ops.rotary_embedding(q, tables), ops.rotary_embedding(k, tables), v, x

    def _after_attention(self, ops: Ops[X], name: str, hidden: X, attended: X) -> tuple[X]:
        """[N, E], [N, Hq, D] -> [N, E]: output projection and MLP, each added to the stream."""
        m = self.model
        x = ops.merge_heads(attended, m.num_heads * m.head_dim)
        hidden = ops.add(hidden, ops.linear(x, ops.weight(name + "o.weight"), _optional(ops, name + "o.bias")))
        x = ops.rms_norm(hidden, ops.weight(name + "post_norm.weight"), m.rms_norm_eps)
        x = ops.gated_mlp(
            x,
            m.intermediate_size,
            ops.weight(name + "gate_up.weight"),
            ops.weight(name + "down.weight"),
            _optional(ops, name + "gate_up.bias"),
            _optional(ops, name + "down.bias"),
        )
        return (ops.add(hidden, x),)

    def logits(self, ops: Ops[X], rows: X) -> X:
        """Final-norm hidden rows [M, E] -> float32 [M, V]."""
        head = "lm_head.weight" if ops.has_weight("lm_head.weight") else "embedding.weight"
        return ops.to_float32(ops.linear(rows, ops.weight(head)))

    def dense_logits(self, ops: Ops[X], input_ids: X, positions: X) -> X:
        """Logits of every token of one text under dense causal attention: int32 [T], int32 [T] -> float32 [T, V]."""

        def attention(layer: int, q: X, k: X, v: X, hidden: X) -> X:
            return ops.causal_attention(q, k, v, self.scale)

        return self.logits(ops, self.forward(ops, input_ids, positions, attention))

    def prefill(
        self,
        ops: Ops[X],
        inputs: PrefillInputs[X],
        last_queries: int = 0,
        scorer: LayerScorer[X] | PromptScorer[X] | None = None,
        evicted: EvictedRows[X] | None = None,
    ) -> PrefillOutputs[X]:
        """``prefill_by_layers`` without a pause."""
        return to_the_end(self.prefill_by_layers(ops, inputs, last_queries, scorer, evicted))

    def prefill_by_layers(
        self,
        ops: Ops[X],
        inputs: PrefillInputs[X],
        last_queries: int = 0,
        scorer: LayerScorer[X] | PromptScorer[X] | None = None,
        evicted: EvictedRows[X] | None = None,
    ) -> Generator[None, None, PrefillOutputs[X]]:
        """Dense causal attention over one prompt, of whose KV pairs only the selected rows leave the graph.

        In ``model`` scope all layers compete, so dense K and V of the whole prompt live until the last layer; in
        ``layer`` and ``head`` scope, and without compression, each layer's are released at its end, unless a
        ``PromptScorer`` waits for all of them. It stops before each layer but the first; what comes after the last
        layer comes with it.

        Args:
            last_queries: M; also give the rotated queries of the last M tokens in every layer. 0: none.
            scorer: (eager) in place of the gate.
            evicted: (eager) adds rows for what is not kept.

        Raises:
            ValueError: (eager) scores that are not finite, or a prompt that the scorer refuses.
        """
        by_model = self.hubkv is not None and self.hubkv.scope is Scope.MODEL
        by_prompt = scorer if self.hubkv is not None and isinstance(scorer, PromptScorer) else None
        by_layer = scorer if self.hubkv is not None and isinstance(scorer, LayerScorer) else None
        seen: list[X] = []
        pending: list[tuple[X, X, X | None]] = []  # k, v, scores of layers not compacted yet
        kept: list[tuple[X, X, X, X]] = []
        queries: list[X] = []

        def see(q: X) -> None:
            if last_queries:
                queries.append(ops.last(q, last_queries))
            if evicted is not None:
                evicted.see(q)
            if by_layer is not None:
                seen.append(q)  # the attention of the last layer gets only one of them

        def attention(layer: int, q: X, k: X, v: X, hidden: X) -> X:
            scores = None
            if by_layer is not None:
                with ops.stage("scorer"):
                    states = LayerStates(layer, hidden, seen.pop(), k, v)
                    scores = ops.transpose(by_layer.score(states), 1, 0)
            elif self.hubkv is not None and by_prompt is None:
                with ops.stage("scorer"):
                    scores = self.gate_scores(ops, layer, hidden)
            out = ops.causal_attention(q, k, v, self.scale)
            pending.append((k, v, scores))
            if by_prompt is None and (not by_model or layer == self.model.num_layers - 1):
                kept.append(self._keep(ops, inputs, pending, evicted))
                pending.clear()
            return out

        try:
            hidden = yield from self.forward_by_layers(
                ops,
                inputs.input_ids,
                inputs.positions,
                attention,
                last_only=True,
                see_queries=see if last_queries or by_layer is not None or evicted is not None else None,
            )
            if by_prompt is not None:
                with ops.stage("scorer"):
                    keys, values, _ = zip(*pending, strict=True)
                    scored = by_prompt.score_prompt(inputs.input_ids, keys, values)
                pending = [(k, v, ops.transpose(s, 1, 0)) for k, v, s in zip(keys, values, scored, strict=True)]
                parts = [pending] if by_model else [[each] for each in pending]
                kept = [self._keep(ops, inputs, part, evicted) for part in parts]
        finally:
            pending.clear()  # the closure stands in an error's traceback, which must not keep dense K and V
            seen.clear()
        k_rows, v_rows, positions, offsets = zip(*kept, strict=True)
        return PrefillOutputs(
            logits=ops.first(self.logits(ops, hidden)),
            k_rows=ops.concat_rows(k_rows),
            v_rows=ops.concat_rows(v_rows),
            positions=ops.concat(positions),
            head_offsets=ops.concat_offsets(offsets),
            last_queries=ops.stack(queries) if queries else None,
        )

    def gate_scores(self, ops: Ops[X], layer: int, hidden: X) -> X:
        """The gate's scores of a layer's attention input [N, E]: float32 [N, Hkv]."""

        def scores(x: X) -> tuple[X]:
            return (ops.transpose(gate_scores(ops, layer, x, self.model), 1, 0),)

        return ops.by_tokens(scores, hidden)[0]  # tokens first, as ``by_tokens`` wants them

    def _keep(
        self,
        ops: Ops[X],
        inputs: PrefillInputs[X],
        layers: list[tuple[X, X, X | None]],
        evicted: EvictedRows[X] | None,
    ) -> tuple[X, X, X, X]:
        """k_rows, v_rows, positions, head_offsets of some successive layers that share no budget with others."""
        heads = self.model.num_kv_heads
        if self.hubkv is None:
            positions, offsets = ops.select_all(inputs.positions, len(layers) * heads)
        else:
            assert inputs.alpha is not None
            assert inputs.window is not None
            scores = ops.transpose(ops.stack([s for _, _, s in layers if s is not None]), 0, 2, 1)
            refined = ops.refine(scores, inputs.alpha, inputs.window, self.hubkv)
            groups = heads if self.hubkv.scope is Scope.HEAD else 1
            positions, offsets = ops.select(refined, groups, inputs.rows_per_group)
        keys, values = [k for k, _, _ in layers], [v for _, v, _ in layers]
        if evicted is not None:
            return evicted.compact(keys, values, positions, offsets)
        k_rows, v_rows = ops.compact(keys, values, positions, offsets)
        return k_rows, v_rows, positions, offsets

    def extend(self, ops: Ops[X], inputs: ExtendInputs[X], new_queries: bool = False) -> ExtendOutputs[X]:
        """New tokens of a batch over the cache of each sequence; decoding is Tq = 1. The cache is read, not written.

        Args:
            new_queries: also give the rotated queries of every layer.
        """
        num_layers = self.model.num_layers
        k_new: list[X] = []
        v_new: list[X] = []
        q_new: list[X] = []

        def attention(layer: int, q: X, k: X, v: X, hidden: X) -> X:
            k_new.append(k)
            v_new.append(v)
            return ops.attend(layer, num_layers, q, k, v, inputs.cache, inputs.batch_size, self.scale)

        see = q_new.append if new_queries else None
        hidden = self.forward(ops, inputs.input_ids, inputs.positions, attention, see_queries=see)
        return ExtendOutputs(
            logits=self.logits(ops, ops.gather(hidden, inputs.last_tokens)),
            k_new=ops.split_batch(ops.stack(k_new), inputs.batch_size),
            v_new=ops.split_batch(ops.stack(v_new), inputs.batch_size),
            q_new=ops.split_batch(ops.stack(q_new), inputs.batch_size) if new_queries else None,
        )


def to_the_end(steps: Generator[None, None, Y]) -> Y:
    """What a function gives that stops on its way, without the stops."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _optional(ops: Ops[X], name: str) -> X | None:
    return ops.weight(name) if ops.has_weight(name) else None
