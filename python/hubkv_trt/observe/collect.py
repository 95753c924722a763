# SPDX-License-Identifier: Apache-2.0
"""The scores that an engine gives a text, as its refine stage reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import DType, HubKVConfig, budget, require
from ..engine.directory import Engine
from ..graph.eager import EagerOps
from ..graph.ops import PrefillInputs
from ..models.decoder import Decoder
from ..scorers.create import create_scorer


@torch.inference_mode()
def collect_scores(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """Prefills T tokens on the CPU, with the engine's own weights whatever its backend.

    Args:
        engine: one with HubKV.
        token_ids: T of them, at most the engine's ``max_input_len``.

    Returns:
        float32 [L, Hkv, T].

    Raises:
        ValueError: the engine is dense, the text is empty or too long, or scores are not finite.
    """
    config = engine.config
    if config.hubkv is None:
        raise ValueError("engine: it is dense and has no scores; build one with --hubkv")
    limit = config.max_input_len
    require(1 <= len(token_ids) <= limit, "token_ids", f"{len(token_ids)} tokens", f"in 1..{limit}, max_input_len")
    ops = _Recorder({**engine.weights, **engine.gate}, config.dtype)
    decoder = Decoder(config.model, config.hubkv)
    decoder.prefill(
        ops,
        PrefillInputs(
            input_ids=torch.tensor(list(token_ids), dtype=torch.int32),
            positions=torch.arange(len(token_ids), dtype=torch.int32),
            alpha=torch.zeros(1),
            window=torch.tensor([config.hubkv.window(len(token_ids))], dtype=torch.int32),
            rows_per_group=_rows(engine, len(token_ids)),
        ),
        scorer=create_scorer(config.hubkv.scorer, decoder, ops, engine.load_tokenizer),
    )
    return torch.cat(ops.scores)


def _rows(engine: Engine, num_tokens: int) -> int:
    """Of a group that a refine call serves: as few as may be, for they are thrown away."""
    assert engine.config.hubkv is not None
    return budget(engine.config.model, engine.config.hubkv, num_tokens, 1 - 1e-6).rows_per_group


class _Recorder(EagerOps):
    """Keeps what reaches the refine stage."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: DType) -> None:
        super().__init__(weights, dtype)
        self.scores: list[Tensor] = []

    def refine(self, scores: Tensor, alpha: Tensor, window: Tensor, hubkv: HubKVConfig) -> Tensor:
        self.scores.append(scores.clone())
        return super().refine(scores, alpha, window, hubkv)
