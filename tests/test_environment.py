# SPDX-License-Identifier: Apache-2.0
"""What an import sets in the environment before torch reads it, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hubkv_trt

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")
CODE = f"""
import json, os, sys, hubkv_trt
print(json.dumps([*map(os.environ.get, {NAMES}), 'torch' in sys.modules]))
"""


def environment(code: str = CODE, **variables: str) -> list[str | bool | None]:
    """The variables after an import, and whether torch was imported."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, check=True)
    found: list[str | bool | None] = json.loads(done.stdout)
    return found


def test_the_import_sets_how_threads_wait_and_does_not_import_torch() -> None:
    gnu = any(Path(torch.__file__).parent.glob("lib/libgomp*"))
    assert environment() == ["1000", "active" if gnu else None, "1", False]


def test_what_the_user_set_stays() -> None:
    values = dict(zip(NAMES, ("7", "passive", "0"), strict=True))
    assert environment(**values)[:3] == ["7", "passive", "0"]


def test_after_torch_nothing_is_set() -> None:
    assert environment("import torch" + CODE) == [None, None, None, True]


@pytest.mark.parametrize("installed", [True, False])
def test_where_torch_brings_another_openmp_its_waiting_stays(installed: bool, tmp_path: Path) -> None:
    if installed:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("")
    folders = [str(tmp_path), str(Path(hubkv_trt.__file__).parents[1])]
    paths = f"import sys; sys.path[:] = [p for p in sys.path if not p.endswith('site-packages')] + {folders}"
    assert environment(paths + CODE) == ["1000", None, "1", False]
