# SPDX-License-Identifier: Apache-2.0
"""What an evaluation asks: a context, and questions that come after its compression."""

from __future__ import annotations

from dataclasses import dataclass

METRICS = ("contains", "all", "f1", "none")


@dataclass(frozen=True)
class Question:
    """One question to a compressed context.

    Attributes:
        text: asked after the compression; "" where the answer continues the context itself.
        answers: those that count as right. The first is the one whose NLL is taken.
        lead: beginning of the answering sentence, before the answer; NLL is of what follows it.
        metric: ``contains`` (one of the answers stands in the generated text as a word), ``all`` (every one of them),
            ``f1`` (of words, the best of the answers) or ``none`` (NLL alone, nothing is generated).
        max_tokens: of the generated text.
    """

    text: str
    answers: tuple[str, ...]
    lead: str = ""
    metric: str = "contains"
    max_tokens: int = 16

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric: {self.metric!r} is not one of {', '.join(METRICS)}")
        if not self.answers or not all(self.answers):
            raise ValueError(f"answers: {self.answers!r} is not one or more texts that are not empty")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} is not an integer >= 1")


@dataclass(frozen=True)
class Sample:
    """A context and its questions.

    Attributes:
        task: name of the task.
        index: of the sample in its task.
        context: what is compressed.
        questions: each is asked for itself, over the same compressed context.
        chat: context and question are one user's turn in the model's chat template; else they are plain text.
    """

    task: str
    index: int
    context: str
    questions: tuple[Question, ...]
    chat: bool = True
