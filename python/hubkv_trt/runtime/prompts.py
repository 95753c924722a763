# SPDX-License-Identifier: Apache-2.0
"""From what a user writes to token ids."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, str]]"
"""A text, token ids, or the messages of a chat (``{"role": ..., "content": ...}``)."""

_KNOWN_WORDS = 256  # lists of words whose token ids are kept
_MARK = "\u2403hubkv\u2403"  # stands for the end of a document while a chat template is rendered


def is_messages(prompt: Any) -> bool:
    """Whether it is a list of chat messages."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list.

    Raises:
        ValueError: there is none.
    """
    if isinstance(prompts, str) or is_messages(prompts):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor of token ids
        prompts = prompts.tolist()
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts: {prompts!r} is not a text, a list of token ids, chat messages, or a list of those")
    if not prompts:
        raise ValueError("prompts: the list is empty")
    return [list(prompts)] if isinstance(prompts[0], (int, np.integer)) else list(prompts)


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """A value for each prompt: a list is taken as it is, anything else holds for all.

    Raises:
        ValueError: the list has another length.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} values for {count} prompts")
    return list(value)


class Encoder:
    """Texts, chats and token ids to int32 [n].

    Args:
        tokenizer: of transformers.
        vocab_size: V of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # tokenizers are not made for two threads
        self._words: dict[tuple[str, ...], list[tuple[int, ...]]] = {}

    def prompt(self, prompt: Prompt, chat: bool) -> np.ndarray:
        """A whole prompt. ``chat`` makes a text the user's turn of a chat.

        Raises:
            ValueError: it is empty, holds an id outside the vocabulary, or there is no chat template.
        """
        if is_messages(prompt) or (chat and isinstance(prompt, str)):
            return self._text(self._render(_messages(prompt)), special=False)
        if isinstance(prompt, str):
            return self._text(prompt, special=True)
        return self._ids(prompt)

    def document(self, document: Prompt, chat: bool) -> tuple[np.ndarray, str]:
        """A document that questions follow, and the text that ends each question's turn.

        In a chat the document is the beginning of the last message's content: what the template puts up to its end
        becomes the document's tokens, what it puts behind is given back to be appended to each question, so that
        document + question + that text is the text of the chat with both in one turn.
        """
        if not is_messages(document) and not (chat and isinstance(document, str)):
            return self.prompt(document, chat=False), ""
        messages = _messages(document)
        last = {**messages[-1], "content": messages[-1]["content"] + _MARK}
        parts = self._render([*messages[:-1], last]).split(_MARK)
        if len(parts) != 2:
            raise ValueError("document: the chat template does not show the last message's content exactly once")
        return self._text(parts[0], special=False), parts[1]

    def question(self, question: Prompt, ending: str) -> np.ndarray:
        """What follows a document."""
        if is_messages(question):
            raise ValueError("prompt: a question over a context is a text or token ids, also in a chat")
        if isinstance(question, str):
            if not question:
                raise ValueError("prompt: '' is empty")
            return self._text(question + ending, special=False)
        ids = self._ids(question)
        return np.concatenate([ids, self._text(ending, special=False)]) if ending else ids

    def words(self, name: str, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Token ids of each word as it stands and with a space in front; ``name`` is the field, for errors. What was
        asked lately is known without the tokenizer."""
        found = self._words.get(words)
        if found is None:
            try:
                texts = [text for word in words for text in (word, " " + word)]
                found = list(dict.fromkeys(tuple(self._text(text, special=False).tolist()) for text in texts))
            except ValueError as error:
                raise ValueError(str(error).replace("prompt", name, 1)) from None
            with self._lock:
                self._words[words] = found
                while len(self._words) > _KNOWN_WORDS:
                    del self._words[next(iter(self._words))]
        return found

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template raises is about these messages
            raise ValueError(f"chat: the messages cannot be rendered ({type(error).__name__}: {error})") from error

    def _text(self, text: str, special: bool) -> np.ndarray:
        try:
            with self._lock:
                ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] if text else []
        except Exception as error:  # lone surrogates (undecodable bytes of a command line), a tokenizer without <unk>
            raise ValueError(f"prompt: {text[:40]!r} cannot be tokenized ({type(error).__name__}: {error})") from error
        if not ids:
            raise ValueError(f"prompt: {text!r} is empty")
        return self._ids(ids)

    def _ids(self, ids: Any) -> np.ndarray:
        if not isinstance(ids, Iterable):
            raise ValueError(f"prompt: {ids!r} is not a text, a list of token ids, or chat messages")
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not values:
            raise ValueError("prompt: the list of token ids is empty")
        for index, value in enumerate(values):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise ValueError(f"prompt: token {index}: {value!r} is not a token id")
        array = np.asarray(values, dtype=np.int64)
        bad = np.flatnonzero((array < 0) | (array >= self._vocab_size))
        if bad.size:
            raise ValueError(
                f"prompt: token {bad[0]}: id {array[bad[0]]} is not in the vocabulary, 0..{self._vocab_size - 1}"
            )
        return array.astype(np.int32)


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    """Chat messages, checked; a text is one turn of the user."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt: '' is empty")
        return [{"role": "user", "content": prompt}]
    messages: list[dict[str, str]] = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"messages: message {index} has no text as role and content: {message!r}")
        messages.append(dict(message))
    return messages
