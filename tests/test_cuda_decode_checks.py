# SPDX-License-Identifier: Apache-2.0
"""The kernels of the decoding stages under sanitizers, with threads in several orders, and without each of their
barriers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import test_calibrate_top_p
import test_held_out_loss
import test_merge
import test_rewrite
import test_score_window
import test_select_ragged
from decoding_cache import decoding_cache
from on_device import emulated
from simt.library import ROOT, load, run_tests_under_asan
from simt.mutate import remove_barriers

HERE = Path(__file__).parent


def score_case(library: ctypes.CDLL) -> None:
    """Several tiles a block, several parts of the queries; every score."""
    decoding = decoding_cache(rows=40, tail=150, tail_tokens=140, num_layers=1, head_dim=8, row_bias=True)
    with emulated(library):
        for score in test_score_window.SCORES:
            test_score_window.check(decoding, decoding.queries(9, 3), score)


def loss_case(library: ctypes.CDLL) -> None:
    """Several blocks a head and tiles a block, several parts of the queries."""
    decoding = decoding_cache(rows=100, tail=260, tail_tokens=240, num_layers=1, head_dim=8, row_bias=True)
    ranking = torch.arange(decoding.num_candidates) % 37 * 0.4
    with emulated(library):
        test_held_out_loss.check(decoding, decoding.queries(9, 3), ranking)


def calibrate_case(library: ctypes.CDLL) -> None:
    sizes = [300, 40]
    raw = test_calibrate_top_p.logits(sizes)
    transformed = test_calibrate_top_p.pooled(raw, sizes, 5)
    with emulated(library):
        test_calibrate_top_p.both(raw, transformed, sizes, p=0.8, sink_tokens=4, layer_rows=50)


def select_case(library: ctypes.CDLL) -> None:
    """Ties at the threshold, over several rounds of a block."""
    sizes = [700, 0, 300]
    scores = np.random.default_rng(0).integers(0, 9, 1000) / 8
    with emulated(library):
        test_select_ragged.check(scores, np.arange(1000), sizes, [333, 0, 200], 533, 4)


def rewrite_case(library: ctypes.CDLL) -> None:
    with emulated(library):
        test_rewrite.test_equals_oracle(test_rewrite.DTYPES[1], 40, True)


def merge_case(library: ctypes.CDLL) -> None:
    """More members than a block looks up at once."""
    decoding = decoding_cache(rows=100, tail=300, tail_tokens=288, num_layers=1, num_kv_heads=1, head_dim=24)
    with emulated(library):
        test_merge.check(decoding, 0.1, 2)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_the_order_of_threads_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SEED", str(seed))
    for case in (score_case, loss_case, calibrate_case, select_case, rewrite_case, merge_case):
        case(load("plain"))


def test_sanitizers_find_nothing() -> None:
    done = run_tests_under_asan(
        HERE / "test_cuda_decode.py",
        "equals_oracle and 40 or alone or windows_and or wrong or missing or outside or budget or equal_values",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


BARRIERS = [
    ("score_window/score_window.cu", score_case, 1),
    ("score_window/window_tile.h", score_case, 3),
    ("score_window/score_rkv.h", score_case, 5),
    ("held_out_loss/held_out_loss.cu", loss_case, 3),
    ("calibrate_top_p/calibrate_top_p.cu", calibrate_case, 3),
    ("select_ragged/select_ragged.cu", select_case, 4),
    ("merge/merge.cu", merge_case, 3),
]


@pytest.mark.parametrize(("file", "case", "barriers"), BARRIERS)
def test_barriers_are_needed(file: str, case: Callable[[ctypes.CDLL], None], barriers: int) -> None:
    stage, _, _ = file.partition("/")
    mutants = remove_barriers(ROOT / "cpp" / file, case, unit=ROOT / f"cpp/{stage}/{stage}.cu")
    assert len(mutants) == barriers
    for mutant in mutants:
        assert mutant.caught, mutant


def test_no_barrier_is_left_out() -> None:
    listed = {file for file, *_ in BARRIERS}
    for stage in ("score_window", "held_out_loss", "calibrate_top_p", "select_ragged", "rewrite", "merge"):
        for path in (ROOT / "cpp" / stage).iterdir():
            assert ("__sync" in path.read_text()) == (f"{stage}/{path.name}" in listed), path
