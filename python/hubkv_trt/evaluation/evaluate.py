# SPDX-License-Identifier: Apache-2.0
"""One sample under many methods: read once, compressed many ways, asked through the product's own runtime."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import Evicted, Scope, budget
from ..engine.directory import Engine
from ..runtime.context import CompressedContext
from ..runtime.llm import LLM, SamplingParams
from .answers import score
from .dense import Compressor, DenseContext
from .forced import Continuation, Forced, forced_logits
from .methods import FULL, Method
from .results import Answer, Cell
from .sample import Question, Sample

BATCH_SIZE = 64
_HELD_BYTES = 1 << 30  # of compressed contexts that are open at a time
_LINE_BREAK = "\n\n"  # ends a context in a chat


@dataclass(frozen=True)
class Setting:
    """How a sample is compressed."""

    method: Method
    scope: Scope
    ratio: float


@dataclass(frozen=True)
class _Asked:
    """A question in tokens."""

    question: Question
    prompt: np.ndarray  # int32, what a generated answer follows
    right: Continuation  # the right answer, behind its lead


@dataclass
class _Reference:
    """What the full cache says to a question, and what others are compared by."""

    told: np.ndarray | None = None  # int32, the tokens it generated
    right: float | None = None
    text: str | None = None
    log_p: Tensor | None = None  # float32 [m, V] of the next token

    def best(self, targets: Tensor) -> Tensor:
        """int64 [m], its first choices: what it generated, where it did."""
        assert self.log_p is not None
        return self.log_p.argmax(-1) if self.told is None else targets


def context_text(sample: Sample) -> str:
    """What is compressed: the context, which in a chat ends with a line break."""
    ends = not sample.chat or sample.context.endswith("\n")
    return sample.context if ends else sample.context + _LINE_BREAK


class Evaluator:
    """Measures settings on samples.

    Args:
        engine: of the eager backend, with HubKV.
        generate: also let answers be generated; without, KL and agreement are those over the right answer's tokens.
        row_bias: rows have a bias, as methods need that leave rows behind for evicted pairs.
    """

    def __init__(self, engine: Engine, generate: bool = True, row_bias: bool = False) -> None:
        config = engine.config.replace(max_batch_size=BATCH_SIZE)
        evicted = Evicted.SUMMARIZE if row_bias else None
        self._llm = LLM(dataclasses.replace(engine, config=config), evicted=evicted)
        self._compressor = Compressor(self._llm)
        self._encoder = self._compressor.encoder
        self._generate = generate

    @property
    def tokenizer(self) -> object:
        """The engine's."""
        return self._llm.tokenizer

    def evaluate(self, sample: Sample, settings: Sequence[Setting], seed: int = 0, full: bool = True) -> list[Cell]:
        """A cell for each setting, the full cache's first (with ``full``). What runs together moves last bits only.

        Args:
            seed: with task and index it gives that of random scores and placebos.

        Raises:
            ValueError: the sample does not fit the engine.
        """
        text = context_text(sample)
        own_seed = zlib.crc32(f"{seed}/{sample.task}/{sample.index}".encode()) >> 12
        scorers = [s.method.scorer for s in settings]
        summarized = any(s.method.evicted is not Evicted.DROP for s in settings)
        dense = self._compressor.read(text, sample.chat, scorers, own_seed, summarized)
        asked = [self._ask(q, dense.ending) for q in sample.questions]
        with self._compressor.keep_all(dense) as context:
            references = self._refer(context, asked)
            answers = self._answers([context], asked, references)
        cells = [self._cell(sample, None, dense, context, answers[0])] if full else []
        for group in self._groups(dense, settings):
            with ExitStack() as opened:
                contexts = [
                    opened.enter_context(self._compressor.compress(dense, s.method, s.scope, s.ratio)) for s in group
                ]
                answers = self._answers(contexts, asked, references)
            cells += [
                self._cell(sample, setting, dense, context, found)
                for setting, context, found in zip(group, contexts, answers, strict=True)
            ]
        return cells

    def _groups(self, dense: DenseContext, settings: Sequence[Setting]) -> Iterator[list[Setting]]:
        """Settings whose contexts are open together."""
        config, group, held = self._compressor.config, list[Setting](), 0
        for setting in settings:
            assert config.hubkv is not None
            hubkv = setting.method.hubkv(config.hubkv, setting.scope)
            rows = budget(config.model, hubkv, dense.num_tokens, setting.ratio).num_rows
            size = self._llm.cache.ledger.segment_bytes(rows)
            if group and held + size > _HELD_BYTES:
                yield group
                group, held = [], 0
            group.append(setting)
            held += size
        if group:
            yield group

    # -- questions

    def _ask(self, question: Question, ending: str) -> _Asked:
        """Tokens of the answer are those that it has behind lead and question, where that can be told."""
        before = question.text + ending
        lead, answer = question.lead, (" " if question.lead else "") + question.answers[0]
        texts = before, before + lead, before + lead + answer
        prompt, led, whole = (self._encode(text) for text in texts)
        if not (_begins(whole, led) and _begins(led, prompt)):
            parts = self._encode(lead), self._encode(answer)
            return _Asked(question, prompt, Continuation(np.concatenate(parts), len(parts[1])))
        return _Asked(question, prompt, Continuation(whole[len(prompt) :], len(whole) - len(led)))

    def _encode(self, text: str) -> np.ndarray:
        return self._encoder.question(text, "") if text else np.empty(0, np.int32)

    def _refer(self, context: CompressedContext, asked: Sequence[_Asked]) -> list[_Reference]:
        references = [_Reference() for _ in asked]
        which = [i for i, a in enumerate(asked) if self._generates(a.question)]
        for i, (tokens, text) in zip(which, self._tell([(context, asked[i].question) for i in which]), strict=True):
            references[i] = _Reference(tokens, score(asked[i].question, text), text)
        items = [self._force(context, a, r) for a, r in zip(asked, references, strict=True)]
        for i, index, logits in forced_logits(self._llm, items):
            if index == 0:
                references[i].log_p = torch.log_softmax(logits, -1)
        return references

    def _answers(
        self, contexts: Sequence[CompressedContext], asked: Sequence[_Asked], references: Sequence[_Reference]
    ) -> list[list[Answer]]:
        """For each context the answers to all questions."""
        pairs = [(context, q) for context in contexts for q in range(len(asked))]
        items = [self._force(context, asked[q], references[q]) for context, q in pairs]
        answers = [
            Answer(0.0, 0, 0.0, 0.0, references[q].right, references[q].text) for _, q in pairs
        ]  # as the full cache's, where they agree
        for i, index, logits in forced_logits(self._llm, items):
            log_p, targets = torch.log_softmax(logits, -1), items[i].targets(index)
            if index == 0:
                reference = references[pairs[i][1]]
                assert reference.log_p is not None
                divergence = (reference.log_p.exp() * (reference.log_p - log_p)).sum(-1).mean()
                agreement = float((log_p.argmax(-1) == reference.best(targets)).double().mean())
                answers[i] = dataclasses.replace(
                    answers[i], kl=round(max(0.0, float(divergence)), 7), agreement=round(agreement, 4)
                )
            if index == len(items[i].continuations) - 1:
                nll = -float(log_p.gather(1, targets[:, None]).sum(dtype=torch.float64))
                answers[i] = dataclasses.replace(answers[i], nll=round(nll, 6), tokens=len(targets))
        apart = [i for i, a in enumerate(answers) if a.text is not None and a.agreement < 1]
        told = self._tell([(pairs[i][0], asked[pairs[i][1]].question) for i in apart])
        for i, (_, text) in zip(apart, told, strict=True):
            right = score(asked[pairs[i][1]].question, text)
            answers[i] = dataclasses.replace(answers[i], right=right, text=text)
        return [answers[c : c + len(asked)] for c in range(0, len(answers), len(asked))]

    def _force(self, context: CompressedContext, asked: _Asked, reference: _Reference) -> Forced:
        """The tokens at which distributions are compared come first, those of the right answer last."""
        if reference.told is None:
            return Forced(context, asked.prompt, (asked.right,))
        return Forced(context, asked.prompt, (Continuation(reference.told, len(reference.told)), asked.right))

    def _generates(self, question: Question) -> bool:
        return self._generate and question.metric != "none"

    def _tell(self, asked: Sequence[tuple[CompressedContext, Question]]) -> list[tuple[np.ndarray, str]]:
        """Tokens and text of greedy answers, all generated together."""
        if not asked:
            return []
        outputs = self._llm.generate(
            [question.text for _, question in asked],
            [SamplingParams(max_tokens=question.max_tokens) for _, question in asked],
            context=[context for context, _ in asked],
        )
        return [(np.array(output.token_ids, np.int32), output.text) for output in outputs]

    def _cell(
        self,
        sample: Sample,
        setting: Setting | None,
        dense: DenseContext,
        context: CompressedContext,
        answers: list[Answer],
    ) -> Cell:
        stats = context.stats
        assert stats.rows is not None
        name, scope, protected = FULL, Scope.MODEL, 0.0
        if setting is not None:
            name, scope = setting.method.name, setting.scope
            protected = self._compressor.protected_share(setting.method, scope, dense.num_tokens, int(stats.rows.sum()))
        return Cell(
            sample.task,
            sample.index,
            name,
            scope.value,
            stats.ratio,
            round(stats.effective_ratio, 6),
            dense.num_tokens,
            round(protected, 4),
            stats.rows.tolist(),
            answers,
        )


def _begins(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    return np.array_equal(tokens[: len(beginning)], beginning)
