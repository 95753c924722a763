# SPDX-License-Identifier: Apache-2.0
"""KVzip (arXiv 2505.23416): scores by letting the model repeat its context. Exact and slow; it teaches the gate, and
serves where a prompt's cost matters less than what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph.ops import Ops
from ..models.decoder import Decoder

REPEAT_FIRST = "\n\nRepeat the previous context exactly."
REPEAT_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
CHUNK_TOKENS = 2048
LEAD_TOKENS = 8  # of the chunk before, which tell the model where to start
NUM_SINKS = 4
_QUERY_BLOCK = 128  # rows of logits that stay in the processor's cache


@dataclass(frozen=True)
class RepeatPrompts:
    """The token ids around a chunk that the model is asked to repeat."""

    first: tuple[int, ...]  # the request for the first chunk
    later: tuple[int, ...]  # for the others, before LEAD_TOKENS of the chunk before
    suffix: tuple[int, ...]  # ends the user's turn and opens the answer


@dataclass(frozen=True)
class TeacherScores:
    """What the teacher says of one context."""

    scores: torch.Tensor  # float32 [L, Hkv, T]; 0 in the prefix
    hidden: torch.Tensor  # [L, T, E], the attention inputs of the context pass


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """The text before and after a user's words in the tokenizer's chat template; ("", "\\n") where it has none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return "", "\n"
    mark = "<<<the context>>>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    before, found, after = text.partition(mark)
    if not found:
        raise ValueError("tokenizer: its chat template leaves the user's words out")
    return before, after


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the text alone, with no special tokens added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def repeat_prompts(tokenizer: Any) -> RepeatPrompts:
    """The prompts of KVzip in the model's tokens."""
    suffix = chat_frame(tokenizer)[1]
    return RepeatPrompts(*(tuple(encode(tokenizer, text)) for text in (REPEAT_FIRST, REPEAT_LATER, suffix)))


