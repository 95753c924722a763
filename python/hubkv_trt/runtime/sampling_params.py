# SPDX-License-Identifier: Apache-2.0
"""How a request wants its tokens chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..config import HardKVConfig, require
from ..config.base import FLOAT32_MAX, FLOAT32_MIN


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    The logits of a step go through the penalties (``runtime.penalties``); tokens that may not come now (``bad_words``,
    ``min_tokens``) then get -inf. What is left is divided by ``temperature``, cut to the ``top_k`` largest, then to the
    smallest set of the largest whose probability (after top-k) reaches ``top_p``, then to those that are at least
    ``min_p`` times as likely as the likeliest; of equal logits the lower token id ranks first. One uniform number of
    the sequence's own generator then picks a token, so that a seeded request gives the same tokens alone and in a
    batch, as far as its logits are the same.

    The *prompt* of a question over a context is the document and the question, whatever rows of the document were kept.

    Attributes:
        max_tokens: tokens to generate at most, >= 1. A sequence also ends where the model's positions end.
        temperature: 0 takes the most likely token (greedy); ``top_k``, ``top_p``, ``min_p`` and ``seed`` then have no
            effect.
        top_k: 0 keeps all tokens.
        top_p: in (0, 1]; 1 keeps all tokens.
        seed: of the sequence's generator; None draws one from the system.
        stop: texts that end the sequence where one first appears in what is generated; it is not part of the output.
        stop_token_ids: tokens that end the sequence, beside the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the sequence.
        min_p: in [0, 1]; 0 keeps all tokens.
        repetition_penalty: > 0. Logits of tokens that are in the prompt or were generated are divided by it where
            they are positive and multiplied by it where they are negative, once, however often the token appears; 1
            changes nothing (as in transformers and TensorRT-LLM; arXiv 1909.05858).
        presence_penalty: subtracted from the logits of tokens that were generated (not of those in the prompt).
        frequency_penalty: times how often a token was generated, subtracted from its logit. Both count as OpenAI's
            API has it; TensorRT-LLM's own default also counts the tokens of the prompt.
        min_tokens: the first so many tokens do not end the sequence: tokens that would are not generated, and a stop
            text that is complete within them is text like any other. At most ``max_tokens``.
        bad_words: texts that are not generated: the last token of each is ruled out where the prompt and what was
            generated end with those before it. Each counts as the tokenizer cuts it, with and without a space in front;
            the same letters may still come about by other tokens.
        return_log_probs: ``RequestOutput`` gets the log probability of each token: the log softmax of the model's own
            logits, before penalties, temperature and all else.
        decode_compression: of the cache while this sequence decodes, in place of the LLM's; False: none.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    return_log_probs: bool = False
    decode_compression: HardKVConfig | Literal[False] | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)  # one text is welcome too
            texts = (texts,) if isinstance(texts, str) else tuple(texts)
            object.__setattr__(self, name, texts)
            require(all(isinstance(s, str) and s for s in texts), name, texts, "texts that are not empty")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        require(
            _is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0"
        )
        require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or None")
        require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids"
        )
        repetition = self.repetition_penalty
        possible = _is_number(repetition) and FLOAT32_MIN <= repetition <= FLOAT32_MAX
        require(possible, "repetition_penalty", repetition, "a number > 0 (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(_is_number(value) and abs(value) <= FLOAT32_MAX, name, value, "a number (0 is none)")
        possible = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        require(possible, "min_tokens", self.min_tokens, f"an integer in 0..{self.max_tokens}, max_tokens")
        require(isinstance(self.return_log_probs, bool), "return_log_probs", self.return_log_probs, "True or False")
        decode = self.decode_compression
        possible = decode is None or decode is False or isinstance(decode, HardKVConfig)
        require(possible, "decode_compression", decode, "a HardKVConfig, False or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
