# SPDX-License-Identifier: Apache-2.0
"""Documents with facts to be asked for: generated, so that every answer stands in the text exactly once.

A document is filler (sentences about a town, made from a small grammar) with three kinds of facts at random places:
  passkey  "Remember: the access code of the lantern is 40213."            -> 40213
  value    a list of lines "Number of candles: 731" somewhere in the text  -> 731
  fact     "Marta was born in the city of Bergen.", one relation each      -> Bergen
Everything comes from one seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split(", ")


PLACES = _words("lantern garden tower bridge market harbour library station museum castle fountain bakery")
GOODS = _words("apples blankets candles drums envelopes forks gloves hammers jackets kettles ladders mirrors")
NAMES = _words("Marta Oskar Lena Victor Irene Hugo Clara Felix Nora Bruno Alice Simon Edith Martin Paula Arthur")
CITIES = _words("Bergen Lisbon Vienna Dublin Prague Boston Geneva Madrid Oslo Toronto Warsaw Athens")
JOBS = _words("baker teacher lawyer painter nurse farmer pilot carpenter dentist tailor plumber singer")
ANIMALS = _words("horse parrot rabbit turtle goat donkey monkey spider camel tiger")
FLOWERS = _words("roses tulips lilies daisies violets orchids sunflowers poppies")
FOODS = _words("pizza soup cheese rice salmon chocolate noodles pancakes mushrooms potatoes")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday")
INSTRUMENTS = _words("piano violin guitar flute trumpet cello harp drums")
COLOURS = _words("red green blue yellow white black silver purple orange brown")

# One relation each: statement, question, answers. {n} is a first name.
FACTS: list[tuple[str, str, list[str]]] = [
    ("{n} works as a {a}.", "What does {n} work as?", JOBS),
    ("{n} was born in the city of {a}.", "In which city was {n} born?", CITIES),
    ("The pet of {n} is a {a}.", "What is the pet of {n}?", ANIMALS),
    ("The favourite food of {n} is {a}.", "What is the favourite food of {n}?", FOODS),
    ("{n} drives a {a} car.", "What is the colour of the car of {n}?", COLOURS),
    ("{n} plays the {a} in the orchestra.", "What does {n} play in the orchestra?", INSTRUMENTS),
    ("The dentist will see {n} next {a}.", "On which day will the dentist see {n}?", DAYS),
    ("{n} grows {a} behind the house.", "What does {n} grow behind the house?", FLOWERS),
]

SUBJECTS = _phrases(
    "The mayor, An old sailor, A group of students, The postman, The shopkeeper, A visiting doctor, "
    "The council, A young couple, The gardener, The choir, A tired traveller, The night watchman"
)
VERBS = _phrases(
    "walked past, talked about, waited beside, complained about, painted a picture of, "
    "wrote to a friend about, took a photograph of, stood in front of, told a long story about, forgot about"
)
OBJECTS = _phrases(
    "the river, the weather, the town hall, the new road, the price of bread, the old mill, the school, "
    "the railway, the summer fair, the broken clock, the empty square, the northern hills"
)
WHEN = _phrases(
    "in the morning, after lunch, on Sunday, during the storm, last winter, before the concert, at noon, "
    "as everyone expected, without any hurry, for the second time, late in the evening, while it rained"
)


@dataclass(frozen=True)
class Question:
    kind: str  # passkey, value or fact
    text: str
    lead: str  # how a full sentence begins that answers it, up to the answer
    answer: str


@dataclass(frozen=True)
class Document:
    text: str
    questions: tuple[Question, ...]


def _filler(rng: random.Random) -> str:
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(WHEN)}."


def document(seed: int, num_tokens: int, count: Callable[[str], int], per_kind: int = 2) -> Document:
    """A document of about `num_tokens` tokens with `per_kind` questions of each kind.

    Args:
        seed: two documents of one seed are equal.
        num_tokens: the length to reach, by `count`.
        count: tokens of a text.
        per_kind: 1..8.
    """
    rng = random.Random(seed)
    paragraphs: list[str] = []
    questions: list[Question] = []
    for place, code in zip(rng.sample(PLACES, per_kind), rng.sample(range(10000, 100000), per_kind), strict=True):
        paragraphs.append(f"Remember: the access code of the {place} is {code}.")
        questions.append(
            Question(
                "passkey", f"What is the access code of the {place}?", f"The access code of the {place} is", str(code)
            )
        )
    goods, values = rng.sample(GOODS, per_kind), rng.sample(range(100, 1000), per_kind)
    lines = "\n".join(f"Number of {good}: {value}" for good, value in zip(goods, values, strict=True))
    paragraphs.append(f"The warehouse list:\n{lines}")
    for good, value in zip(goods, values, strict=True):
        questions.append(
            Question(
                "value",
                f"What is the number of {good} in the warehouse list?",
                f"The number of {good} in the warehouse list is",
                str(value),
            )
        )
    for name, (statement, asked, answers) in zip(rng.sample(NAMES, per_kind), rng.sample(FACTS, per_kind), strict=True):
        answer = rng.choice(answers)
        paragraphs.append(statement.format(n=name, a=answer))
        questions.append(Question("fact", asked.format(n=name), statement.partition(" {a}")[0].format(n=name), answer))

    length = sum(count(p) for p in paragraphs)
    filler: list[str] = []
    while length < num_tokens:
        filler.append(" ".join(_filler(rng) for _ in range(rng.randint(3, 6))))
        length += count(filler[-1]) + 1
    # Facts go to random gaps between filler paragraphs, never the first or the last one: those are protected.
    for paragraph in paragraphs:
        filler.insert(rng.randint(1, max(1, len(filler) - 1)), paragraph)
    return Document("\n".join(filler), tuple(questions))


def is_right(question: Question, reply: str) -> bool:
    """Exact match of the answer as a word of the reply's first line (case ignored)."""
    first_line = reply.strip().splitlines()[0] if reply.strip() else ""
    return re.search(rf"(?<!\w){re.escape(question.answer)}(?!\w)", first_line, re.IGNORECASE) is not None