@torch.inference_mode()
def teacher_scores(
    decoder: Decoder,
    ops: Ops[torch.Tensor],
    input_ids: Sequence[int],
    prompts: RepeatPrompts,
    prefix_length: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TeacherScores:
    """Scores of all KV pairs of a context by reconstruction.

    The context is read once; then, for each chunk of it, the model reads a request to repeat the chunk followed by the
    chunk itself. The score of a KV pair is the largest attention weight it gets from any query of that pass and any
    query head of its group, in a softmax over the first sinks, the chunk's keys and the pass's own earlier keys.

    Args:
        decoder: the model (its ``hubkv`` is not used).
        ops: eager ops over its weights, float32 for exact ranks.
        input_ids: T tokens, the prefix included.
        prompts: of the model's tokenizer.
        prefix_length: tokens before the context proper (a chat template's), which are not scored: they get 0.
        chunk_tokens: tokens that one repeat pass covers.

    Returns:
        scores float32 [L, Hkv, T] in [0, 1], and hidden [L, T, E].

    Raises:
        ValueError: nothing is left after the prefix, or context and repeat pass exceed the model's positions.
    """
    num_tokens = len(input_ids)
    chunks = _checked_chunks(decoder, input_ids, prompts, prefix_length, chunk_tokens)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    hidden_states: list[torch.Tensor] = []

    def read(layer: int, q: Any, k: Any, v: Any, hidden: Any) -> Any:
        keys.append(k)
        values.append(v)
        hidden_states.append(hidden)
        return ops.causal_attention(q, k, v, decoder.scale)

    decoder.forward(ops, _ids(input_ids), torch.arange(num_tokens, dtype=torch.int32), read)
    return TeacherScores(_repeat(decoder, ops, chunks, keys, values), torch.stack(hidden_states))


class KVzipScorer:
    """KVzip's scores of prompts that are served: those of ``teacher_scores``, over the K and V that prefill made.

    The prompt's chat opening, where it begins with the tokenizer's, is not repeated: those tokens score 0. Values are
    attention weights, in [0, 1] as they are. Prefill takes two to three times as long: every token goes through the
    model a second time, attending to the whole prompt and its own chunk, and the weights are computed twice.

    Args:
        decoder: the model.
        ops: eager ops over its weights.
        tokenizer: of the model.
        chunk_tokens: tokens that one repeat pass covers.
    """

    def __init__(
        self, decoder: Decoder, ops: Ops[torch.Tensor], tokenizer: Any, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        self._decoder, self._ops, self._chunk_tokens = decoder, ops, chunk_tokens
        self._prompts = repeat_prompts(tokenizer)
        self._opening = encode(tokenizer, chat_frame(tokenizer)[0])

    def score_prompt(
        self, input_ids: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """As ``PromptScorer.score_prompt``.

        Raises:
            ValueError: prompt and repeat pass exceed the model's positions.
        """
        ids = input_ids.tolist()
        prefix = len(self._opening)
        if prefix >= len(ids) or ids[:prefix] != self._opening:
            prefix = 0
        chunks = _checked_chunks(self._decoder, ids, self._prompts, prefix, self._chunk_tokens)
        return _repeat(self._decoder, self._ops, chunks, keys, values).unbind()


def _repeat(
    decoder: Decoder,
    ops: Ops[torch.Tensor],
    chunks: Sequence[tuple[int, int, list[int]]],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """float32 [L, Hkv, T] of the repeat passes over a context with these keys and values [T, Hkv, D] of each layer."""
    num_tokens = keys[0].shape[0]
    scores = torch.zeros(decoder.model.num_layers, decoder.model.num_kv_heads, num_tokens)
    for start, stop, ids in chunks:

        def repeat(layer: int, q: Any, k: Any, v: Any, hidden: Any, start: int = start, stop: int = stop) -> Any:
            sinks = keys[layer][: min(NUM_SINKS, start)]
            scores[layer, :, start:stop] = largest_attention(q, sinks, keys[layer][start:stop], k, decoder.scale)
            k, v = torch.cat([keys[layer], k]), torch.cat([values[layer], v])
            return ops.causal_attention(q, k, v, decoder.scale)

        positions = torch.arange(num_tokens, num_tokens + len(ids), dtype=torch.int32)
        decoder.forward(ops, _ids(ids), positions, repeat)
    return scores


def largest_attention(
    q: torch.Tensor, sinks: torch.Tensor, chunk: torch.Tensor, new: torch.Tensor, scale: float
) -> torch.Tensor:
    """The largest softmax weight of each key of the chunk, over queries and over the query heads of a group.

    Args:
        q: [Tq, Hq, D], the queries of the repeat pass.
        sinks: [s, Hkv, D], seen by all queries.
        chunk: [n, Hkv, D], seen by all queries.
        new: [Tq, Hkv, D], the keys of the repeat pass, seen causally.
        scale: of the logits.

    Returns:
        [Hkv, n] float32.
    """
    num_queries, num_heads, dim = q.shape
    heads, seen, n = chunk.shape[1], sinks.shape[0] + chunk.shape[0], chunk.shape[0]
    group = num_heads // heads
    best = torch.zeros(heads, n)
    for h in range(heads):
        keys = torch.cat([sinks[:, h], chunk[:, h], new[:, h]]).float()
        for i in range(0, num_queries, _QUERY_BLOCK):
            j = min(i + _QUERY_BLOCK, num_queries)
            rows = q[i:j, h * group : (h + 1) * group].float() * scale  # [m, G, D]
            logits = (rows.reshape(-1, dim) @ keys[: seen + j].T).view(j - i, group, seen + j)
            future = torch.ones(j - i, j - i, dtype=torch.bool).triu_(1)
            logits[:, :, seen + i :].masked_fill_(future[:, None], -torch.inf)
            weights = torch.softmax(logits, -1)[:, :, seen - n : seen]
            best[h] = torch.maximum(best[h], weights.amax((0, 1)))
    return best


def _ids(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int32)


def _checked_chunks(
    decoder: Decoder, input_ids: Sequence[int], prompts: RepeatPrompts, prefix_length: int, chunk_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """The repeat passes of a context that the model has the positions for."""
    num_tokens = len(input_ids)
    if not 0 <= prefix_length < num_tokens:
        raise ValueError(f"prefix_length: {prefix_length} is not in 0..{num_tokens - 1}, below the context's length")
    chunks = _chunks(input_ids, prefix_length, prompts, chunk_tokens)
    longest, limit = num_tokens + max(len(ids) for _, _, ids in chunks), decoder.model.max_position_embeddings
    if longest > limit:
        raise ValueError(
            f"input_ids: context and repeat pass are {longest} positions and the model has {limit}: shorten the context"
        )
    return chunks


def _chunks(
    input_ids: Sequence[int], prefix_length: int, prompts: RepeatPrompts, chunk_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """(start, stop, token ids of the repeat pass) of each chunk."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: {chunk_tokens} is not an integer >= 1")
    result = []
    for start in range(prefix_length, len(input_ids), chunk_tokens):
        stop = min(start + chunk_tokens, len(input_ids))
        if start == prefix_length:
            request = list(prompts.first)
        else:
            before = input_ids[max(start - LEAD_TOKENS, prefix_length) : start]
            request = [*prompts.later, *before]
        result.append((start, stop, [*request, *prompts.suffix, *input_ids[start:stop]]))
    return result
