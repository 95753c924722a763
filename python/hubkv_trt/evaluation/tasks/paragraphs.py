# SPDX-License-Identifier: Apache-2.0
"""Short questions over paragraphs about different things."""

from __future__ import annotations

import re
from typing import Any

from ..sample import Question, Sample
from .building import hide, random_of
from .prose import Prose, python_prose
from .words import ANIMALS, CITIES, COLOURS, DAYS, FOODS, INSTRUMENTS, NAMES, TREES, numbers

_QUESTIONS = 6


class _Topic:
    """A paragraph, and (question, beginning of the answer, slot) for some of its facts.

    The slots are filled with words of ``_VALUES`` and a number.
    """

    def __init__(self, text: str, *asked: tuple[str, str, str]) -> None:
        self.text = text
        self.asked = asked


_TOPICS = (
    _Topic(
        "The lighthouse stands on the point, where two ships were lost in one night. The lighthouse was built by "
        "{name}. The walls of the lighthouse are {colour}. The lighthouse has {number} steps, and on every {day} it "
        "is open to visitors.",
        ("Who built the lighthouse?", "The lighthouse was built by", "name"),
        ("What colour are the walls of the lighthouse?", "The walls of the lighthouse are", "colour"),
        ("How many steps does the lighthouse have?", "The number of steps of the lighthouse is", "number"),
    ),
    _Topic(
        "Once a year the circus comes to town and stays for a week. The star of the circus is a {animal} that can "
        "dance. The tent of the circus has {number} seats. The music of the circus is made by {name}, who plays the "
        "{instrument} with one hand.",
        ("Which animal is the star of the circus?", "The star of the circus is a", "animal"),
        ("How many seats does the tent of the circus have?", "The number of seats of the tent is", "number"),
        ("Who makes the music of the circus?", "The music of the circus is made by", "name"),
    ),
    _Topic(
        "The professor of history has taught for half her life. The professor was born in {city} and still speaks of "
        "its winters. The lecture of the professor is in room {number}. The professor eats {food} for lunch, except "
        "on {day}.",
        ("In which city was the professor born?", "The professor was born in", "city"),
        ("In which room is the lecture of the professor?", "The lecture of the professor is in room", "number"),
        ("What does the professor eat for lunch?", "For lunch the professor eats", "food"),
    ),
    _Topic(
        "Long before sunrise the express train leaves. The express train goes to {city} without a stop. The express "
        "train has {number} seats. The driver of the express train is called {name}, and the engine is {colour} from "
        "end to end.",
        ("To which city does the express train go?", "The express train goes to", "city"),
        ("How many seats does the express train have?", "The number of seats of the express train is", "number"),
        ("Who is the driver of the express train?", "The driver of the express train is", "name"),
    ),
    _Topic(
        "The restaurant by the canal is small but well known. The restaurant is famous for {food}. The best table of "
        "the restaurant is table {number}, next to the window. The restaurant is closed on {day}, when the cook "
        "visits his mother in {city}.",
        ("What is the restaurant famous for?", "The restaurant is famous for", "food"),
        ("Which is the best table of the restaurant?", "The best table of the restaurant is table", "number"),
        ("On which day is the restaurant closed?", "The restaurant is closed on", "day"),
    ),
    _Topic(
        "At the end of the road lies the farm. The farm belongs to {name}. The farm has {number} hens, which live "
        "behind the barn. The children of the farm ride on a {animal}, and in front of the house stands an old {tree} "
        "tree.",
        ("Who does the farm belong to?", "The farm belongs to", "name"),
        ("How many hens does the farm have?", "The number of hens of the farm is", "number"),
        ("Which animal do the children of the farm ride on?", "The children of the farm ride on a", "animal"),
    ),
    _Topic(
        "In spring the expedition set out for the north. The leader of the expedition was {name}, who kept a diary. "
        "The ship of the expedition came from {city}. The expedition had {number} sledges, and when all else was "
        "eaten there was still {food}.",
        ("Who was the leader of the expedition?", "The leader of the expedition was", "name"),
        ("From which city did the ship of the expedition come?", "The ship of the expedition came from", "city"),
        ("How many sledges did the expedition have?", "The number of sledges of the expedition was", "number"),
    ),
    _Topic(
        "The hotel is the tallest house of the street. The hotel has {number} rooms, all of them with a balcony. The "
        "doors of the hotel are {colour}. In the hall of the hotel stands a {instrument} that a guest from {city} "
        "left behind.",
        ("How many rooms does the hotel have?", "The number of rooms of the hotel is", "number"),
        ("What colour are the doors of the hotel?", "The doors of the hotel are", "colour"),
        ("Which instrument stands in the hall of the hotel?", "In the hall of the hotel stands a", "instrument"),
    ),
    _Topic(
        "The orchestra meets in the old gymnasium. The orchestra was founded by {name}. The orchestra practises on "
        "{day}. Last summer the orchestra played in {city} before {number} listeners, and the {instrument} was the "
        "loudest.",
        ("Who founded the orchestra?", "The orchestra was founded by", "name"),
        ("On which day does the orchestra practise?", "The orchestra practises on", "day"),
        ("In which city did the orchestra play last summer?", "Last summer the orchestra played in", "city"),
    ),
    _Topic(
        "The forest ranger knows every path of the valley. The cabin of the ranger is made of {tree} wood. The cabin "
        "of the ranger has the number {number}. The ranger keeps a {animal} as a pet, and on {day} she brings the "
        "mail down to the village.",
        ("Which wood is the cabin of the ranger made of?", "The cabin of the ranger is made of", "tree"),
        ("Which number does the cabin of the ranger have?", "The cabin of the ranger has the number", "number"),
        ("Which animal does the ranger keep as a pet?", "The ranger keeps a", "animal"),
    ),
)
_VALUES = {
    "name": NAMES,
    "colour": COLOURS,
    "day": DAYS,
    "animal": ANIMALS,
    "instrument": INSTRUMENTS,
    "city": CITIES,
    "food": FOODS,
    "tree": TREES,
}


def paragraph_qa(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Six paragraphs among prose, with one question about each."""
    rng = random_of("paragraph_qa", tokens, index, seed)
    pools = {kind: rng.sample(values, len(values)) for kind, values in _VALUES.items()}
    pools["number"] = numbers(rng, 2 * _QUESTIONS, digits=3)
    paragraphs: list[str] = []
    questions: list[Question] = []
    answers: list[str] = []
    for topic in rng.sample(_TOPICS, _QUESTIONS):
        values = {slot: pools[slot].pop() for slot in re.findall(r"{(\w+)}", topic.text)}
        paragraphs.append(topic.text.format(**values))
        text, lead, slot = rng.choice(topic.asked)
        questions.append(Question(text, (values[slot],), lead, max_tokens=24))
        answers += values.values()
    context = hide(tokenizer, tokens, rng, paragraphs, prose or python_prose(), answers, "paragraph_qa")
    return Sample("paragraph_qa", index, context, tuple(questions))
