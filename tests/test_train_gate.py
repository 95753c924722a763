# SPDX-License-Identifier: Apache-2.0
"""Training a gate: contexts, metrics, the trainer, and the whole script on a tiny model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hubkv_trt.config import DType, ModelConfig
from hubkv_trt.graph.eager import EagerOps
from hubkv_trt.models.checkpoint import load_config
from hubkv_trt.models.gate import gate_scores
from hubkv_trt.scorers.fastkvzip import FIELDS, engine_weights, load_gate, random_gate
from hubkv_trt.training.corpus import build_contexts, read_texts
from hubkv_trt.training.features import Features
from hubkv_trt.training.metrics import overlap, spearman
from hubkv_trt.training.train import TrainJob, train_gate
from hubkv_trt.training.trainer import GateTrainer, TrainOptions, batched_scores
from tiny_models import byte_tokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "build_scripts" / "train_gate.py"
MODEL = ModelConfig("llama", 100, 24, 64, 3, 4, 2, 8, 512)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics() -> None:
    x = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert spearman(x, -x) == pytest.approx(-1)
    assert spearman(x, torch.ones_like(x)) == 0
    # d = (0, 1, 1, 0, 0): 1 - 6*2/(5*24); with a tie the textbook's mean ranks
    assert spearman(torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([1.0, 3, 2, 4, 5])) == pytest.approx(0.9)
    assert spearman(torch.tensor([1.0, 2, 2]), torch.tensor([1.0, 2, 3])) == pytest.approx(0.75**0.5)
    a, b = torch.tensor([4.0, 3, 2, 1]), torch.tensor([4.0, 1, 3, 2])
    assert overlap(a, b, 0.5) == 0.5
    assert overlap(a, a, 0.75) == 1


# ---- contexts --------------------------------------------------------------------------------------------------------


def text_of(num_lines: int, word: str) -> str:
    return "\n".join(f"{word} line {i} says {i * 7919 % 1000}" for i in range(num_lines))


def test_contexts_are_disjoint_pieces_and_some_are_held_out() -> None:
    texts = [("a.txt", text_of(400, "first")), ("b.txt", text_of(400, "second"))]
    tokenizer = byte_tokenizer()
    made = build_contexts(texts, tokenizer, 4000, 400, 0.2, facts=0.0, seed=1)
    assert made == build_contexts(texts, tokenizer, 4000, 400, 0.2, facts=0.0, seed=1)
    assert made != build_contexts(texts, tokenizer, 4000, 400, 0.2, facts=0.0, seed=2)
    assert 3000 < sum(c.num_scored for c in made) <= 4000
    lines: set[str] = set()
    for context in made:
        text = tokenizer.decode(context.input_ids[context.prefix_length :])
        inner = set(text.split("\n")[1:-1])
        assert not inner & lines  # a line is in one context only
        lines |= inner
    assert {c.source for c in made if c.held_out} == {"a.txt", "b.txt"}
    with_template = [c for c in made if c.prefix_length]
    assert len(with_template) == len(made) // 2
    assert tokenizer.decode(with_template[0].input_ids).startswith("<|im_start|>user\n")


def test_facts_are_added_to_contexts() -> None:
    texts = [("a.txt", text_of(400, "first"))]
    tokenizer = byte_tokenizer()
    plain, full = (build_contexts(texts, tokenizer, 4000, 400, 0.2, facts, seed=1) for facts in (0.0, 1.0))
    foreign = [sum("line" not in x for x in tokenizer.decode(c.input_ids).split("\n")[2:-1]) for c in full]
    assert sum(x > 0 for x in foreign) > len(foreign) / 2  # the end of a piece may be cut off, and its facts with it
    assert all("code" not in tokenizer.decode(c.input_ids) for c in plain)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe\x00", "is not UTF-8")]
)
def test_bad_text_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"text\.txt: {message}"):
        read_texts([path])


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        build_contexts([("a", "few words")], byte_tokenizer(), 1000, 100, 0.2, 0.0, 0)


# ---- the trainer -----------------------------------------------------------------------------------------------------


def features(seed: int = 0) -> list[Features]:
    """Scores that another random gate gives: they can be learned."""
    generator = torch.Generator().manual_seed(seed)
    secret = random_gate(MODEL, seed + 1)
    for name, tensor in secret.tensors.items():
        if name.endswith("norm.weight"):
            tensor.mul_(3)
    weights = {n: torch.stack([secret.tensors[f"{i}.{n}"] for i in range(MODEL.num_layers)]) for n in FIELDS}
    result = []
    for i in range(5):
        hidden = torch.randn(200, MODEL.num_layers, MODEL.hidden_size, generator=generator).bfloat16()
        scores = batched_scores(weights, hidden.transpose(0, 1).float())
        result.append(Features(hidden, scores, held_out=i == 4, source="random"))
    return result


OPTIONS = TrainOptions(steps=60, batch_tokens=128, eval_every=10, learning_rate=1e-2)


def test_training_scores_are_those_of_the_gate() -> None:
    gate = random_gate(MODEL, 5)
    weights = {n: torch.stack([gate.tensors[f"{i}.{n}"] for i in range(MODEL.num_layers)]) for n in FIELDS}
    hidden = torch.randn(MODEL.num_layers, 30, MODEL.hidden_size, generator=torch.Generator().manual_seed(6))
    ops = EagerOps(engine_weights(gate, DType.FLOAT32), DType.FLOAT32)
    expected = torch.stack([gate_scores(ops, i, hidden[i], MODEL) for i in range(MODEL.num_layers)])
    torch.testing.assert_close(batched_scores(weights, hidden), expected, atol=1e-6, rtol=1e-5)


def test_training_learns() -> None:
    trainer = GateTrainer(MODEL, features(), OPTIONS)
    before = trainer.report()["spearman"]
    trainer.run(progress=False)
    assert trainer.history[-1]["held_out"] < trainer.history[0]["held_out"]
    assert trainer.report()["spearman"] > max(0.3, before + 0.2)


class Interrupted(GateTrainer):
    def save(self, path: Path) -> None:
        super().save(path)
        if self.step == 30:
            raise KeyboardInterrupt


def test_resumed_training_gives_the_same_gate(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    whole = GateTrainer(MODEL, features(), OPTIONS).run(progress=False)
    with pytest.raises(KeyboardInterrupt):
        Interrupted(MODEL, features(), OPTIONS).run(checkpoint, progress=False)
    resumed = GateTrainer(MODEL, features(), OPTIONS)
    resumed.load(checkpoint)
    assert resumed.step == 30
    gate = resumed.run(checkpoint, progress=False)
    for name, tensor in whole.tensors.items():
        assert torch.equal(gate.tensors[name], tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_checkpoints_of_other_runs_are_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    GateTrainer(MODEL, features(), TrainOptions(steps=2, batch_tokens=64)).run(checkpoint, progress=False)
    with pytest.raises(ValueError, match="batch_tokens was 64 and is now 32"):
        GateTrainer(MODEL, features(), TrainOptions(steps=2, batch_tokens=32)).load(checkpoint)
    with pytest.raises(ValueError, match="tokens was 800 and is now 600"):
        GateTrainer(MODEL, features()[1:], TrainOptions(steps=2, batch_tokens=64)).load(checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read"):
        GateTrainer(MODEL, features(), TrainOptions(steps=2, batch_tokens=64)).load(checkpoint)


def test_training_stops_early() -> None:
    """On noise the held-out loss soon rises: training ends long before its steps, with the best gate, not the last."""
    noise = [
        Features(f.hidden, torch.rand(f.scores.shape, generator=torch.Generator().manual_seed(i)), f.held_out, "noise")
        for i, f in enumerate(features())
    ]
    options = TrainOptions(steps=5000, batch_tokens=128, eval_every=10, patience=3, learning_rate=1e-2)
    trainer = GateTrainer(MODEL, noise, options)
    trainer.run(progress=False)
    assert trainer.step < 2000
    assert trainer.step == trainer.best_step + 30
    losses = {int(h["step"]): h["held_out"] for h in trainer.history}
    assert losses[trainer.best_step] == min(losses.values()) < losses[trainer.step]


def test_bad_options_are_named() -> None:
    for name, value in {"steps": 0, "patience": 0, "learning_rate": 0.0, "dropout": 1.0}.items():
        with pytest.raises(ValueError, match=name):
            TrainOptions(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="held out"):
        GateTrainer(MODEL, features()[:4], OPTIONS)


# ---- the script ------------------------------------------------------------------------------------------------------


def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_gate_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_trains_a_gate_for_a_tiny_model(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(text_of(300, "first"))
    (tmp_path / "b.txt").write_text(text_of(300, "second"))
    output = tmp_path / "gate.safetensors"
    arguments = [
        str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--model", str(tiny_model("qwen3")), "--output", str(output),
        "--tokens", "2000", "--context-tokens", "200", "--steps", "100", "--quiet",
    ]  # fmt: skip
    assert script().main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Spearman" in printed
    assert "held-out tokens" in printed
    model = load_config(tiny_model("qwen3"))
    first = load_gate(output, model)
    assert first.metadata["model"] == "qwen3"
    assert first.metadata["sources"] == "a.txt, b.txt"
    assert float(first.metadata["spearman"]) > 0.1

    work = tmp_path / "gate.work"
    times = {p.name: p.stat().st_mtime_ns for p in work.glob("context-*")}
    (work / "context-00001.safetensors").write_bytes(b"cut")
    output.unlink()
    assert script().main([*arguments, "--resume"]) == 0  # all but one context are there, and training is over
    changed = {p.name for p in work.glob("context-*") if p.stat().st_mtime_ns != times[p.name]}
    assert changed == {"context-00001.safetensors"}
    again = load_gate(output, model)
    assert all(torch.equal(t, again.tensors[n]) for n, t in first.tensors.items())
    assert (work / "loss.csv").read_text().startswith("step,train,held_out\n0,")
    assert not list(work.glob("*.tmp"))

    exact = [load_file(path)["scores"] for path in sorted(work.glob("context-*"))]
    assert script().main([*arguments, "--teacher-dtype", "bfloat16"]) == 0  # another teacher: scored anew
    for before, path in zip(exact, sorted(work.glob("context-*")), strict=True):
        scores = load_file(path)["scores"]
        assert not torch.equal(scores, before)
        assert spearman(scores, before) > 0.97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt: cannot be read"),
        ([__file__, "--steps", "0"], "steps: 0"),
        ([__file__, "--held-out", "1.5"], "held_out: 1.5"),
        ([__file__, "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_script_refuses_bad_input(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    output = tmp_path / "gate.safetensors"
    model = ["--model", str(tiny_model("llama"))]
    assert script().main([*model, *arguments, "--output", str(output), "--quiet"]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_output_must_be_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output"):
        train_gate(TrainJob(texts=[__file__], output=tmp_path / "gate.pt"))
