#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collects the texts that the demo model's gate was trained on: documentation and books that Debian packages.

Nothing is fetched: the files are read where the packages of python/hubkv_trt/gates/MODEL_CARD.md put them. The same
packages give the same texts.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import pydoc_data.topics
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DOC = Path("/usr/share/doc")
CHAPTERS = (
    "Genesis 37:1-41:57",
    "1Samuel 16:1-20:42",
    "Luke 1:1-8:56",
    "Esther 1:1-5:14",
    "Proverbs 10:1-14:35",
    "Acts 27:1-28:31",
)


def read(*paths: str | Path) -> str:
    """Plain or gzipped text files, one after the other."""
    parts = []
    for path in map(Path, paths):
        data = path.read_bytes()
        parts.append((gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8"))
    return "\n".join(parts)


def bible() -> str:
    """Chapters of the King James Bible without the verses' numbers."""
    parts = []
    for chapters in CHAPTERS:
        verses = subprocess.run(["bible", "-f", chapters], check=True, capture_output=True, text=True).stdout
        parts.append(re.sub(r"(?m)^\w+:\d+ ", "", verses))
    return "\n".join(parts)


def pydoc_topics() -> str:
    """Topics of Python's help() whose name's SHA-256 begins with an even byte: the others are left to evaluations."""
    names = [n for n in sorted(pydoc_data.topics.topics) if hashlib.sha256(n.encode()).digest()[0] % 2 == 0]
    return "\n\n".join(pydoc_data.topics.topics[name] for name in names)


def page_text(page: str) -> str:
    """The words of an HTML page."""
    page = re.sub(r"<script.*?</script>|<style.*?</style>|<head>.*?</head>", "", page, flags=re.S)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", page)))


def debian_history() -> str:
    """The chapters of A Brief History of Debian."""
    names = ("intro", "leaders", "releases", "detailed", "manifesto")
    return "\n".join(page_text(read(DOC / f"debian-history/docs/{name}.en.html")) for name in names)


def perl() -> str:
    """Perl's questions and answers without the marks of its format."""
    pod = read(*(f"/usr/share/perl/5.36/pod/perlfaq{i}.pod" for i in range(2, 7)))
    return re.sub(r"[BCEFILX]<([^<>]*)>", r"\1", re.sub(r"(?m)^=\w+ ?", "", pod))


TEXTS: dict[str, Callable[[], str]] = {
    "bible": bible,
    "jargon": lambda: read(DOC / "jargon-text/jargon.txt.gz"),
    "python-tutorial": lambda: read(
        *sorted((DOC / "python3.11/html/_sources/tutorial").glob("*.rst.txt")),
        *sorted((DOC / "python3.11/html/_sources/howto").glob("*.rst.txt")),
    ),
    "node": lambda: read(*(DOC / f"nodejs/api/{name}.md.gz" for name in ("fs", "stream", "events"))),
    "debian-faq": lambda: read(DOC / "debian/FAQ/debian-faq.en.txt.gz"),
    "pydoc-topics": pydoc_topics,
    "debian-policy": lambda: read(DOC / "debian-policy/policy.txt.gz"),
    "perl-faq": perl,
    "debian-history": debian_history,
    "git-releases": lambda: read(*(DOC / f"git/RelNotes/2.{minor}.0.txt" for minor in range(30, 40))),
    "developers-reference": lambda: read("/usr/share/developers-reference/developers-reference.txt.gz"),
    "licences": lambda: read(*(f"/usr/share/common-licenses/{name}" for name in ("GPL-3", "MPL-2.0", "CC0-1.0"))),
    "python-library": lambda: read(
        *(f"/usr/lib/python3.11/{name}.py" for name in ("argparse", "statistics", "textwrap", "heapq", "csv"))
    ),
}
"""Name -> text, in the order of the training."""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="gets a .txt file for each text")
    folder = p.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(TEXTS.items(), 1):
        try:
            content = text()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"gate_texts: {name}: {error}; install the packages of the model card", file=sys.stderr)
            return 1
        path = folder / f"{number:02d}-{name}.txt"
        path.write_text(content, encoding="utf-8")
        print(f"{path}  {len(content)} characters  sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
