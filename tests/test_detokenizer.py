# SPDX-License-Identifier: Apache-2.0
"""Text as it appears: no broken character, no lost space, stop texts wherever the tokens end."""

from __future__ import annotations

import pytest

from hubkv_trt.runtime.detokenizer import Detokenizer
from tiny_models import byte_tokenizer


def pushed(text: str, stop: tuple[str, ...] = (), chunk: int = 1) -> tuple[Detokenizer, list[str]]:
    """The pieces that a stream of a text's bytes gives, ``chunk`` tokens (bytes) at a time."""
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop)
    token_ids = tokenizer(text)["input_ids"]
    pieces = []
    for start in range(0, len(token_ids), chunk):
        detokenizer.push(token_ids[start : start + chunk])
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take(final=True))
    return detokenizer, pieces


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("text", ["plain", "é", "日本語のテキスト", "a😀b👩‍👧c", "a\tb\n\n  c ", "\u2423 \ufffd x"])
def test_streamed_text_has_no_broken_character(text: str, chunk: int) -> None:
    detokenizer, pieces = pushed(text, chunk=chunk)
    assert detokenizer.text == "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_dropped_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(tokenizer("ok 日")["input_ids"][:-1])
    detokenizer.finish()
    assert detokenizer.text == "ok "


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("END",), "one two "),
        (("d",), "one two EN"),
        (("three", "two"), "one "),
        (("日本",), "one two END "),
        (("nothing", "ENDE"), "one two END 日本 three"),
        (("ONE", "e t"), "on"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_stop_texts_across_token_borders(stop: tuple[str, ...], expected: str, chunk: int) -> None:
    text = "one two END 日本 three"
    text = text.replace("END", "ENd") if stop == ("d",) else text
    detokenizer, pieces = pushed(text, stop, chunk)
    assert detokenizer.text == "".join(pieces) == expected
    assert detokenizer.stopped == (expected != text)


def test_what_may_begin_a_stop_text_is_held_back_until_it_does_not() -> None:
    _, pieces = pushed("aXYbXYZc", ("XYZ",))
    assert pieces == ["a", "", "", "XYb", "", "", "", "", ""]
