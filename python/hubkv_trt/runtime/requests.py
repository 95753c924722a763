# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a call to sequences: everything is checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import Budget, EngineConfig, HardKVConfig, HubKVConfig, budget, check_ratio, require
from .cache import Cache
from .cascade import Cascade
from .context import CompressedContext
from .detokenizer import Detokenizer
from .edits import make_edits
from .prompts import Encoder, as_list, per_prompt
from .sampling_params import SamplingParams
from .sequence import Sequence

KEEP_ALL = HubKVConfig(ratio=0.0, sink_tokens=0, window_ratio=0.0)
"""What a dense engine keeps: every row."""


class Requests:
    """Makes sequences for one engine.

    Args:
        config: ``LLM.config``.
        tokenizer: of transformers.
        cache: where they will lie.
        prefill_bytes: (T, budget) -> bytes, ``Executor.prefill_bytes``.

    Attributes:
        encoder: of the tokenizer.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any,
        cache: Cache,
        prefill_bytes: Callable[[int, Budget], int],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cache = cache
        self._prefill_bytes = prefill_bytes
        self.encoder = Encoder(tokenizer, config.model.vocab_size)

    def generation(
        self, prompts: Any, sampling_params: Any, ratio: Any, context: Any, chat: bool, stream: bool
    ) -> list[Sequence]:
        """A sequence for each prompt (arguments as in ``LLM.generate``).

        Raises:
            ValueError: see ``LLM.generate``; names the prompt by its index where there are several.
        """
        prompts = as_list(prompts)
        params = per_prompt("sampling_params", sampling_params, len(prompts))
        ratios = per_prompt("ratio", ratio, len(prompts))
        contexts = per_prompt("context", context, len(prompts))
        sequences = []
        for index, (prompt, p, r, c) in enumerate(zip(prompts, params, ratios, contexts, strict=True)):
            try:
                sequences.append(self._request(prompt, SamplingParams() if p is None else p, r, c, chat, stream))
            except ValueError as error:
                raise error if len(prompts) == 1 else ValueError(f"prompts[{index}]: {error}") from None
        return sequences

    def _request(self, prompt: Any, params: Any, ratio: Any, context: Any, chat: bool, stream: bool) -> Sequence:
        require(isinstance(params, SamplingParams), "sampling_params", params, "a SamplingParams")
        if context is None:
            return self.prompt(self.encoder.prompt(prompt, chat), params, ratio, stream)
        self._check_context(context, ratio, chat)
        return self.question(self.encoder.question(prompt, context.ending), params, context, stream)

    def check(self, params: SamplingParams) -> None:
        """Refuses of the parameters what ``question`` would, before the context is there. Any thread may ask."""
        self._ruled_out(params)
        self._decode_compression(params)

    def question(
        self, token_ids: np.ndarray, params: SamplingParams, context: CompressedContext, stream: bool
    ) -> Sequence:
        """What follows a context, the rest of its turn (``context.ending``) included."""
        return self._sequence(token_ids, params, stream, context, ratio=context.stats.ratio)

    def document(self, document: Any, ratio: float | None, chat: bool) -> tuple[Sequence, str]:
        """The sequence that compresses a document, and the text that ends each question's turn."""
        token_ids, ending = self.encoder.document(document, chat)
        return self.prompt(token_ids, None, ratio, stream=False), ending

    def prompt(
        self, token_ids: np.ndarray, params: SamplingParams | None, ratio: float | None, stream: bool
    ) -> Sequence:
        """A prompt that is prefilled; without ``params`` it is only compressed."""
        config, hubkv, num_tokens = self._config, self._config.hubkv, len(token_ids)
        if hubkv is None:
            require(not ratio, "ratio", ratio, "0: this engine was built without --hubkv and keeps every KV pair")
        ratio = (hubkv.ratio if hubkv else 0.0) if ratio is None else check_ratio(ratio)
        require(
            num_tokens <= config.max_input_len,
            "prompt",
            f"{num_tokens} tokens",
            f"at most {config.max_input_len}, the engine's max_input_len",
        )
        kept = budget(config.model, hubkv or KEEP_ALL, num_tokens, ratio)
        num_bytes = self._prefill_bytes(num_tokens, kept)
        return self._sequence(token_ids, params, stream, ratio=ratio, budget=kept, prefill_bytes=num_bytes)

    def _sequence(
        self,
        token_ids: np.ndarray,
        params: SamplingParams | None,
        stream: bool,
        context: CompressedContext | None = None,
        **fields: Any,
    ) -> Sequence:
        model = self._config.model
        total = len(token_ids) + (context.num_tokens if context else 0)
        room = model.max_position_embeddings - total
        max_tokens = 0
        if params is not None:
            require(
                room >= 1,
                "prompt",
                f"{total} tokens",
                f"less than {model.max_position_embeddings}, the model's max_position_embeddings",
            )
            max_tokens = min(params.max_tokens, room)
        detokenizer, edits, end_ids = Detokenizer(self._tokenizer), None, set[int]()
        if params is not None:
            detokenizer = Detokenizer(self._tokenizer, params.stop, params.min_tokens)
            bad_words, end_ids = self._ruled_out(params)
            text = token_ids if context is None else np.concatenate([context.token_ids, token_ids])
            edits = make_edits(params, text, end_ids, bad_words)
        sequence = Sequence(
            token_ids,
            params,
            max_tokens=max_tokens,
            end_ids=frozenset(end_ids),
            detokenizer=detokenizer,
            stream=stream,
            edits=edits,
            context=context,
            cascade=self._cascade(params, context.num_tokens if context else total, total + max(0, max_tokens - 1)),
            **fields,
        )
        self._cache.check_can_ever_fit(sequence.own_segments, sequence.tail_limit, sequence.prefill_bytes)
        return sequence

    def _cascade(self, params: SamplingParams | None, compact_tokens: int, num_tokens: int) -> Cascade | None:
        """The decode-time compression of a request; None where its tail never fills.

        Args:
            compact_tokens: that the compact segment stands for.
            num_tokens: that the cache comes to stand for; the last token generated is never fed.
        """
        config = None if params is None else self._decode_compression(params)
        if config is None or num_tokens - compact_tokens < config.tail_tokens:
            return None
        assert self._config.decode_compression is not None
        model = self._config.model
        return Cascade(config, model, self._config.decode_compression.rows(model))

    def _decode_compression(self, params: SamplingParams) -> HardKVConfig | None:
        own, of_all, model = params.decode_compression, self._config.decode_compression, self._config.model
        if own is None or own is False:
            return of_all if own is None else None
        require(of_all is not None, "decode_compression", own, "possible: the LLM was made without it")
        assert of_all is not None
        most = f"at most {of_all.layer_budget}, that of the LLM"
        rows, merged = own.condensed_rows, of_all.condensed_rows
        require(rows <= merged, "condensed_rows", rows, f"at most {merged}, that of the LLM")
        require(own.rows(model) <= of_all.rows(model), "layer_budget", own.layer_budget, most)
        return own

    def _ruled_out(self, params: SamplingParams) -> tuple[list[tuple[int, ...]], set[int]]:
        """Token ids of the bad words, and the tokens that end a sequence."""
        model = self._config.model
        bad_words = self.encoder.words("bad_words", params.bad_words)
        end_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
        end_ids = {token for token in end_ids if token < model.vocab_size}
        ruled_out = {word[-1] for word in bad_words} | (end_ids if params.min_tokens else set())
        name = "bad_words" if bad_words else "stop_token_ids"
        require(len(ruled_out) < model.vocab_size, name, getattr(params, name), "leaving a token that can be generated")
        return bad_words, end_ids

    def _check_context(self, context: CompressedContext, ratio: Any, chat: bool) -> None:
        require(isinstance(context, CompressedContext), "context", context, "a CompressedContext")
        require(context.belongs_to(self._cache), "context", context, "of this LLM: compress the document with it")
        require(not context.closed, "context", context, "open; compress the document again")
        require(ratio is None, "ratio", ratio, "None with a context: the ratio was given to compress()")
        require(not chat, "chat", chat, "False with a context: chat is given to compress()")
