# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token of every sequence of a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .device_rows import on_device, set_rows, take_rows
from .edits import LogitEdits, edit_logits
from .sampling_params import SamplingParams

__all__ = ["Sampled", "SamplingParams", "draw", "sample"]

_LOWEST = torch.finfo(torch.float32).min
_CANDIDATES = 1024  # a nucleus is looked for among so many of the best tokens before all are sorted


@dataclass(frozen=True)
class Sampled:
    """What a pass of the model gave its sequences."""

    next_tokens: torch.Tensor  # int32 [B, 1], on the device of the logits: what extend takes next
    tokens: list[int]  # B, the same
    valid: list[bool]  # B, see ``sample``
    log_probs: list[float] | None = None  # B, of requests that ask; 0 of others; None where nobody does


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[random.Random],
    edits: Sequence[LogitEdits | None] = (),
) -> Sampled:
    """``sample`` from the edited logits (``edit_logits``), and the results on the host by one transfer: the only time
    that the host waits for the device."""
    tokens, valid = sample(edit_logits(logits, edits), params, generators)
    next_tokens = tokens.to(torch.int32).unsqueeze(1)
    asked = [b for b, p in enumerate(params) if p.return_log_probs]
    if not asked:
        host = torch.stack((tokens, valid.to(tokens.dtype))).tolist()
        return Sampled(next_tokens, host[0], [bool(v) for v in host[1]])
    found = torch.zeros(len(params), dtype=torch.float64, device=logits.device)
    set_rows(found, asked, log_probs(take_rows(logits, asked), take_rows(tokens, asked)).double())
    host = torch.stack((tokens.double(), valid.double(), found)).tolist()
    return Sampled(next_tokens, [int(t) for t in host[0]], [bool(v) for v in host[1]], host[2])


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logarithm of softmax, float32 [R], of one token of each row: logits float32 [R, V], tokens int64 [R]. Rounded
    from float64, so that its bits do not depend on R."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).double() - logits.amax(-1, keepdim=True)
    return (chosen - _sum(_weights(logits, torch.ones_like(chosen))).log()).squeeze(1).float()


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
        uniform = on_device(logits.device, [generators[b].random() for b in drawn], torch.float64)
        rows = torch.nan_to_num(take_rows(logits, drawn), nan=-math.inf, posinf=0.0, neginf=-math.inf)
        set_rows(tokens, drawn, _draw(rows, [params[b] for b in drawn], uniform))
    return tokens, valid


def _draw(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, R params, [R] float64 in [0, 1) -> [R] token ids."""
    device, size = logits.device, logits.shape[-1]
    # in float64 and away from the maximum first: a tiny temperature must not overflow
    scale = on_device(device, [p.temperature for p in params], torch.float64).unsqueeze(1)
    min_p = on_device(device, [p.min_p for p in params], torch.float64).unsqueeze(1)
    out = torch.empty(len(params), dtype=torch.int64, device=device)
    plain = [r for r, p in enumerate(params) if (p.top_k == 0 or p.top_k >= size) and p.top_p == 1]
    if plain:
        weights = _weights(take_rows(logits, plain), take_rows(scale, plain))
        if any(params[r].min_p for r in plain):
            weights = weights.where(weights >= take_rows(min_p, plain), 0.0)  # the largest weight is 1
        set_rows(out, plain, _pick(weights, take_rows(uniform, plain)))
    cut = [r for r in range(len(params)) if r not in set(plain)]
    count = min(size, max([_CANDIDATES, *(params[r].top_k + 1 for r in cut)]))
    if device.type != "cpu":
        count = size  # to see that candidates suffice the host would have to wait
    while cut:
        rows = take_rows(logits, cut)
        ranked, ids = _ranked(rows, count)
        weights = _weights(ranked, take_rows(scale, cut))
        k = on_device(device, [min(params[r].top_k or size, size) for r in cut], torch.int64).unsqueeze(1)
        kept = torch.arange(count, device=device) < k
        weights = weights.where(kept, 0.0)
        total = _sum(weights)
        if count < size:  # a row without top-k has mass beyond the candidates
            total = _sum(_weights(rows, take_rows(scale, cut))).where(k > count, total)
        p = on_device(device, [params[r].top_p for r in cut], torch.float64).unsqueeze(1)
        # a token stays while the mass before it is below top_p: the first always does
        kept &= (weights.cumsum(-1) - weights < p * total) | (p == 1)
        if any(params[r].min_p for r in cut):
            kept &= weights >= take_rows(min_p, cut)
        picked = _pick(weights.where(kept, 0.0), take_rows(uniform, cut))
        set_rows(out, cut, ids.gather(1, picked.unsqueeze(1)).squeeze(1))
        if count == size:
            break
        # right only where the last one kept beats the last candidate, and so every token that was not looked at
        last = ranked.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)).squeeze(1)
        cut = [r for r, again in zip(cut, (last <= ranked[:, -1]).tolist(), strict=True) if again]
        count = size
    return out


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
    """exp((x - max) / temperature), float64: probabilities up to a factor; 0 for -inf at any temperature."""
    return ((logits - logits.amax(-1, keepdim=True).clamp_(min=_LOWEST)).double() / temperature).exp()


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
