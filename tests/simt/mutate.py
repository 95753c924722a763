# SPDX-License-Identifier: Apache-2.0
"""Removes each barrier of a kernel file in turn and tells whether the race build of a test case notices.

A kernel's test has a case: a function that gets the library, runs the kernel on a small input and raises where the
status or the result is wrong. ``remove_barriers(file, case)`` then answers one :class:`Mutant` per barrier; one that is
not caught has a barrier that is not needed, or a case that is too small to need it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .library import BUILD, CORE, ROOT, build

Case = Callable[[ctypes.CDLL], None]

_BARRIER = re.compile(r"\b__sync(?:threads(?:_or|_and|_count)?|warp)\b(?=\s*\()")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Mutant:
    """A barrier that was removed."""

    file: str
    line: int
    text: str  # "__syncwarp"
    caught: bool
    how: str  # the last line of what the case raised


@dataclass(frozen=True)
class _Edit:
    line: int
    text: str
    source: str


def _edits(source: str) -> Iterator[_Edit]:
    """The source without one barrier, for each barrier. A barrier with a result gives the thread's own predicate."""
    code = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    for match in _BARRIER.finditer(code):
        start = code.index("(", match.end())
        depth, end = 0, start
        while depth > 0 or end == start:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        left = f"int({source[start:end]} != 0)" if "_" in match[0][2:] else "((void) 0)"
        yield _Edit(code.count("\n", 0, match.start()) + 1, match[0], source[: match.start()] + left + source[end:])


def _output(entry: dict[str, str]) -> str:
    """The object file of a compilation, absolute; older CMake tells it in the command alone."""
    words = shlex.split(entry["command"])
    return str(Path(entry["directory"]) / words[words.index("-o") + 1])


def _build(edit: _Edit, number: int, file: Path, unit: Path, name: str, defines: tuple[str, ...]) -> Path:
    """Compiles the one translation unit with the edited file, and links it with the others of the race build."""
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    of_library = [f"/{part}.dir/" for part in (f"{name}_race_kernels", "simt_machine_race", "simt_status")]
    of_library += ["/simt_host.dir/"] if name == CORE else []
    entries = [entry for entry in entries if any(part in _output(entry) for part in of_library)]
    own = next(entry for entry in entries if Path(entry["file"]) == unit)
    others = [_output(entry) for entry in entries if entry is not own]

    folder = BUILD / "mutants" / f"{name}-{unit.stem}-{file.name}-{number}"
    edited = folder / (file.relative_to(ROOT / "cpp") if file.is_relative_to(ROOT / "cpp") else file.name)
    edited.parent.mkdir(parents=True, exist_ok=True)
    edited.write_text(f'#line 1 "{file}"\n{edit.source}')
    command = shlex.split(own["command"])
    command[command.index("-o") + 1] = str(folder / "mutant.o")
    if file == unit:
        command[command.index(own["file"])] = str(edited)
    command[1:1] = [f"-I{folder}", f"-iquote{file.parent}", *(f"-D{define}" for define in defines)]
    library = folder / "mutant.so"
    link = [command[0], "-shared", "-o", str(library), str(folder / "mutant.o"), *others, "-pthread", "-ldl"]
    for step in (command, link):
        done = subprocess.run(step, cwd=own["directory"], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{file}:{edit.line} without {edit.text} does not build:\n{done.stderr[-4000:]}")
    return library


def _load(file: Path, name: str) -> ctypes.CDLL:
    if name != CORE:
        return ctypes.CDLL(str(file))
    from hubkv_trt import _library

    return _library.load(file)


def _child(file: Path, name: str, case: Case, answer: multiprocessing.SimpleQueue[str]) -> None:
    try:
        case(_load(file, name))
        answer.put("")
    except BaseException as error:
        answer.put(" ".join(f"{type(error).__name__}: {error}".split())[:400])


def _run(file: Path, name: str, case: Case, timeout: float) -> str:
    """How the case failed on this library, "" where it passed. A process of its own: a mutant may never end."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_child, args=(file, name, case, answer))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return f"no end within {timeout} s"
    return answer.get() if not answer.empty() else f"ended with status {process.exitcode}"


def remove_barriers(
    file: Path,
    case: Case,
    *,
    unit: Path | None = None,
    name: str = CORE,
    defines: tuple[str, ...] = (),
    timeout: float = 60,
) -> list[Mutant]:
    """Tries the case on the race build of ``file`` without its first barrier, its second, and so on.

    Args:
        file: a .cu file, or a header under cpp/ that ``unit`` includes by its path from cpp/.
        case: gets the library (of the core: with the prototypes of the C ABI), raises where something is wrong.
        unit: the .cu file to compile; ``file`` itself by default.
        name: the library, ``CORE`` or ``FIXTURES``.
        defines: macros for this compilation alone, for example to leave out specialisations that the case never runs.
        timeout: seconds; a mutant that runs longer counts as caught.

    Raises:
        RuntimeError: the case fails on the right kernel, or a mutant does not compile.
    """
    file = file.resolve()
    unit = unit.resolve() if unit is not None else file
    right = _run(build("race", name), name, case, timeout)
    if right:
        raise RuntimeError(f"the case fails on the right kernel: {right}")
    edits = list(_edits(file.read_text()))

    def make(number: int) -> Path:
        return _build(edits[number], number, file, unit, name, defines)

    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(make, range(len(edits))))
    results = []
    for edit, library in zip(edits, libraries, strict=True):
        how = _run(library, name, case, timeout)
        results.append(Mutant(file.name, edit.line, edit.text, how != "", how))
        shutil.rmtree(library.parent)
    return results
