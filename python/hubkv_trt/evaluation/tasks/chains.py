# SPDX-License-Identifier: Apache-2.0
"""Answers that take several lines of the text: assignments to follow (RULER's variable tracking), facts to join."""

from __future__ import annotations

import itertools
from typing import Any

from ..sample import Question, Sample
from .building import hide, random_of
from .prose import Prose, python_prose
from .words import CITIES, COMMON, NAMES, PLACES, numbers

_QUESTIONS = 6
_CHAINS = 2
_HOPS = 3


def variable_tracking(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Two chains of a number and three hops from variable to variable, each in order and mixed with the other.

    Asked for: the value behind one, two and three hops, and all variables of a chain's value in place of the first.
    """
    rng = random_of("variable_tracking", tokens, index, seed)
    names = [w.upper() for w in rng.sample(COMMON, _CHAINS * (_HOPS + 1))]
    chains = [names[i::_CHAINS] for i in range(_CHAINS)]
    values = numbers(rng, _CHAINS)
    lines = [
        [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    turns = [i for i in range(_CHAINS) for _ in range(_HOPS + 1)]
    rng.shuffle(turns)
    needles = [lines[i].pop(0) for i in turns]
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), [*values, *names], "variable_tracking")
    questions = []
    for chain, value in zip(chains, values, strict=True):
        questions += [
            Question(f"What is the value of the variable {v}?", (value,), f"The value of the variable {v} is")
            for v in chain[2:]
        ]
        questions.append(
            Question(
                f"Which {len(chain)} variables have the value {value}?",
                tuple(chain),
                f"The variables that have the value {value} are",
                metric="all",
                max_tokens=48,
            )
        )
    return Sample("variable_tracking", index, context, tuple(questions))


def multi_hop(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Who works where, and where that is, for six people. Asked for: the city of a person's work."""
    rng = random_of("multi_hop", tokens, index, seed)
    people, places, cities = (rng.sample(words, _QUESTIONS) for words in (NAMES, PLACES, CITIES))
    needles = [f"{n} works at the {p}." for n, p in zip(people, places, strict=True)]
    needles += [f"The {p} is in the city of {c}." for p, c in zip(places, cities, strict=True)]
    rng.shuffle(needles)
    context = hide(tokenizer, tokens, rng, needles, prose or python_prose(), [*people, *cities], "multi_hop")
    questions = tuple(
        Question(f"In which city does {n} work?", (c,), f"{n} works in the city of")
        for n, c in zip(people, cities, strict=True)
    )
    return Sample("multi_hop", index, context, questions)
