# SPDX-License-Identifier: Apache-2.0
"""Values looked up by their key in lists of one form."""

from __future__ import annotations

from typing import Any

from ..sample import Question, Sample
from .building import hide, random_of
from .prose import Prose, python_prose
from .words import GOODS, numbers

_QUESTIONS = 6


def key_value(tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample:
    """Lists of stock, three of four lines each; half of the lines are asked for, the others distract."""
    rng = random_of("key_value", tokens, index, seed)
    keys, values = rng.sample(GOODS, 12), numbers(rng, 12, digits=3)
    records = list(zip(keys, values, strict=True))
    blocks = ["\n".join(f"Number of {k}: {v}" for k, v in records[i : i + 4]) for i in range(0, 12, 4)]
    context = hide(tokenizer, tokens, rng, blocks, prose or python_prose(), values, "key_value")
    questions = tuple(
        Question(f"What is the number of {k} in the list?", (v,), f"The number of {k} in the list is")
        for k, v in rng.sample(records, _QUESTIONS)
    )
    return Sample("key_value", index, context, questions)
