# SPDX-License-Identifier: Apache-2.0
"""HubKV's refinement around a press of kvpress (0.5), in kvpress's own pipeline::

    from hubkv_trt.integrations.kvpress import HubKVPress
    from kvpress import SnapKVPress

    pipeline("kv-press-text-generation", model=model)(context, question=question, press=HubKVPress(SnapKVPress(0.75)))

The press gives the scores and the budget, the refinement reorders what competes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..config import HubKVConfig
from ..refinement import refine

try:
    from kvpress import ExpectedAttentionPress, FastKVzipPress, KnormPress, ScorerPress, TOVAPress
    from kvpress.presses.base_press import BasePress
    from kvpress.utils import compute_n_kept
except ImportError as error:
    raise ImportError(
        f"hubkv_trt.integrations.kvpress needs kvpress 0.5 (pip install 'hubkv-trt[eval]'): {error}"
    ) from error

ScoreMap = Callable[[Tensor], Tensor]

MAPS: dict[type, ScoreMap] = {
    KnormPress: lambda scores: 1 / (1 - scores),
    ExpectedAttentionPress: lambda scores: scores / (1 + scores),
}
"""Strictly increasing maps into [0, 1] of presses whose scores lie elsewhere (docs/scorers.md)."""


@dataclass
class HubKVPress(BasePress):
    """A press whose scores are refined before its budget is spent.

    A ``ScorerPress`` keeps as many rows as it does alone, the same number in every head of a layer; a
    ``FastKVzipPress`` shares its budget over the model, or over a layer with ``layerwise``. Positions that the press
    itself always keeps (its ``n_sink`` first and ``window_size`` last tokens) are kept and not refined.

    Args:
        press: the press; its ``compression_ratio`` is r.
        hubkv: parameters of the refinement. Scope, ratio and protection in it are not read: they are the press's.
        score_map: a strictly increasing function that brings the press's scores into [0, 1]; None takes that of
            ``MAPS``, or none. It gets float32 [B, Hkv, T].

    Raises:
        TypeError: another kind of press.
        ValueError: (in use) scores of positions that compete lie outside [0, 1].
    """

    press: Any
    hubkv: HubKVConfig = field(default_factory=HubKVConfig)
    score_map: ScoreMap | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.press, (ScorerPress, FastKVzipPress)):
            raise TypeError(f"press: {type(self.press).__name__} is neither a ScorerPress nor a FastKVzipPress")

    @property
    def compression_ratio(self) -> float:
        """r of the press."""
        return float(self.press.compression_ratio)

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        self.press.compression_ratio = ratio

    def post_init_from_model(self, model: Any) -> None:
        """As the press's."""
        self.press.post_init_from_model(model)

    @contextmanager
    def __call__(self, model: Any) -> Generator[None, None, None]:
        """The model, compressing in its prefill, as kvpress's presses do."""
        if isinstance(self.press, FastKVzipPress):
            refining = _RefinedFastKVzip(**{f.name: getattr(self.press, f.name) for f in fields(self.press) if f.init})
            refining.gates, refining.refine = self.press.gates, self.refine
            with refining(model):
                self.press.gates = refining.gates  # loaded once
                yield
        else:
            with super().__call__(model):
                yield

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, T, D] of a layer -> the kept ones, [B, Hkv, K, D], in the order of the text."""
        if self.press.compression_ratio == 0:
            return keys, values
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        count = compute_n_kept(keys.shape[2], self.press.compression_ratio)
        positions = self.refine(scores).topk(count).indices.sort().values[..., None]
        keys, values = (x.gather(2, positions.expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
        return keys.contiguous(), values.contiguous()

    def refine(self, scores: Tensor) -> Tensor:
        """Scores of the press [B, Hkv, T] (B sequences or layers) -> refined, float32 [B, Hkv, T]; protected: +inf."""
        num_tokens = scores.shape[-1]
        sinks, window = self._protected(num_tokens)
        score_map = self.score_map or MAPS.get(type(self.press))
        scores = scores.float()
        if sinks + window >= num_tokens:  # nothing competes
            return scores
        inside = scores if score_map is None else score_map(scores)
        low, high = (float(x) for x in inside[..., sinks : num_tokens - window].aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"scores: {type(self.press).__name__} gives values in [{low:g}, {high:g}], outside [0, 1]: pass a "
                "strictly increasing score_map that brings them there"
            )
        inside = inside.clamp(0, 1)  # presses put what they protect above all others
        alpha = torch.tensor([self.hubkv.alpha(self.press.compression_ratio)], dtype=torch.float32)
        last = torch.tensor([window], dtype=torch.int32)
        hubkv, device = self.hubkv.replace(sink_tokens=sinks), scores.device
        return torch.cat([refine(each[None], alpha.to(device), last.to(device), hubkv)[0] for each in inside])

    def _protected(self, num_tokens: int) -> tuple[int, int]:
        """First and last positions of a prompt of T tokens that the press always keeps."""
        press = self.press
        if isinstance(press, FastKVzipPress):
            share = max(1, int(num_tokens * press.window_ratio))
            return press.n_sink, share if num_tokens < 32000 else press.window_size
        window = 1 if isinstance(press, TOVAPress) else getattr(press, "window_size", 0)
        return getattr(press, "n_sink", 0), min(window, num_tokens)


class _RefinedFastKVzip(FastKVzipPress):
    """A FastKVzipPress that refines the scores of all layers before it masks."""

    score_val: Any
    gates: Any
    refine: Callable[[Tensor], Tensor]

    def compress_post(self, model: Any) -> None:
        scores = torch.cat([*self.score_val])  # its gates score one sequence: [1, Hkv, T] a layer
        self.score_val = list(self.refine(scores).unsqueeze(1))
        super().compress_post(model)

    def _score_fast(self, module: Any, hidden_states: Tensor) -> None:
        """The gate's own scores of protected positions too: hubs are found among them, and the refinement protects."""
        layer = int(module.layer_idx)
        self.gates[layer] = self.gates[layer].to(hidden_states.device)
        self.score_val[layer] = self.gates[layer](hidden_states)
