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
        "The lighthouse on the point was built by {name} after two ships had been lost in one night. Its walls are "
        "painted {colour}, and {number} steps lead to the lamp. Visitors are welcome on every {day}.",
        ("Who built the lighthouse?", "The lighthouse was built by", "name"),
        ("What colour are the walls of the lighthouse?", "The walls of the lighthouse are", "colour"),
        ("How many steps lead to the lamp of the lighthouse?", "The number of steps to the lamp is", "number"),
    ),
    _Topic(
        "The circus comes to town once a year and stays for a week. Its star is a {animal} that can dance. The tent "
        "has room for {number} people, and the music is made by {name}, who plays the {instrument} with one hand.",
        ("Which animal is the star of the circus?", "The star of the circus is a", "animal"),
        ("How many people have room in the tent of the circus?", "The number of people in the tent is", "number"),
        ("Which instrument is played at the circus?", "The instrument played at the circus is the", "instrument"),
    ),
    _Topic(
        "The professor of history has taught for half her life. She was born in {city} and still speaks of its "
        "winters. Her lecture is on {day}, in room {number}, and for lunch she always has {food}.",
        ("In which city was the professor born?", "The professor was born in", "city"),
        ("In which room is the lecture of the professor?", "The lecture of the professor is in room", "number"),
        ("What does the professor have for lunch?", "For lunch the professor has", "food"),
    ),
    _Topic(
        "The express train leaves long before sunrise. It runs to {city} without a stop and carries {number} "
        "passengers when it is full. The driver is called {name}, and the engine is {colour} from end to end.",
        ("To which city does the express train run?", "The express train runs to", "city"),
        ("How many passengers does the express train carry?", "The number of passengers is", "number"),
        ("Who is the driver of the express train?", "The driver of the express train is", "name"),
    ),
    _Topic(
        "The restaurant by the canal is small but well known. The cook comes from {city} and is famous for {food}. A "
        "guest should ask for table {number}, next to the window. It is closed on {day}.",
        ("What is the cook of the restaurant famous for?", "The cook of the restaurant is famous for", "food"),
        ("Which table should a guest of the restaurant ask for?", "A guest should ask for table", "number"),
        ("On which day is the restaurant closed?", "The restaurant is closed on", "day"),
    ),
    _Topic(
        "The farm lies at the end of the road. In front of the house stands an old {tree} tree that was planted by "
        "{name}. The children of the farm ride on a {animal}, and there are {number} hens behind the barn.",
        ("Which tree stands in front of the farm?", "In front of the farm stands an old", "tree"),
        ("How many hens are there on the farm?", "The number of hens on the farm is", "number"),
        ("On what do the children of the farm ride?", "The children of the farm ride on a", "animal"),
    ),
    _Topic(
        "The expedition set out in spring with {number} sledges. It was led by {name}, who kept a diary. The ship "
        "that brought them had sailed from {city}, and when all else was eaten there was still {food}.",
        ("Who led the expedition?", "The expedition was led by", "name"),
        ("From which city had the ship of the expedition sailed?", "The ship had sailed from", "city"),
        ("With how many sledges did the expedition set out?", "The number of sledges was", "number"),
    ),
    _Topic(
        "The hotel has {number} rooms, all of them with a balcony. Its doors are {colour}, as the owner wished. In "
        "the hall a guest from {city} left a {instrument}, which nobody is allowed to touch.",
        ("How many rooms does the hotel have?", "The number of rooms of the hotel is", "number"),
        ("What colour are the doors of the hotel?", "The doors of the hotel are", "colour"),
        ("Which instrument was left in the hall of the hotel?", "In the hall of the hotel stands a", "instrument"),
    ),
    _Topic(
        "The orchestra meets in the old gymnasium on {day}. It was founded by {name}, and its youngest member plays "
        "the {instrument}. Last summer it travelled to {city} and played before {number} listeners.",
        ("Who founded the orchestra?", "The orchestra was founded by", "name"),
        ("To which city did the orchestra travel?", "The orchestra travelled to", "city"),
        ("What does the youngest member of the orchestra play?", "The youngest member plays the", "instrument"),
    ),
    _Topic(
        "The forest ranger knows every path of the valley. Her cabin is made of {tree} wood and stands at marker "
        "{number}. A tame {animal} sleeps at her door, and on {day} she brings the mail down to the village.",
        ("Of which wood is the cabin of the ranger made?", "The cabin of the ranger is made of", "tree"),
        ("At which marker stands the cabin of the ranger?", "The cabin of the ranger stands at marker", "number"),
        ("Which animal sleeps at the door of the ranger?", "At the door of the ranger sleeps a", "animal"),
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
    paragraphs, questions, answers = [], [], []
    for topic in rng.sample(_TOPICS, _QUESTIONS):
        values = {slot: pools[slot].pop() for slot in re.findall(r"{(\w+)}", topic.text)}
        paragraphs.append(topic.text.format(**values))
        text, lead, slot = rng.choice(topic.asked)
        questions.append(Question(text, (values[slot],), lead))
        answers += values.values()
    context = hide(tokenizer, tokens, rng, paragraphs, prose or python_prose(), answers, "paragraph_qa")
    return Sample("paragraph_qa", index, context, tuple(questions))
