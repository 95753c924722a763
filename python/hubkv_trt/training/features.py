# SPDX-License-Identifier: Apache-2.0
"""What a gate learns from: attention inputs and teacher scores of contexts, kept in files so that a run can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from ..graph.ops import Ops
from ..models.decoder import Decoder
from ..scorers.kvzip import RepeatPrompts, teacher_scores
from .corpus import Context


@dataclass(frozen=True)
class Features:
    """One context, its prefix left out."""

    hidden: torch.Tensor  # bfloat16 [T, L, E], attention inputs
    scores: torch.Tensor  # float32 [L, Hkv, T], of the teacher
    held_out: bool
    source: str


def collect_features(
    decoder: Decoder,
    ops: Ops[torch.Tensor],
    contexts: Sequence[Context],
    prompts: RepeatPrompts,
    folder: Path,
    teacher: str,
    progress: bool = True,
) -> list[Features]:
    """Runs the teacher over the contexts; those whose file is in the folder already are read instead.

    Args:
        decoder, ops, prompts: as in ``teacher_scores``.
        contexts: what to score.
        folder: gets one safetensors file for each context, written atomically.
        teacher: the model's name and number type; files of another are made again.
        progress: shows a bar on stderr.

    Returns:
        The features, in the order of the contexts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    features = []
    with tqdm(total=sum(c.num_scored for c in contexts), unit="tok", desc="teacher", disable=not progress) as bar:
        for i, context in enumerate(contexts):
            path = folder / f"context-{i:05d}.safetensors"
            digest = _digest(decoder, context, prompts, teacher)
            found = _read(path, digest)
            if found is None:
                result = teacher_scores(decoder, ops, context.input_ids, prompts, context.prefix_length)
                first = context.prefix_length
                found = {
                    "hidden": result.hidden[:, first:].transpose(0, 1).to(torch.bfloat16).contiguous(),
                    "scores": result.scores[..., first:].contiguous(),
                }
                temporary = path.with_suffix(f".{os.getpid()}.tmp")
                save_file(found, temporary, metadata={"digest": digest})
                os.replace(temporary, path)
            features.append(Features(found["hidden"], found["scores"], context.held_out, context.source))
            bar.update(context.num_scored)
            bar.refresh()  # contexts read from files come faster than the bar shows by itself
    return features


def _digest(decoder: Decoder, context: Context, prompts: RepeatPrompts, teacher: str) -> str:
    parts = [teacher, decoder.model.to_dict(), context.input_ids, context.prefix_length, vars(prompts)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path, digest: str) -> dict[str, torch.Tensor] | None:
    """The tensors of the file, if it is whole and of these tokens and this model."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("digest") != digest:
                return None
            return {name: file.get_tensor(name) for name in ("hidden", "scores")}
    except (FileNotFoundError, SafetensorError):
        return None
