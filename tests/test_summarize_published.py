# SPDX-License-Identifier: Apache-2.0
"""The published summarisation: each step against its definition, the protocols, the cases and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hubkv_trt.cli import main
from hubkv_trt.engine.directory import load_engine
from hubkv_trt.runtime.llm import LLM
from hubkv_trt.summarize import collect_attention, describe, model_heads, run, synthetic_heads
from hubkv_trt.summarize.entropy import best, token_statistics
from hubkv_trt.summarize.heads import EMPTY, Heads, attend
from hubkv_trt.summarize.least_squares import least_squares, low_rank_rows
from hubkv_trt.summarize.methods import Target, hae, top_k
from hubkv_trt.summarize.protocol import Protocol, evaluate
from hubkv_trt.summarize.stream import stored_rows

Make = Callable[..., Path]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_queries", [40, 8, 3])
def test_least_squares_is_the_pseudoinverse(num_queries: int) -> None:
    """More queries than dimensions, as many, and fewer; without a ridge, in float64."""
    q, y = random(3, num_queries, 8), random(3, num_queries, 8, seed=1)
    expected = torch.linalg.pinv(q.double()) @ y.double()
    torch.testing.assert_close(least_squares(q, y, ridge=0.0).double(), expected, atol=1e-4, rtol=1e-4)
    ridged = least_squares(q, y, ridge=0.1)
    assert ridged.norm() < expected.norm()


def test_least_squares_of_degenerate_queries() -> None:
    q = random(1, 6, 8).expand(2, 6, 8).clone()
    q[0] = 0
    q[1] = q[1, :1]  # rank 1
    w = least_squares(q, random(2, 6, 8, seed=1))
    assert w[0].abs().max() == 0
    assert bool(w.isfinite().all()) and int(torch.linalg.matrix_rank(w[1])) == 1


def test_rows_of_a_map_are_its_best_approximation() -> None:
    w = random(2, 8, 8)
    for rank in (1, 3, 8):
        k, v = low_rank_rows(w, rank)
        assert k.shape == v.shape == (2, rank, 8)
        missed = torch.linalg.svdvals(w)[:, rank:].square().sum(-1)
        torch.testing.assert_close((w - k.mT @ v).square().sum((1, 2)), missed, atol=1e-4, rtol=1e-4)


def test_attention_against_float64() -> None:
    q, k, v, bias = random(2, 5, 8), random(2, 7, 8, seed=1), random(2, 7, 8, seed=2), random(2, 7, seed=3)
    bias[:, 3] = EMPTY
    out, log_mass = attend(q, k, v, 0.5, bias)
    found = 0.5 * q.double() @ k.double().mT + bias.double().unsqueeze(1)
    torch.testing.assert_close(out.double(), found.softmax(-1) @ v.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_mass.double(), found.logsumexp(-1), atol=1e-5, rtol=1e-5)
    nothing, mass = attend(q, k[:, :0], v[:, :0], 0.5)
    assert nothing.abs().max() == 0 and bool((mass == -math.inf).all())


def test_entropy_and_importance_of_known_attention() -> None:
    keys = torch.eye(4).unsqueeze(0)
    queries = torch.stack((torch.zeros(4, 4), 1e4 * torch.eye(4)))
    heads = Heads("known", queries, queries, keys.expand(2, 4, 4), keys.expand(2, 4, 4), 1.0, False)
    found = token_statistics(heads)
    torch.testing.assert_close(found.entropy, torch.tensor([[math.log(4)] * 4, [0.0] * 4]))
    torch.testing.assert_close(found.importance, torch.ones(2, 4))
    causal = token_statistics(Heads("causal", queries[:1], queries[:1], keys, keys, 1.0, True))
    torch.testing.assert_close(causal.entropy[0], torch.tensor([1.0, 2.0, 3.0, 4.0]).log())
    torch.testing.assert_close(causal.importance[0], torch.tensor([25 / 12, 13 / 12, 7 / 12, 1 / 4]))


def test_best_are_the_largest_lower_index_first() -> None:
    kept, others = best(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), 2)
    assert kept.tolist() == [[1, 2]] and others.tolist() == [[0, 3, 4]]


def test_budgets_of_the_protocols() -> None:
    assert [p.active(60, 32, 8) for p in Protocol] == [36, 60, 52]
    assert [p.active(20, 32, 8) for p in Protocol] == [0, 20, 12]


def test_the_staircase_falls_by_a_bin_and_rises_by_a_rank() -> None:
    rows = list(stored_rows(200, 36, 32, 8))
    assert rows[:36] == list(range(1, 37)) and rows[66] == 67 and rows[67] == 44
    falls = [t for t in range(1, 200) if rows[t] < rows[t - 1]]
    assert falls == [36 + 32 * i - 1 for i in range(1, 6)]
    assert [rows[t] for t in falls] == [36 + 8 * i for i in range(1, 6)]


def test_everything_kept_has_no_error_and_rows_cost_their_bytes() -> None:
    heads = synthetic_heads(24, 8, draws=2, spread=2.0)
    found = token_statistics(heads)
    full = top_k(heads, found, 24)
    torch.testing.assert_close(full.read(heads.later, heads.scale),
                               attend(heads.later, heads.keys, heads.values, heads.scale)[0])  # fmt: skip
    assert full.num_bytes == 24 * 2 * 8 * 4
    for target in Target:
        assert hae(heads, found, 10, 3, target).rows == 13
    cells = {(c.method, c.protocol, c.keep): c for c in evaluate([heads], (0.25, 0.5), bin_tokens=6, rank=2)}
    assert cells["HAE + OLS, attention", "fair", 0.5].rows == 12 - 4 + 2
    assert cells["HAE + OLS, attention", "real", 0.5].rows == 14
    assert cells["HAE + OLS, attention", "equal", 0.5].rows == cells["top-k", "", 0.5].rows == 12
    assert cells["HAE, bin not yet compressed", "real", 0.5].rows == 18
    ours = cells["top-k + summarize", "equal", 0.5]
    assert ours.rows == 12 and ours.num_bytes == 12 * (2 * 8 + 1) * 4
    assert ours.error < cells["HAE + OLS, attention", "equal", 0.5].error
    assert all(math.isfinite(c.error) and math.isfinite(c.later) for c in cells.values())


def test_heads_one_by_one_are_heads_together() -> None:
    heads = synthetic_heads(24, 8, draws=2, spread=2.0)
    parts = [
        Heads("", heads.queries[i : i + 1], heads.later[i : i + 1], heads.keys[i : i + 1], heads.values[i : i + 1],
              heads.scale, False)
        for i in range(2)
    ]  # fmt: skip
    for a, b in zip(evaluate([heads], (0.5,), 6, 2), evaluate(parts, (0.5,), 6, 2), strict=True):
        assert (a.method, a.protocol) == (b.method, b.protocol)
        assert a.error == pytest.approx(b.error, rel=1e-3, abs=1e-5) and a.error_se == pytest.approx(
            b.error_se, rel=0.01
        )


def test_the_synthetic_transformer() -> None:
    heads = synthetic_heads()
    assert heads.keys.shape == (8, 200, 64) and heads.scale == 1.0
    for spread in (512.0, 3.0):
        made = synthetic_heads(spread=spread)
        assert float((made.scale * made.queries @ made.keys.mT).std()) == pytest.approx(spread, rel=0.05)
    torch.testing.assert_close(heads.keys, synthetic_heads().keys, atol=0, rtol=0)
    assert not torch.equal(heads.keys, synthetic_heads(seed=1).keys)
    with pytest.raises(ValueError, match="draws: 0 is not"):
        synthetic_heads(draws=0)


def test_collected_rows_are_those_of_the_cache(tiny_engine: Make) -> None:
    engine = load_engine(tiny_engine())
    tokens = list(range(3, 60))
    layers = collect_attention(engine, tokens)
    model = engine.config.model
    with LLM(engine, cache_bytes=1 << 22).compress(tokens, ratio=0.0) as context:
        shape = (model.num_layers, model.num_kv_heads, len(tokens), model.head_dim)
        for name, rows in (("keys", context.segment.k_rows), ("values", context.segment.v_rows)):
            found = torch.stack([getattr(layer, name).transpose(0, 1) for layer in layers])
            torch.testing.assert_close(found, rows.view(shape), atol=1e-5, rtol=1e-5)
    cases = model_heads(layers, 40)
    assert len(cases) == model.num_layers and cases[0].queries.shape == (model.num_heads, 40, model.head_dim)
    assert cases[0].later.shape[1] == 17 and cases[0].causal
    with pytest.raises(ValueError, match="num_tokens: 57 is not"):
        model_heads(layers, 57)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_engine: Make) -> None:
    table, figure = tmp_path / "cells.csv", tmp_path / "src.svg"
    small: list[Any] = ["--tokens", 40, "--draws", 2, "--bin-tokens", 8, "--rank", 2, "--keep", "0.3,0.7"]
    assert main(["summarize", *map(str, small), "--csv", str(table), "--plot", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "own queries" in out and "KiB a head" in out and "| HAE + OLS, values" in out
    assert len(table.read_text().splitlines()) == 1 + 2 * 14
    assert figure.read_bytes().startswith(b"<?xml")
    document = tmp_path / "document.txt"
    document.write_text("a document " * 200)
    base = ["summarize", "--engine", str(tiny_engine()), "--document", str(document), "--later", "8", "--layers", "1"]
    assert main([*base, *map(str, small[:2]), *map(str, small[4:]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 40 and len(found["entropy"]) == 40 and len(found["cells"]) == 2 * 14
    assert main([*base[:-1], "9", "--tokens", "40"]) == 1
    assert "layers: '9' is not" in capsys.readouterr().err
    assert main(["summarize", "--layers", "0"]) == 2


def test_reports_say_what_they_are_of() -> None:
    report = run("a case", [synthetic_heads(40, 8, draws=2, spread=3.0)], (0.3,), 8, 2)
    assert "a case: 2 heads, 40 tokens, bin_size 8, k_rank 2" in describe(report)
    assert report.staircase["top-k"][-1] == 12 and len(report.token_error["top-k"]) == 40
    for arguments, message in (((8, 9), "rank: 9 is not"), ((1, 2), "bin_tokens: 1 is not")):
        with pytest.raises(ValueError, match=message):
            run("", [synthetic_heads(40, 8, draws=1)], (0.3,), *arguments)
    with pytest.raises(ValueError, match="keep: "):
        run("", [synthetic_heads(40, 8, draws=1)], (1.0,), 8, 2)
