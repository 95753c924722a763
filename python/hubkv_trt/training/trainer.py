# SPDX-License-Identifier: Apache-2.0
"""Fits a gate to the teacher's scores: all layers at once, stopped early on held-out contexts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..config import ModelConfig
from ..models.gate import GATE_DIM, GATE_EPS
from ..scorers.fastkvzip import FIELDS, Gate, random_gate
from .features import Features
from .metrics import overlap, spearman

RATIOS = (0.5, 0.75, 0.9)
"""Compression ratios whose kept sets are compared."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train. Defaults are those of the gate that comes with the package."""

    steps: int = 400  # at most; the learning rate falls over them
    minutes: float | None = None  # of training, at most; None: no limit
    batch_tokens: int = 1024
    learning_rate: float = 2e-3  # of AdamW, after a warm-up, on a cosine to a twentieth
    weight_decay: float = 0.1
    dropout: float = 0.1  # of attention inputs
    eval_every: int = 50
    patience: int = 4  # evaluations without a better held-out loss before it stops
    num_sinks: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "eval_every", "patience", "num_sinks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not an integer >= 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: {self.learning_rate!r} is not a number > 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout!r} is not in [0, 1)")


def batched_scores(parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """``models.gate.gate_scores`` of all layers at once, differentiable.

    Args:
        parameters: the tensors of a gate by field, layers stacked in front.
        hidden: [L, n, E] float32.

    Returns:
        [L, Hkv, n].
    """
    p = parameters
    layers, n, _ = hidden.shape
    heads, groups = p["b"].shape[1:]
    q = torch.baddbmm(p["q_proj.bias"][:, None], hidden, p["q_proj.weight"].transpose(1, 2))
    k = torch.bmm(hidden, p["k_proj.weight"].transpose(1, 2))
    q = _normed(q.view(layers, n, heads, groups, GATE_DIM), p["q_norm.weight"])
    k = _normed(k.view(layers, n, heads, 1, GATE_DIM), p["k_norm.weight"])
    scale = 1 / math.sqrt(GATE_DIM)
    logit = (q * k).sum(-1) * scale + p["b"][:, None]  # [L, n, Hkv, G]
    q = q.permute(0, 2, 1, 3, 4).reshape(layers, heads, n * groups, GATE_DIM)
    base = (q @ p["k_base"].transpose(2, 3)).view(layers, heads, n, groups, -1) * scale
    return torch.sigmoid(logit.transpose(1, 2) - base.logsumexp(-1)).mean(-1)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + GATE_EPS) * weight[:, None, None, None]


