# SPDX-License-Identifier: Apache-2.0
"""Contexts to train a gate on: pieces of the texts a user names, some with made-up facts, some in the chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..scorers.kvzip import chat_frame, encode

_CHARS_PER_TOKEN = 5  # more than any tokenizer needs for prose: what is over is cut off


@dataclass(frozen=True)
class Context:
    """One text for the teacher."""

    input_ids: tuple[int, ...]  # T tokens, the prefix included
    prefix_length: int  # tokens of the chat template before the text; 0 for bare text
    held_out: bool  # measured on, not trained on
    source: str  # the file it comes from

    @property
    def num_scored(self) -> int:
        """Tokens that the teacher scores."""
        return len(self.input_ids) - self.prefix_length


def read_texts(paths: Sequence[str | Path]) -> list[tuple[str, str]]:
    """(file name, text) of plain-text files.

    Raises:
        ValueError: a file is not there, not UTF-8, or empty.
    """
    if not paths:
        raise ValueError("texts: no file is named; give one or more plain-text files")
    texts = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"texts: {path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"texts: {path}: is not UTF-8 text (byte {error.start})") from error
        if not text.strip():
            raise ValueError(f"texts: {path}: is empty")
        texts.append((path.name, text))
    return texts


def build_contexts(
    texts: Sequence[tuple[str, str]],
    tokenizer: Any,
    num_tokens: int,
    context_tokens: int,
    held_out: float,
    facts: float,
    seed: int,
) -> list[Context]:
    """Cuts contexts out of the texts.

    Each file gives about the same number of tokens, in pieces of 0.5 to 1.5 times ``context_tokens`` spread over the
    whole file; the pieces nearest the end of each file are held out. Every second piece is put into the chat template,
    as a prompt would be.

    Args:
        texts: (name, text) of each file.
        tokenizer: of the model.
        num_tokens: of all contexts together, about; shorter texts give what they have.
        context_tokens: mean length of a context, >= 16.
        held_out: fraction of the contexts that is held out, in (0, 1).
        facts: fraction of the contexts with made-up facts (codes, records, lists) between their lines, in [0, 1]: what
            stands out in them is what questions ask for, and plain prose has little of it.
        seed: of all random choices.

    Raises:
        ValueError: an argument is out of range, or the texts are too short for one context to train on and one to
            measure.
    """
    for name, value, fits in (
        ("num_tokens", num_tokens, num_tokens >= 1),
        ("context_tokens", context_tokens, context_tokens >= 16),
        ("held_out", held_out, 0 < held_out < 1),
        ("facts", facts, 0 <= facts <= 1),
    ):
        if not fits:
            raise ValueError(f"{name}: {value!r} is out of range")
    rng = random.Random(seed)
    prefix = encode(tokenizer, chat_frame(tokenizer)[0])
    per_file = max(2, round(num_tokens / len(texts) / context_tokens))
    lengths = [round(context_tokens * (0.5 + (i + 0.5) / per_file)) for i in range(per_file)]
    contexts: list[Context] = []
    for name, text in texts:
        rng.shuffle(lengths)
        pieces = _pieces(text, lengths)
        num_held_out = max(1, round(held_out * len(pieces)))
        for i, (piece, length) in enumerate(pieces):
            with_facts = add_facts(piece, rng) if rng.random() < facts else piece
            before = prefix if len(contexts) % 2 else []
            ids = (*before, *encode(tokenizer, with_facts)[:length])
            contexts.append(Context(ids, len(before), i >= len(pieces) - num_held_out, name))
    contexts = [c for c in contexts if c.num_scored >= min(16, context_tokens)]
    if len({c.held_out for c in contexts}) < 2:
        raise ValueError("texts: too short for one context to train on and one to measure; give more text")
    return contexts


def _pieces(text: str, lengths: Sequence[int]) -> list[tuple[str, int]]:
    """(text, tokens at most): disjoint pieces spread over the text, each beginning at a line where one is near."""
    share = len(text) / len(lengths)
    pieces = []
    for i, length in enumerate(lengths):
        start, stop = int(i * share), int((i + 1) * share)
        line = text.find("\n", start, start + (stop - start) // 4) + 1 if i else start
        start = max(start, line)
        piece = text[start : min(stop, start + length * _CHARS_PER_TOKEN)].strip()
        if piece:
            pieces.append((piece, length))
    return pieces


_THINGS = (
    "archive",
    "boiler room",
    "garden gate",
    "north tower",
    "laboratory",
    "greenhouse",
    "server room",
    "old mill",
)
_COLOURS = ("blue", "green", "red", "white", "amber", "violet", "grey", "silver")
_PLACES = (
    "Lisbon",
    "Oslo",
    "Kyoto",
    "Quito",
    "Dakar",
    "Tromsø",
    "Perth",
    "Leipzig",
    "Cusco",
    "Malmö",
    "Galway",
    "Nara",
)
_FOODS = ("plum cake", "rye bread", "lentil soup", "goat cheese", "ginger tea", "apple wine", "fish stew", "honey")


_PEOPLE = ("Ines", "Tomas", "Yuki", "Amara", "Pavel", "Sofie", "Idris", "Greta", "Rafael", "Leila", "Mikko", "Dana")


def add_facts(text: str, rng: random.Random) -> str:
    """The text with two to eight made-up facts between its lines."""
    lines = text.split("\n")
    for _ in range(rng.randint(2, 8)):
        lines.insert(rng.randint(0, len(lines)), rng.choice(_KINDS)(rng))
    return "\n".join(lines)


def _sentence(rng: random.Random) -> str:
    thing, colour, place, food, person = (rng.choice(x) for x in (_THINGS, _COLOURS, _PLACES, _FOODS, _PEOPLE))
    number = rng.randint(100, 99999)
    return rng.choice((
        f"The access code of the {thing} is {number}.",
        f"The pass key is {number}. Remember it. {number} is the pass key.",
        f"The {colour} train to {place} leaves at {rng.randint(0, 23)}:{rng.randint(10, 59)} from platform 7.",
        f"In {place}, the {colour} {thing} was built in {rng.randint(1500, 2020)} and cost {number} crowns.",
        f"The favourite dish of the keeper of the {thing} in {place} is {food}.",
        f"The special magic number for {place} is: {number}.",
        f"{person} moved to {place} and keeps {number} jars of {food} in the {thing}.",
        f"{person} has a {colour} bicycle, and {rng.choice(_PEOPLE)} will call from {place} about the {food}.",
        f"{person}'s telephone number is {number}-{rng.randint(100, 999)}; ask for the {colour} key of the {thing}.",
    ))  # fmt: skip


def _record(rng: random.Random) -> str:
    return json.dumps({
        "id": _hex(rng), "city": rng.choice(_PLACES), "item": rng.choice(_FOODS),
        "count": rng.randint(1, 999), "colour": rng.choice(_COLOURS),
    })  # fmt: skip


def _list(rng: random.Random) -> str:
    keys = rng.sample(rng.choice((_PLACES, _FOODS, _PEOPLE, _THINGS)), 5)
    return "\n".join(f"{key}: {rng.randint(10, 9999)}" for key in keys)


def _mapping(rng: random.Random) -> str:
    value = rng.choice((_hex, lambda r: r.randint(1000, 999999), lambda r: r.choice(_PLACES)))
    return json.dumps({_hex(rng): value(rng) for _ in range(rng.randint(4, 16))}, indent=rng.choice((None, 1)))


def _table(rng: random.Random) -> str:
    rows = [(rng.choice(_PEOPLE), rng.choice(_PLACES), str(rng.randint(10, 9999))) for _ in range(rng.randint(4, 12))]
    separator = rng.choice((", ", " | "))
    return "\n".join(separator.join(row) for row in (("name", "city", "amount"), *rows))


def _assignments(rng: random.Random) -> str:
    names = [f"{rng.choice(_COLOURS)}_{i}" for i in range(rng.randint(3, 8))]
    return "\n".join(
        f"{name} = {rng.randint(10, 99999) if i == 0 or rng.random() < 0.5 else rng.choice(names[:i])}"
        for i, name in enumerate(names)
    )


def _hex(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"


_KINDS = (_sentence, _sentence, _sentence, _sentence, _record, _list, _mapping, _table, _assignments)
