# SPDX-License-Identifier: Apache-2.0
"""The distinct requests of a mixed load, with what ``LLM.generate`` answers to each of them alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hubkv_trt.runtime.llm import LLM, SamplingParams

PROMPTS = (
    "The river rises in the hills and",
    "A hub keeps what its neighbours repeat. A reader",
    "Monday: bread, milk, eggs. Tuesday: bread, milk, eggs. Wednesday: bread,",
    "Once a year the keeper of the light climbs down to the harbour, buys rope and oil, and",
)
DOCUMENTS = {
    "lighthouse": "The lighthouse has 212 steps. The lamp is lit at dusk. The keeper is called Ines.\n\n",
    "market": "The market opens at six. Fish is sold on the left side, bread on the right side.\n\n",
}
QUESTIONS = ("Who is there?", "What is sold?")
RATIOS = (None, 0.0, 0.5, 0.9)
LENGTHS = (3, 9, 5, 14, 1)


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        inputs: of the server, ``text_input`` included.
        params: the same for ``SamplingParams``.
        ratio: the same for ``LLM``.
        context_id: a name in DOCUMENTS, where the text is a question.
    """

    inputs: dict[str, Any]
    params: dict[str, Any]
    ratio: float | None = None
    context_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """What is compared."""

    text: str
    finish_reason: str
    num_output_tokens: int


@dataclass(frozen=True)
class Requests:
    """All cases with their answers.

    Attributes:
        prompts: cases with a prompt of their own.
        plain: those of them without a list of texts, which has no shape over HTTP.
        questions: cases over a context.
        answers: of each case.
    """

    prompts: list[Case]
    questions: list[Case]
    answers: dict[int, Answer] = field(repr=False)

    @property
    def plain(self) -> list[Case]:
        return [case for case in self.prompts if "stop_words" not in case.inputs]

    def answer(self, case: Case) -> Answer:
        return self.answers[id(case)]


def prompt_cases() -> list[Case]:
    """Every prompt at every ratio, greedy and drawn, of several lengths, some with stop words."""
    cases = []
    for prompt in PROMPTS:
        for ratio in RATIOS:
            for drawn in (False, True):
                number = len(cases)
                params: dict[str, Any] = {"max_tokens": LENGTHS[number % len(LENGTHS)]}
                if drawn:
                    params |= {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": number}
                inputs = {"text_input": prompt, **params}
                if number % 6 == 5:
                    inputs |= {"stop_words": ["e", "on"]}
                    params |= {"stop": ("e", "on")}
                if ratio is not None:
                    inputs["hubkv_ratio"] = ratio
                cases.append(Case(inputs, params, ratio))
    return cases


def question_cases() -> list[Case]:
    """Every question over every document. The document comes with it, so that the server may have dropped it."""
    return [
        Case(
            {"text_input": question, "context_id": name, "context_text": text, "hubkv_ratio": 0.5, "max_tokens": 6},
            {"max_tokens": 6},
            0.5,
            name,
        )
        for name, text in DOCUMENTS.items()
        for question in QUESTIONS
    ]


def make_requests(llm: LLM) -> Requests:
    """All cases, each answered by the engine alone."""
    prompts, questions, answers = prompt_cases(), question_cases(), {}
    for case in prompts:
        (output,) = llm.generate(case.inputs["text_input"], SamplingParams(**case.params), ratio=case.ratio)
        answers[id(case)] = Answer(output.text, output.finish_reason, len(output.token_ids))
    for case in questions:
        with llm.compress(DOCUMENTS[case.context_id or ""], ratio=case.ratio) as context:
            (output,) = llm.generate(case.inputs["text_input"], SamplingParams(**case.params), context=context)
        answers[id(case)] = Answer(output.text, output.finish_reason, len(output.token_ids))
    return Requests(prompts, questions, answers)
