# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token of every sequence of a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..config import HardKVConfig, require

_CANDIDATES = 1024  # a nucleus is looked for among so many of the best tokens before all are sorted


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    The logits are divided by ``temperature``, then cut to the ``top_k`` largest, then to the smallest set of the
    largest whose probability (after top-k) reaches ``top_p``; of equal logits the lower token id ranks first. One
    uniform number of the sequence's own generator then picks a token, so that a seeded request gives the same tokens
    alone and in a batch, as far as its logits are the same.

    Attributes:
        max_tokens: tokens to generate at most, >= 1. A sequence also ends where the model's positions end.
        temperature: 0 takes the most likely token (greedy); ``top_k``, ``top_p`` and ``seed`` then have no effect.
        top_k: 0 keeps all tokens.
        top_p: in (0, 1]; 1 keeps all tokens.
        seed: of the sequence's generator; None draws one from the system.
        stop: texts that end the sequence where one first appears in what is generated; it is not part of the output.
        stop_token_ids: tokens that end the sequence, beside the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the sequence.
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
    decode_compression: HardKVConfig | Literal[False] | None = None

    def __post_init__(self) -> None:
        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        stop: object = self.stop  # one text is welcome too
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        require(is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        require(is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        require(is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(self.seed is None or is_int(self.seed), "seed", self.seed, "an integer or None")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "texts that are not empty")
        require(
            all(is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids"
        )
        decode = self.decode_compression
        ok = decode is None or decode is False or isinstance(decode, HardKVConfig)
        require(ok, "decode_compression", decode, "a HardKVConfig, False or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Sampled:
    """What a pass of the model gave its sequences."""

    next_tokens: torch.Tensor  # int32 [B, 1], on the device of the logits: what extend takes next
    tokens: list[int]  # B, the same
    valid: list[bool]  # B, see ``sample``


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[random.Random]) -> Sampled:
    """``sample``, and its results on the host by one transfer: the only time that the host waits for the device."""
    tokens, valid = sample(logits, params, generators)
    host = torch.stack((tokens, valid.to(tokens.dtype))).tolist()
    return Sampled(tokens.to(torch.int32).unsqueeze(1), host[0], [bool(v) for v in host[1]])


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[random.Random]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each sequence. On CUDA everything is enqueued on the current stream and nothing waits.

    Args:
        logits: float32 [B, V].
        params: B.
        generators: B; those of sequences that are not greedy give one number each.

    Returns:
        tokens int64 [B], and bool [B]: whether the row could be sampled (its largest logit is finite and none is NaN).
    """
    best, tokens = logits.max(dim=-1)
    valid = torch.isfinite(best)
    drawn = [b for b, p in enumerate(params) if not p.greedy]
    if drawn:
        uniform = _on(logits.device, [generators[b].random() for b in drawn], torch.float64)
        rows = torch.nan_to_num(_rows(logits, drawn), nan=-math.inf, posinf=0.0)
        _set_rows(tokens, drawn, _draw(rows, [params[b] for b in drawn], uniform))
    return tokens, valid


def _draw(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, R params, [R] float64 in [0, 1) -> [R] token ids."""
    device, size = logits.device, logits.shape[-1]
    # in float64 and away from the maximum first: a tiny temperature must not overflow
    scale = _on(device, [p.temperature for p in params], torch.float64).unsqueeze(1)
    out = torch.empty(len(params), dtype=torch.int64, device=device)
    plain = [r for r, p in enumerate(params) if (p.top_k == 0 or p.top_k >= size) and p.top_p == 1]
    if plain:
        weights = _weights(_rows(logits, plain), _rows(scale, plain))
        _set_rows(out, plain, _pick(weights, _rows(uniform, plain)))
    cut = [r for r in range(len(params)) if r not in set(plain)]
    count = min(size, max([_CANDIDATES, *(params[r].top_k + 1 for r in cut)]))
    if device.type != "cpu":
        count = size  # to see that candidates suffice the host would have to wait
    while cut:
        rows = _rows(logits, cut)
        ranked, ids = _ranked(rows, count)
        weights = _weights(ranked, _rows(scale, cut))
        k = _on(device, [min(params[r].top_k or size, size) for r in cut], torch.int64).unsqueeze(1)
        kept = torch.arange(count, device=device) < k
        weights = weights.where(kept, 0.0)
        total = _sum(weights)
        if count < size:  # a row without top-k has mass beyond the candidates
            total = _sum(_weights(rows, _rows(scale, cut))).where(k > count, total)
        p = _on(device, [params[r].top_p for r in cut], torch.float64).unsqueeze(1)
        # a token stays while the mass before it is below top_p: the first always does
        kept &= (weights.cumsum(-1) - weights < p * total) | (p == 1)
        picked = _pick(weights.where(kept, 0.0), _rows(uniform, cut))
        _set_rows(out, cut, ids.gather(1, picked.unsqueeze(1)).squeeze(1))
        if count == size:
            break
        # right only where the last one kept beats the last candidate, and so every token that was not looked at
        last = ranked.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1)
        cut = [r for r, again in zip(cut, (last <= ranked[:, -1]).tolist(), strict=True) if again]
        count = size
    return out


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """The values on the device; the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """x[rows]; ``rows`` ascends."""
    return x if len(rows) == x.shape[0] else x.index_select(0, _on(x.device, rows, torch.int64))


def _set_rows(x: torch.Tensor, rows: list[int], values: torch.Tensor) -> None:
    """x[rows] = values; ``rows`` ascends."""
    if len(rows) == x.shape[0]:
        x.copy_(values)
    else:
        x.index_copy_(0, _on(x.device, rows, torch.int64), values)


def _ranked(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, descending, and their ids; of equal ones the lower id first."""
    if count == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count, dim=-1)
    # topk keeps any of equal values: ties are put in order of their ids
    ids, order = ids.sort(dim=-1)
    values, rank = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, rank)


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((x - max) / temperature), float64: probabilities up to a factor."""
    return ((logits - logits.amax(-1, keepdim=True)).double() / temperature).exp()


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[R, n] -> [R, 1], each row summed in order: ``sum`` takes another for a single row, and a draw would depend on
    how many others are drawn beside it."""
    return weights.cumsum(-1)[:, -1:]


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[R, n] float64 weights, [R] in [0, 1) -> [R] the index where the running sum passes uniform * sum."""
    reached = weights.cumsum(-1)
    target = uniform.unsqueeze(1) * reached[:, -1:]
    index = torch.searchsorted(reached, target, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[-1] - 1)
