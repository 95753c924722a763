# SPDX-License-Identifier: Apache-2.0
"""The repository itself: one version, licences, documents that say what is true."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hubkv_trt
from hubkv_trt import _library

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("python", "cpp", "plugin", "tests", "benchmarks", "build_scripts", "triton_repo", "docs", "examples")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and path.stat().st_size
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_source_names_its_licence(path: Path) -> None:
    assert "SPDX-License-Identifier: Apache-2.0" in "\n".join(path.read_text().splitlines()[:4])


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_left_for_later(path: Path) -> None:
    words = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3])
    assert not re.search(rf"\b({words})\b", path.read_text())


def test_the_version_has_one_place() -> None:
    version = hubkv_trt.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert _library.version() == version
    for file in ("pyproject.toml", "CMakeLists.txt"):
        assert not re.search(rf"\b{re.escape(version)}\b", (ROOT / file).read_text())


def test_every_direct_dependency_is_pinned() -> None:
    pins = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["eval"]]
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in wanted}  # type: ignore[index]
    assert names - pins == set()


def test_public_names_exist() -> None:
    for name in hubkv_trt.__all__:
        assert getattr(hubkv_trt, name) is not None
        assert name in dir(hubkv_trt)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hubkv_trt.nothing  # noqa: B018


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


@pytest.mark.parametrize("target", ["demo", "test", "serve", "lint", "format", "bench", "clean"])
def test_make_targets_parse(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "find:" not in done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_documented_commands_are_understood(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `hubkv ...` line of a shell example parses with the options that there are."""
    for block in code_blocks(document, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hubkv"]:
                module = importlib.import_module(f"hubkv_trt.commands.{words[1]}")
                parser = argparse.ArgumentParser()
                module.add_arguments(parser)
                parser.parse_args(words[2:])


def test_readme_example(demo_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of the README runs as it stands and prints the right answers."""
    (block,) = code_blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    code, dog = done.stdout.strip().splitlines()
    assert "7391" in code
    assert "Juniper" in dog


def test_the_demo_answers(demo_engine: Path) -> None:
    """The script of `make demo`: every answer from the compacted cache names the fact, and so does the dense one."""
    command = [sys.executable, str(ROOT / "build_scripts" / "demo.py"), "--engine", str(demo_engine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lacks" not in done.stdout
    kept = re.search(r"^KV rows kept +([\d,]+) +([\d,]+)$", done.stdout, flags=re.M)
    assert kept is not None
    dense, compacted = (int(number.replace(",", "")) for number in kept.groups())
    assert 0.2499 < compacted / dense < 0.2501


def test_build_script_is_the_command(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "build_scripts" / "build_engine.py")]
    model, output = str(tiny_model("llama")), tmp_path / "engine"
    subprocess.run([*script, "--model", model, "--output", str(output), "--quiet"], check=True, timeout=120)
    assert (output / "engine.json").is_file()
    done = subprocess.run([*script, "--model", model, "--output", str(output)], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "--force" in done.stderr