def score_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy between scores in [0, 1] (arXiv 2601.17668): mean over tokens, sum over layers and heads, / L."""
    loss = functional.binary_cross_entropy(predicted, target, reduction="none")
    return loss.mean(-1).sum() / target.shape[0]


class GateTrainer:
    """One training run, which can be saved and gone on with.

    Args:
        model: gives the shapes.
        features: contexts, some held out.
        options: how to train.

    Raises:
        ValueError: no context is held out, or all are.
    """

    def __init__(self, model: ModelConfig, features: Sequence[Features], options: TrainOptions) -> None:
        self.model, self.options = model, options
        self.held_out = [f for f in features if f.held_out]
        trained = [f for f in features if not f.held_out]
        if not trained or not self.held_out:
            raise ValueError("features: there must be contexts to train on and contexts held out")
        self.hidden = torch.cat([f.hidden for f in trained])  # [N, L, E]
        self.scores = torch.cat([f.scores for f in trained], -1)  # [L, Hkv, N]
        gate = random_gate(model, options.seed, options.num_sinks)
        self.parameters = {name: _stacked(gate, name).requires_grad_() for name in FIELDS}
        decayed = [p for name, p in self.parameters.items() if name.endswith("proj.weight")]
        others = [p for name, p in self.parameters.items() if not name.endswith("proj.weight")]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))
        self.generator = torch.Generator().manual_seed(options.seed)
        self.step = 0
        self.seconds = 0.0
        self.order = torch.empty(0, dtype=torch.int64)  # tokens left in this epoch
        self.best_loss, self.best_step = math.inf, 0
        self.best = self._copy()
        self.history: list[dict[str, float]] = []

    def run(self, checkpoint: Path | None = None, progress: bool = True) -> Gate:
        """Trains until the steps or minutes are used up, or the held-out loss has not fallen for a while.

        Args:
            checkpoint: where the state goes after each evaluation; None saves nothing.
            progress: shows a bar on stderr.

        Returns:
            The gate of the lowest held-out loss, float32.
        """
        options = self.options
        if not self.history:
            self._evaluate(float("nan"))
        with tqdm(total=options.steps, initial=self.step, unit="step", desc="gate", disable=not progress) as bar:
            while not self.finished:
                began, losses = time.perf_counter(), []
                for _ in range(min(options.eval_every, options.steps - self.step)):
                    losses.append(self._train_step())
                    bar.update()
                self._evaluate(sum(losses) / len(losses))
                self.seconds += time.perf_counter() - began
                bar.set_postfix(loss=f"{losses[-1]:.4f}", held_out=f"{self.history[-1]['held_out']:.4f}")
                if checkpoint is not None:
                    self.save(checkpoint)
        return self.gate()

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        o = self.options
        out_of_time = o.minutes is not None and self.seconds >= 60 * o.minutes
        return self.step >= o.steps or out_of_time or self.step - self.best_step >= o.patience * o.eval_every

    def gate(self) -> Gate:
        """The best gate so far."""
        tensors = {f"{i}.{n}": t[i].clone() for n, t in self.best.items() for i in range(self.model.num_layers)}
        return Gate(tensors, {})

    def _train_step(self) -> float:
        options = self.options
        if len(self.order) < min(options.batch_tokens, len(self.hidden)):
            self.order = torch.randperm(len(self.hidden), generator=self.generator)
        index, self.order = self.order[: options.batch_tokens], self.order[options.batch_tokens :]
        x = self.hidden[index].transpose(0, 1).float()
        if options.dropout:
            kept = torch.rand(x.shape[1:], generator=self.generator) >= options.dropout  # the same in all layers
            x = x * kept / (1 - options.dropout)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss = score_loss(batched_scores(self.parameters, x), self.scores[..., index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def _learning_rate(self) -> float:
        o, warm_up = self.options, min(50, self.options.steps // 10 + 1)
        if self.step < warm_up:
            return o.learning_rate * (self.step + 1) / warm_up
        return o.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.step / o.steps)))

    @torch.no_grad()
    def _evaluate(self, train_loss: float) -> None:
        losses = [(float(score_loss(p, f.scores)), f.scores.shape[-1]) for f, p in self._predictions(self.parameters)]
        held_out = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        self.history.append({"step": self.step, "train": train_loss, "held_out": held_out})
        if held_out < self.best_loss:
            self.best_loss, self.best_step, self.best = held_out, self.step, self._copy()

    def _predictions(self, parameters: dict[str, Tensor]) -> list[tuple[Features, Tensor]]:
        return [(f, batched_scores(parameters, f.hidden.transpose(0, 1).float())) for f in self.held_out]

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """The best gate on held-out contexts: ``spearman``, and ``overlap@r`` of the kept sets; means over contexts."""
        predictions = self._predictions(self.best)
        result = {"spearman": _mean([spearman(p, f.scores) for f, p in predictions])}
        for ratio in RATIOS:
            result[f"overlap@{ratio}"] = _mean([overlap(p, f.scores, ratio) for f, p in predictions])
        return result

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Writes the whole state, atomically."""
        state: dict[str, Any] = {
            "options": asdict(self.options), "tokens": len(self.hidden), "parameters": self._copy(),
            "optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state(), "step": self.step,
            "seconds": self.seconds, "order": self.order, "best": self.best, "best_loss": self.best_loss,
            "best_step": self.best_step, "history": self.history,
        }  # fmt: skip
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Goes on from a saved state as if the run had not stopped. Limits (steps excepted) may have changed.

        Raises:
            ValueError: the state is damaged, or of a run with other options or features.
        """
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(f"checkpoint: {path}: cannot be read ({error}); delete it to start again") from error
        limits = ("minutes", "patience")
        mine = {**asdict(self.options), "tokens": len(self.hidden)}
        theirs = {**state["options"], "tokens": state["tokens"]}
        for name, value in mine.items():
            if name not in limits and theirs.get(name) != value:
                raise ValueError(
                    f"checkpoint: {path}: {name} was {theirs.get(name)!r} and is now {value!r}; "
                    "resume with the options of the first run, or start again without --resume"
                )
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        for name in ("step", "seconds", "order", "best", "best_loss", "best_step", "history"):
            setattr(self, name, state[name])


def _stacked(gate: Gate, field: str) -> Tensor:
    return torch.stack([gate.tensors[f"{i}.{field}"] for i in range(gate.num_layers)]).float()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
