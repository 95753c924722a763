# SPDX-License-Identifier: Apache-2.0
"""Evaluation tasks: what a sample promises about its length, its answers and where they stand."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.evaluation.answers import score
from hubkv_trt.evaluation.sample import Sample
from hubkv_trt.evaluation.tasks import TASKS, Prose, python_prose, read_prose
from hubkv_trt.evaluation.tasks import paragraphs as paragraph_task
from hubkv_trt.evaluation.tasks import words as vocabulary
from hubkv_trt.evaluation.tasks.prose import sentences, training_topic

ONCE = ("passkey", "multi_key", "multi_value", "key_value", "multi_hop", "paragraph_qa")  # every answer, in the context
TOKENS = 700


class Words:
    """A tokenizer for which every word and every mark is a token: generators know nothing else of one."""

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self(each)["input_ids"] for each in text]}
        return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}


WORDS = Words()


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def stands(context: str, answer: str) -> int:
    """How often it stands there as a word."""
    return len(re.findall(rf"(?<!\w){re.escape(answer)}(?!\w)", context, re.IGNORECASE))


@pytest.fixture(scope="module")
def samples(demo_tokenizer: Any) -> dict[str, list[Sample]]:
    """Three of each task."""
    return {name: [task(demo_tokenizer, TOKENS, i, seed=7) for i in range(3)] for name, task in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_the_context_has_the_tokens_asked_for(name: str, samples: dict[str, list[Sample]], demo_tokenizer: Any) -> None:
    for sample in samples[name]:
        assert 0.98 * TOKENS <= count(demo_tokenizer, sample.context) <= TOKENS
        assert (sample.task, sample.index) == (name, samples[name].index(sample))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(set(TASKS) - {"common_words", "frequent_words"})),  # they need a list for their counts
    tokens=st.integers(500, 2500),
    index=st.integers(0, 30),
    seed=st.integers(0, 10**6),
)
def test_any_seed_and_length_gives_a_sample_that_holds_its_answers(
    name: str, tokens: int, index: int, seed: int
) -> None:
    sample = TASKS[name](WORDS, tokens, index, seed)
    assert 0.98 * tokens <= count(WORDS, sample.context) <= tokens
    assert len({(q.text, q.lead) for q in sample.questions}) == len(sample.questions)
    if name in ONCE:
        for question in sample.questions:
            for answer in question.answers:
                assert stands(sample.context, answer) == 1
                assert not stands(question.text + " " + question.lead, answer), "an answer that the question gives away"


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_depends_on_its_arguments_alone(
    name: str, samples: dict[str, list[Sample]], demo_tokenizer: Any
) -> None:
    task = TASKS[name]
    assert task(demo_tokenizer, TOKENS, 1, seed=7) == samples[name][1]
    others = [samples[name][0], task(demo_tokenizer, TOKENS, 1, seed=8), task(demo_tokenizer, 600, 1, seed=7)]
    for other in others:
        assert other.context != samples[name][1].context
        assert other.questions != samples[name][1].questions or name.endswith("_words")


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_is_right_and_another_is_not(name: str, samples: dict[str, list[Sample]]) -> None:
    for question in (q for sample in samples[name] for q in sample.questions if q.metric != "none"):
        assert score(question, f"{question.lead} {', '.join(question.answers)}.") == 1
        assert score(question, question.lead) == 0
        assert len(question.answers) == (len(set(question.answers)) if question.metric == "all" else 1)


@pytest.mark.parametrize("name", ["passkey", "multi_key", "multi_value", "key_value", "multi_hop", "variable_tracking"])
def test_needles_are_apart_and_away_from_the_ends(name: str, samples: dict[str, list[Sample]]) -> None:
    """The first tokens and the last 2 % are protected: what stands there would be kept by any method."""
    facts = re.compile(r"Remember:|The special number|One of the|Number of|\w+ works at|The \w+ is in the city|VAR ")
    for sample in samples[name]:
        lines = sample.context.split("\n")
        marked = [bool(facts.match(line)) for line in lines]
        assert sum(marked) >= 6
        assert not marked[0]
        assert not marked[-1]
        if name != "key_value":  # a block of four lines
            neighbours = sum(a and b for a, b in itertools.pairwise(marked))
            assert neighbours == 0, "two needles in one gap"


def test_needles_take_every_depth() -> None:
    """Over many samples each fifth of a text holds about as many passkeys."""
    found = Counter[int]()
    for i in range(40):
        sample = TASKS["passkey"](WORDS, 600, i, seed=0)
        for question in sample.questions:
            found[5 * sample.context.index(question.answers[0]) // len(sample.context)] += 1
    assert sum(found.values()) == 240
    assert all(30 <= found[fifth] <= 66 for fifth in range(5)), found


def test_a_chain_of_variables_leads_to_its_value(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["variable_tracking"]:
        values: dict[str, str] = {}
        for name, value in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", sample.context, re.MULTILINE):
            values[name] = values.get(value, value)  # a variable stands below the one that it is set to
        assert len(values) == 8
        for question in sample.questions:
            if question.metric == "all":
                value = re.findall(r"\d{5}", question.text)[0]
                assert {name for name, v in values.items() if v == value} == set(question.answers)
            else:
                assert [values[name] for name in re.findall(r"[A-Z]{3,}", question.text)] == list(question.answers)
                assert stands(sample.context, question.answers[0]) == 1


def test_a_hop_is_needed_from_person_to_city(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["multi_hop"]:
        works = dict(re.findall(r"^(\w+) works at the (\w+)\.$", sample.context, re.MULTILINE))
        city = dict(re.findall(r"^The (\w+) is in the city of (\w+)\.$", sample.context, re.MULTILINE))
        for question in sample.questions:
            (person,) = set(works) & set(question.text.rstrip("?").split())
            assert city[works[person]] == question.answers[0]


@pytest.mark.parametrize("name", ["common_words", "frequent_words"])
def test_the_words_asked_for_are_the_most_frequent(name: str, samples: dict[str, list[Sample]]) -> None:
    for sample in samples[name]:
        counts = Counter(re.findall(r"[a-z]+", sample.context))
        best = [word for word, _ in counts.most_common(3)]
        assert [list(q.answers) for q in sample.questions] == [best[:1], best]
        assert counts[best[2]] > max(n for word, n in counts.items() if word not in best)


def test_a_text_goes_on_where_the_context_ends(samples: dict[str, list[Sample]]) -> None:
    text = "\n".join(python_prose().paragraphs)
    for sample in samples["continuation"]:
        (question,) = sample.questions
        assert sample.context + question.answers[0] in text
        assert question.answers[0][0].isspace()
        assert (question.text, question.lead, sample.chat) == ("", "", False)


def test_passages_to_repeat_stand_in_the_text_in_order(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["reconstruction"]:
        flat = " ".join(sample.context.split())
        places = [flat.index(f"{q.lead} {q.answers[0]}") for q in sample.questions]
        assert len(places) == 6
        assert places == sorted(places)
        assert all(flat.count(q.lead) == 1 and len(q.answers[0].split()) == 32 for q in sample.questions)


def test_samples_of_real_text_share_none() -> None:
    """Contexts are what confidence intervals count as independent."""
    for name in ("continuation", "reconstruction"):
        seen: set[str] = set()
        for i in range(50):  # as many as the main comparison has
            sample = TASKS[name](WORDS, 1000, i, seed=3)
            lines = {
                line for line in (sample.context + sample.questions[0].answers[0]).split("\n")[:-1] if len(line) > 40
            }
            assert not lines & seen
            seen |= lines


def test_what_cannot_be_made_says_what_to_do() -> None:
    for name in sorted(set(TASKS) - {"continuation"}):
        with pytest.raises(ValueError, match=rf"^tokens: 3 is too short for {name}.*; ask for more$"):
            TASKS[name](WORDS, 3, 0, 0)
    with pytest.raises(
        ValueError, match=r"^samples: sample 9 of continuation: the text has \d stretches of 40000 tokens"
    ):
        TASKS["continuation"](WORDS, 40000, 9, 0)


def test_training_and_evaluation_texts_are_apart() -> None:
    from pydoc_data.topics import topics

    trained = " ".join(
        " ".join(re.findall(r"[a-z0-9]+", topics[name].lower())) for name in topics if training_topic(name)
    )
    mine = [" ".join(text.split()) for name, text in topics.items() if not training_topic(name)]
    paragraphs = python_prose().paragraphs
    assert training_topic("compound")
    assert not training_topic("specialnames")
    for words in (re.findall(r"[a-z0-9]+", p.lower()) for p in paragraphs):
        middle = words[max(0, len(words) // 2 - 6) :][:12]
        assert len(middle) < 12 or f" {' '.join(middle)} " not in trained, "a paragraph that a training topic has, too"
    assert sum(any(p in text for text in mine) for p in paragraphs[-200:]) > 100  # the topics come last


def test_prose_is_prose() -> None:
    prose = python_prose()
    assert len(prose.paragraphs) == len(set(prose.paragraphs))
    assert all(12 <= len(p.split()) <= 90 and p == " ".join(p.split()) for p in prose.paragraphs)
    assert sum(len(p.split()) for p in prose.paragraphs) > 60_000
    assert prose.digest == Prose(prose.paragraphs).digest != Prose(prose.paragraphs[1:]).digest
    assert sentences("Use it, e.g. Sockets. It works! So (they say.) Fine.") == [
        "Use it, e.g. Sockets.", "It works!", "So (they say.) Fine.",
    ]  # fmt: skip


def test_text_of_the_user_is_read(tmp_path: Path) -> None:
    lines = [f"This is sentence number {i} of a text that somebody wrote about nothing much at all." for i in range(90)]
    (tmp_path / "mine.txt").write_text("\n\n".join(lines) + "\n\nx = 1\n", encoding="utf-8")
    prose = read_prose([tmp_path / "mine.txt"])
    assert list(prose.paragraphs) == lines
    context = TASKS["passkey"](WORDS, 3000, 0, 0, prose).context  # longer than the text: it comes again
    filler = [line for line in context.split("\n") if not line.startswith("Remember:")]
    assert set(filler[:-1]) <= set(lines)
    assert max(Counter(filler).values()) >= 2
    (tmp_path / "code.txt").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"code.txt: no paragraph reads as prose"):
        read_prose([tmp_path / "code.txt"])


def test_no_word_gives_two_answers_or_stands_in_a_paragraph() -> None:
    kinds = list(paragraph_task._VALUES.values())
    pooled = [word.lower() for kind in kinds for word in kind]
    assert len(pooled) == len(set(pooled)), "a word of two kinds"
    for topic in paragraph_task._TOPICS:
        slots = re.findall(r"{(\w+)}", topic.text)
        assert len(slots) == len(set(slots))
        assert {slot for _, _, slot in topic.asked} <= set(slots)
        assert not set(re.findall(r"\w+", topic.text.lower())) & (set(pooled) - set(slots)), topic.text
    lists = [value for value in vars(vocabulary).values() if isinstance(value, tuple)]
    assert len(lists) == 12
    for words in lists:
        assert len(words) == len(set(words))
        assert not any(a != b and stands(a, b) for a in words for b in words)
