# SPDX-License-Identifier: Apache-2.0
"""The scorer that an engine was built for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..config import Scorer
from ..graph.ops import Ops
from ..models.decoder import Decoder
from ..models.scoring import LayerScorer, PromptScorer


def create_scorer(
    scorer: Scorer, decoder: Decoder, ops: Ops[torch.Tensor], load_tokenizer: Callable[[], Any]
) -> LayerScorer[torch.Tensor] | PromptScorer[torch.Tensor] | None:
    """What ``Decoder.prefill`` takes for it; None for the gate, which is in the graph.

    Args:
        scorer: which one.
        decoder: the model.
        ops: eager ops over its weights (KVzip reads the prompt again).
        load_tokenizer: of the model; called for KVzip only, which asks in words.
    """
    if scorer is Scorer.FASTKVZIP:
        return None
    if scorer is Scorer.KVZIP:
        from .kvzip import KVzipScorer

        return KVzipScorer(decoder, ops, load_tokenizer())
    if scorer is Scorer.SNAPKV:
        from .snapkv import SnapKVScorer

        return SnapKVScorer(decoder.scale)
    if scorer is Scorer.EXPECTED_ATTENTION:
        from .expected_attention import ExpectedAttentionScorer

        return ExpectedAttentionScorer(decoder.inv_freq, decoder.attention_factor)
    if scorer is Scorer.KNORM:
        from .knorm import KNormScorer

        return KNormScorer()
    if scorer is Scorer.TOVA:
        from .tova import TOVAScorer

        return TOVAScorer(decoder.scale)
    if scorer is Scorer.STREAMING_LLM:
        from .streaming_llm import StreamingLLMScorer

        return StreamingLLMScorer()
    from .random import RandomScorer

    return RandomScorer()
