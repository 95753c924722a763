# SPDX-License-Identifier: Apache-2.0
"""The same samples through kvpress's own pipeline: where both have a method, both give the same answers.

Needs kvpress (extra ``eval``) and the checkpoint that the engine was built from, as transformers reads it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import HubKVConfig, ModelConfig, Scope, Scorer, require
from ..engine.directory import Engine
from ..models.gate import GATE_DIM
from ..runtime.llm import LLM, SamplingParams
from .dense import Compressor
from .evaluate import context_text
from .methods import Method
from .sample import Sample


@dataclass(frozen=True)
class Peer:
    """How kvpress runs a method.

    Attributes:
        press: name of the class.
        scope: in which its pairs compete.
        protection: fields of ``HubKVConfig`` that protect what the press does.
    """

    press: str
    scope: Scope = Scope.HEAD
    protection: dict[str, Any] = field(default_factory=dict)


PEERS: dict[Scorer, Peer] = {
    Scorer.FASTKVZIP: Peer("FastKVzipPress", Scope.MODEL),
    Scorer.KVZIP: Peer("KVzipPress", Scope.MODEL, {"window_ratio": 0.0}),
    Scorer.SNAPKV: Peer("SnapKVPress", protection={"sink_tokens": 0, "window_ratio": 0.0}),
    Scorer.EXPECTED_ATTENTION: Peer("ExpectedAttentionPress", protection={"window_ratio": 0.0}),
    Scorer.KNORM: Peer("KnormPress", protection={"sink_tokens": 0, "window_ratio": 0.0}),
    Scorer.TOVA: Peer("TOVAPress", protection={"sink_tokens": 0, "window_ratio": 0.0}),
    Scorer.STREAMING_LLM: Peer("StreamingLLMPress", protection={"window_ratio": 0.0}),
}
"""The methods that both have. Random eviction is among them by name, but draws differently."""


@dataclass(frozen=True)
class PeerAnswer:
    """One question, answered over both caches."""

    method: str
    task: str
    index: int
    question: str
    ours: str
    theirs: str

    @property
    def same(self) -> bool:
        return self.ours == self.theirs


def load_reference(checkpoint: Path) -> Any:
    """The model in float32, as transformers reads a directory or a GGUF file.

    Raises:
        OSError, ValueError: transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint)}
    if checkpoint.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(checkpoint.parent), "gguf_file": checkpoint.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def peer_answers(
    engine: Engine, model: Any, samples: Sequence[Sample], scorers: Sequence[Scorer], ratio: float
) -> Iterator[PeerAnswer]:
    """Answers to all questions of all samples, ours and kvpress's.

    Args:
        engine: of the eager backend, float32, with HubKV; with a gate where that is asked for.
        model: of ``load_reference``, the engine's own checkpoint.
        samples: in a chat, whose frame the pipeline puts around everything.
        scorers: of ``PEERS``.
        ratio: r.

    Raises:
        ImportError: kvpress is not installed.
        ValueError: a scorer has no peer, or a sample is no chat.
    """
    try:
        import kvpress
    except ImportError:
        raise ImportError("--peer: needs kvpress: pip install 'hubkv-trt[eval]'") from None
    for scorer in scorers:
        require(scorer in PEERS, "peer", scorer.value, f"a method that kvpress has: {', '.join(PEERS)}")
    llm = LLM(engine)
    assert engine.config.hubkv is not None
    with _named(model, llm.tokenizer):
        pipeline = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=llm.tokenizer)
        for scorer in scorers:
            peer = PEERS[scorer]
            press = getattr(kvpress, peer.press)(compression_ratio=ratio)
            if scorer is Scorer.FASTKVZIP:
                press.gates = gate_modules(engine)
            ours = _Ours(llm, engine.config.hubkv.replace(**peer.protection), Method(scorer), peer.scope, ratio)
            for sample in samples:
                require(sample.chat, "sample", f"{sample.task} {sample.index}", "in a chat, as the pipeline has it")
                texts = [q.text for q in sample.questions]
                most = max(q.max_tokens for q in sample.questions)
                with torch.inference_mode():
                    theirs = pipeline(context_text(sample), questions=texts, press=press, max_new_tokens=most)[
                        "answers"
                    ]
                for text, own, other in zip(texts, ours.answers(sample, texts, most), theirs, strict=True):
                    yield PeerAnswer(ours.method.name, sample.task, sample.index, text, own, other)


@dataclass(frozen=True)
class _Ours:
    llm: LLM
    hubkv: HubKVConfig  # what is protected
    method: Method
    scope: Scope
    ratio: float

    def answers(self, sample: Sample, questions: list[str], max_tokens: int) -> list[str]:
        compressor = Compressor(self.llm, self.hubkv)
        dense = compressor.read(context_text(sample), True, [self.method.scorer])
        with compressor.compress(dense, self.method, self.scope, self.ratio) as context:
            outputs = self.llm.generate(questions, SamplingParams(max_tokens=max_tokens), context=context)
        return [output.text for output in outputs]


def gate_modules(engine: Engine) -> list[Any]:
    """kvpress's modules with the gate of an engine."""
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    model: ModelConfig = engine.config.model
    heads, group = model.num_kv_heads, model.group_size
    made = []
    for layer in range(model.num_layers):
        tensors = {n.removeprefix(f"gate.{layer}."): t.float() for n, t in engine.gate.items()}
        rows = heads * group * GATE_DIM
        state = {
            "q_proj.weight": tensors["qk_proj.weight"][:rows],
            "q_proj.bias": tensors["qk_proj.bias"][:rows],
            "k_proj.weight": tensors["qk_proj.weight"][rows:],
            "q_norm.weight": tensors["q_norm.weight"],
            "k_norm.weight": tensors["k_norm.weight"],
            "k_base": tensors["k_base"],
            "b": tensors["b"].view(heads, 1, group),
        }
        sinks = int(state["k_base"].shape[2])
        module = FastKVzipGate(layer, model.hidden_size, heads, group, torch.float32, sink=sinks)
        module.load_state_dict(state)
        made.append(module.requires_grad_(False))
    return made


def describe(answers: Sequence[PeerAnswer]) -> str:
    """A table of Markdown, and the answers that differ."""
    lines = ["| method | questions | same answers |", "|---|---:|---:|"]
    for name in dict.fromkeys(a.method for a in answers):
        of_name = [a for a in answers if a.method == name]
        lines.append(f"| {name} | {len(of_name)} | {sum(a.same for a in of_name)} |")
    differ = [a for a in answers if not a.same]
    lines += [""] if differ else []
    lines += [f"- {a.method}, {a.task} {a.index}, {a.question!r}: {a.ours!r}, kvpress {a.theirs!r}" for a in differ]
    return "\n".join(lines)


@contextmanager
def _named(model: Any, tokenizer: Any) -> Iterator[None]:
    """KVzipPress reads the tokenizer from where the model came from."""
    before = model.config._name_or_path
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        model.config._name_or_path = directory
        try:
            yield
        finally:
            model.config._name_or_path = before
