# SPDX-License-Identifier: Apache-2.0
"""Real English text that is there without a download: what the tasks hide their facts in, and what they continue.

The standard library of the running Python is documented in prose (PSF licence), and is read where it is installed:
docstrings of ``_MODULES``, and those topics of ``pydoc_data.topics`` whose name's sha256 begins with an odd byte. The
even topics are left to training texts, as are the other modules and the manual; a paragraph that shares twelve words
in a row with an even topic is left out. So the text, and every sample made from it, depends on Python's version;
``Prose.digest`` says whether two runs read the same.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ...training.corpus import read_texts

_MODULES = (
    "ast asyncio/locks asyncio/protocols asyncio/tasks asyncio/transports base64 bdb bz2 cmd code codecs "
    "concurrent/futures/_base concurrent/futures/process configparser contextlib _pydecimal difflib doctest "
    "email/_policybase email/charset email/generator email/header email/headerregistry email/message email/parser "
    "email/utils filecmp fileinput ftplib functools getopt graphlib gzip http/client http/cookiejar http/cookies "
    "http/server inspect ipaddress json/__init__ json/decoder json/encoder linecache lzma mimetypes os pathlib "
    "pkgutil platform posixpath pstats pyclbr _pyio queue random sched shelve shutil site smtplib socket socketserver "
    "ssl tarfile tempfile threading timeit tokenize traceback turtle typing unittest/__init__ unittest/case "
    "unittest/loader unittest/mock urllib/parse urllib/request uuid wave weakref wsgiref/handlers "
    "xml/etree/ElementTree xml/sax/handler xml/sax/xmlreader xmlrpc/server zipimport "
)  # of the standard library; those that a version lacks are passed over

_RUN = 12
_MIN_WORDS = 12
_MAX_WORDS = 90  # of a paragraph; longer ones are split at a sentence


def training_topic(name: str) -> bool:
    """Whether a topic of ``pydoc_data.topics`` is left to training texts, and not evaluated on."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


@dataclass(frozen=True, eq=False)
class Prose:
    """Paragraphs, each on one line, none twice, in the order of their sources."""

    paragraphs: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 of the text, 16 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.paragraphs).encode()).hexdigest()[:16]

    def starts(self, tokenizer: Any) -> tuple[int, ...]:
        """Tokens before each paragraph, and of all of them: one more number than paragraphs."""
        return _starts(self, tokenizer)

    def from_paragraph(self, first: int) -> Iterator[str]:
        """All paragraphs once, beginning with one and going on at the front behind the last."""
        for i in range(len(self.paragraphs)):
            yield self.paragraphs[(first + i) % len(self.paragraphs)]


@lru_cache(maxsize=4)
def _starts(prose: Prose, tokenizer: Any) -> tuple[int, ...]:
    ids = tokenizer([p + "\n" for p in prose.paragraphs], add_special_tokens=False, verbose=False)["input_ids"]
    starts = [0]
    for each in ids:
        starts.append(starts[-1] + len(each))
    return tuple(starts)


@lru_cache(maxsize=1)
def python_prose() -> Prose:
    """What the standard library says about itself (see above); read once.

    Raises:
        ValueError: this Python comes without its sources.
    """
    from pydoc_data.topics import topics

    library = Path(os.__file__).parent
    documents = [
        docstring
        for path in (library / f"{name}.py" for name in _MODULES.split())
        if path.is_file()
        for docstring in _docstrings(path.read_text(encoding="utf-8"))
    ]
    documents += [text for name, text in sorted(topics.items()) if not training_topic(name)]
    left_out = {run for name, text in topics.items() if training_topic(name) for run in runs(text)}
    paragraphs = tuple(p for p in _paragraphs(documents) if left_out.isdisjoint(runs(p)))
    if not paragraphs:
        raise ValueError(f"text: {library} holds no sources of the standard library to read; name files of your own")
    return Prose(paragraphs)


def read_prose(paths: Sequence[str | Path]) -> Prose:
    """The text of the user's own files (UTF-8, paragraphs with an empty line between them).

    Raises:
        ValueError: a file cannot be read, or there is no paragraph of prose in them.
    """
    paragraphs = tuple(_paragraphs(text for _, text in read_texts(paths)))
    if not paragraphs:
        raise ValueError(
            f"text: {', '.join(map(str, paths))}: no paragraph reads as prose (12 words and more, with a full stop)"
        )
    return Prose(paragraphs)


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every twelve words in a row, without case and punctuation: a text that shares one quotes the other."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return (tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))


def sentences(text: str) -> list[str]:
    """Split where a full stop is followed by a capital letter; what stands between two of them is kept."""
    return re.split(r"(?<=[\w)'\"][.!?])(?<!\be\.g\.)(?<!\bi\.e\.) (?=[A-Z])", text)


def _docstrings(source: str) -> Iterator[str]:
    """In the order of the source."""

    def within(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
        yield ast.get_docstring(node) or ""
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from within(child)

    return within(ast.parse(source))


def _paragraphs(documents: Iterable[str]) -> Iterator[str]:
    """Paragraphs of prose, unwrapped, each once: no code, tables, signatures or headings."""
    seen = set()
    for document in documents:
        for block in re.split(r"\n\s*\n", document):
            paragraph = " ".join(re.sub(r"``|(?<!\w)[*](?=\w)|(?<=\w)[*](?!\w)", "", block).split())
            if _is_prose(paragraph):
                for part in _split(paragraph):
                    if part not in seen and len(part.split()) >= _MIN_WORDS:
                        seen.add(part)
                        yield part


def _is_prose(paragraph: str) -> bool:
    if (
        len(paragraph.split()) < _MIN_WORDS
        or not paragraph[0].isupper()
        or paragraph.isupper()
        or paragraph[-1] not in ".:!?"
    ):
        return False
    return sum(c.isalpha() or c in " ,.'" for c in paragraph) / len(paragraph) > 0.92


def _split(paragraph: str) -> Iterator[str]:
    """Parts of whole sentences, at most ``_MAX_WORDS`` words each. A longer sentence is a table, and left out."""
    words: list[str] = []
    for sentence in (each.split() for each in sentences(paragraph)):
        if len(words) + len(sentence) > _MAX_WORDS:
            yield " ".join(words)
            words = []
        if len(sentence) <= _MAX_WORDS:
            words += sentence
    yield " ".join(words)
