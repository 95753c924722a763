# SPDX-License-Identifier: Apache-2.0
"""From a model and text files to a gate file: the steps behind ``build_scripts/train_gate.py``."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..config import DType, require
from ..graph.eager import EagerOps
from ..graph.linear import pack_weights
from ..models.checkpoint import demo_model_path, load_config, load_tokenizer, load_weights
from ..models.decoder import Decoder
from ..scorers.fastkvzip import Gate, gate_name, save_gate
from ..scorers.kvzip import repeat_prompts
from .corpus import build_contexts, read_texts
from .features import collect_features
from .trainer import GateTrainer, TrainOptions


@dataclass(frozen=True)
class TrainJob:
    """What to train, on what."""

    texts: Sequence[str | Path]  # plain-text files
    output: Path  # the gate, a .safetensors file
    model: str = "demo"  # "demo", a Hugging Face directory or a GGUF file
    work: Path | None = None  # teacher's files and checkpoint; None: OUTPUT.work beside the output
    tokens: int = 60000  # of all contexts
    context_tokens: int = 2000
    held_out: float = 0.15
    facts: float = 0.5
    resume: bool = False
    dtype: DType = DType.BFLOAT16  # of the file
    teacher_dtype: DType = DType.FLOAT32  # in which the model reads and repeats the contexts
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        require(Path(self.output).suffix == ".safetensors", "output", str(self.output), "a .safetensors file")


@dataclass(frozen=True)
class TrainResult:
    """What came out."""

    gate: Gate
    report: dict[str, float]  # GateTrainer.report: ranks on held-out contexts
    tokens: int  # trained on
    held_out_tokens: int
    steps: int  # of the gate that was kept
    history: list[dict[str, float]]  # step, train, held_out loss


def train_gate(job: TrainJob, progress: bool = True) -> TrainResult:
    """Scores contexts with the teacher, fits a gate, writes it (and its loss curve as CSV beside the work files).

    An interrupted run goes on where it was with ``resume``: contexts that are scored are not scored again, and training
    continues from its last checkpoint to the same result.

    Raises:
        ValueError: bad texts, model or options; a checkpoint of another run.
    """
    output = Path(job.output)
    work = Path(job.work) if job.work else output.with_suffix(".work")
    checkpoint = work / "checkpoint.pt"
    path = demo_model_path() if job.model == "demo" else Path(job.model)
    texts = read_texts(job.texts)
    model, tokenizer = load_config(path), load_tokenizer(path)
    contexts = build_contexts(texts, tokenizer, job.tokens, job.context_tokens, job.held_out, job.facts, job.train.seed)
    ops = EagerOps(pack_weights(load_weights(path, job.teacher_dtype, model=model)), job.teacher_dtype)
    teacher = f"{gate_name(str(path))} {job.teacher_dtype.value}"
    features = collect_features(Decoder(model), ops, contexts, repeat_prompts(tokenizer), work, teacher, progress)
    del ops
    trainer = GateTrainer(model, features, job.train)
    if job.resume and checkpoint.exists():
        trainer.load(checkpoint)
    gate = trainer.run(checkpoint, progress)
    report = trainer.report()
    _write_history(work / "loss.csv", trainer.history)
    metadata = {
        "model": gate_name(str(path)),
        "sources": ", ".join(name for name, _ in texts),
        "tokens": str(len(trainer.hidden)),
        **{name: f"{value:.4f}" for name, value in report.items()},
    }
    gate = Gate(gate.tensors, metadata)
    save_gate(gate, output, job.dtype)
    held_out = sum(f.scores.shape[-1] for f in trainer.held_out)
    return TrainResult(gate, report, len(trainer.hidden), held_out, trainer.best_step, trainer.history)


def _write_history(path: Path, history: Sequence[dict[str, float]]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)
    os.replace(temporary, path)


def set_threads(count: int) -> None:
    """Threads of torch."""
    require(count >= 1, "threads", count, "an integer >= 1")
    torch.set_num_threads(count)
