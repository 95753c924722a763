# SPDX-License-Identifier: Apache-2.0
"""Tasks, generated offline: a sample depends on (task, tokens, index, seed) and the prose, on nothing else.

sample = TASKS["passkey"](tokenizer, 1000, index=0, seed=1)

The context has ``tokens`` tokens of the tokenizer (chat template apart) or a few less, and every answer stands in it as
often as the task says: once, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..sample import Sample
from .chains import multi_hop, variable_tracking
from .frequencies import common_words, frequent_words
from .needles import multi_key, multi_value, passkey
from .paragraphs import paragraph_qa
from .prose import Prose, python_prose, read_prose
from .records import key_value
from .text import continuation, reconstruction

__all__ = ["TASKS", "Prose", "Task", "python_prose", "read_prose"]


class Task(Protocol):
    """Makes a sample; ``prose`` is ``python_prose()`` where none is given.

    Raises:
        ValueError: ``tokens`` is too short for the task, or the prose for as many samples.
    """

    def __call__(self, tokenizer: Any, tokens: int, index: int, seed: int, prose: Prose | None = None) -> Sample: ...


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "passkey": passkey,
        "multi_key": multi_key,
        "multi_value": multi_value,
        "key_value": key_value,
        "variable_tracking": variable_tracking,
        "multi_hop": multi_hop,
        "common_words": common_words,
        "frequent_words": frequent_words,
        "paragraph_qa": paragraph_qa,
        "continuation": continuation,
        "reconstruction": reconstruction,
    }
)
