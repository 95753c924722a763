# SPDX-License-Identifier: Apache-2.0
"""Summary rows: what they carry exactly, what they never make worse, and what degenerate bins become."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubkv_trt.config import Evicted, RopeConfig
from hubkv_trt.models.rope import rope_frequencies
from hubkv_trt.summarize.clusters import cluster, mean, rms
from hubkv_trt.summarize.fit import SummaryRows, summarize_evicted
from hubkv_trt.summarize.heads import EMPTY, attend
from hubkv_trt.summarize.nonnegative import nonnegative_least_squares
from hubkv_trt.summarize.references import by_kv_head, reference_queries

D = 16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masked(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor,
           rows: SummaryRows | None = None,
           own: torch.Tensor | float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over kept tokens, which have their own bias, and summary rows, in float64."""
    bias = torch.where(kept, own, -math.inf).double()
    if rows is not None:
        keys, values = torch.cat((keys, rows.keys), 1), torch.cat((values, rows.values), 1)
        bias = torch.cat((bias, rows.bias.double()), 1)
    return attend(queries.double(), keys.double(), values.double(), D**-0.5, bias)


def case(
    heads: int = 4, references: int = 24, tokens: int = 60, keep: float = 0.3, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    queries, keys, values = (random(heads, n, D, seed=seed + i) for i, n in enumerate((references, tokens, tokens)))
    kept = torch.rand(heads, tokens, generator=torch.Generator().manual_seed(seed + 9)) < keep
    kept[:, 0] = True
    return 2 * queries, 2 * keys, values, kept


@pytest.mark.parametrize("method", [Evicted.MERGE, Evicted.SUMMARIZE])
@pytest.mark.parametrize("evicted", [1, 3, 4])
def test_few_evicted_tokens_are_reproduced_exactly(method: Evicted, evicted: int) -> None:
    queries, keys, values, kept = case()
    kept[:] = True
    kept[:, 7 : 7 + evicted] = False
    rows = summarize_evicted(queries, keys, values, kept, 4, D**-0.5, method)
    assert int((rows.bias == 0).sum()) == 4 * evicted and int((rows.bias == EMPTY).sum()) == 4 * (4 - evicted)
    later = 3 * random(4, 50, D, seed=50)
    full = masked(later, keys, values, torch.ones_like(kept))
    found = masked(later, keys, values, kept, rows)
    for a, b in zip(found, full, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_few_evicted_rows_keep_their_own_biases() -> None:
    """They may stand for several tokens themselves, or for less than one; rows that are nothing do not count."""
    queries, keys, values, kept = case()
    kept[:] = True
    kept[:, 7:10] = False
    own = 2 * random(*kept.shape, seed=3)
    own[:, 20:] = EMPTY
    rows = summarize_evicted(queries, keys, values, kept, 4, D**-0.5, bias=own)
    assert torch.equal(rows.bias.sort(1).values[:, 1:], own[:, 7:10].sort(1).values)
    later = 3 * random(4, 50, D, seed=50)
    full = masked(later, keys, values, torch.ones_like(kept), own=own)
    for a, b in zip(masked(later, keys, values, kept, rows, own), full, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("method", "keep"), [(Evicted.MERGE, 0.1), (Evicted.MERGE, 0.8), (Evicted.SUMMARIZE, 0.1)])
def test_a_row_of_bias_log_2_counts_as_two(method: Evicted, keep: float) -> None:
    queries, keys, values, kept = case(tokens=80, keep=keep)
    own = torch.full(kept.shape, math.log(2))
    once = summarize_evicted(queries, keys, values, kept, 3, D**-0.5, method, bias=own)
    twice = summarize_evicted(queries, *(x.repeat_interleave(2, 1) for x in (keys, values, kept)), 3, D**-0.5, method)
    for name in ("keys", "bias"):
        torch.testing.assert_close(getattr(once, name), getattr(twice, name), atol=1e-3, rtol=1e-3)
    assert torch.equal(once.tokens, twice.tokens // 2)
    full, _ = masked(queries, keys, values, torch.ones_like(kept), own=own)
    errors = [(masked(queries, keys, values, kept, rows, own)[0] - full).square().sum((1, 2)) for rows in (once, twice)]
    torch.testing.assert_close(*errors, atol=1e-6, rtol=1e-2)


def test_heads_do_not_depend_on_each_other() -> None:
    """One head loses nearly all, the other two tokens in ten; each gets what it gets alone."""
    arguments = case(heads=2, tokens=80, keep=0.8)
    arguments[3][0] = torch.arange(80) < 4
    both = summarize_evicted(*arguments, 3, D**-0.5)
    for head in range(2):
        alone = summarize_evicted(*(x[head : head + 1] for x in arguments), 3, D**-0.5)
        for name in ("keys", "bias", "tokens"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(both, name)[head], atol=1e-4, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 30), st.floats(0, 0.9), st.sampled_from([1.0, 0.5]),
    st.sampled_from([0.0, 3.0, 100.0]),
)  # fmt: skip
def test_references_are_never_answered_worse_than_by_dropping(
    seed: int, count: int, size: int, keep: float, mass: float, spread: float
) -> None:
    queries, keys, values, kept = case(2, size, 40, keep, seed)
    own = spread * random(*kept.shape, seed=seed + 5)
    rows = summarize_evicted(queries, keys, values, kept, count, D**-0.5, mass=mass, bias=own if spread else None)
    assert all(bool(x.isfinite().all()) for x in (rows.keys, rows.values, rows.bias))
    full, _ = masked(queries, keys, values, torch.ones_like(kept), own=own)
    dropped, found = (
        (masked(queries, keys, values, kept, each, own)[0] - full).square().sum((1, 2)) for each in (None, rows)
    )
    assert bool((found <= dropped * (1 + 1e-3) + 1e-6).all())
    assert rows.keys.shape == (2, count, D)
    live = rows.bias > EMPTY
    assert not bool(kept.gather(1, rows.tokens)[live].any()), "a row stands for a kept token"


def test_masses_match_and_more_rows_are_nearer() -> None:
    """Keys around eight centers: eight rows carry the mass of every query, fewer do better than none."""
    queries, keys, values, kept = case(heads=8, references=64, tokens=200, keep=0.2)
    keys = random(8, 8, D, seed=5).repeat(1, 25, 1) + 0.2 * keys
    full, total = masked(queries, keys, values, torch.ones_like(kept))
    errors = []
    for count in (1, 2, 4, 8):
        rows = summarize_evicted(queries, keys, values, kept, count, D**-0.5)
        out, mass = masked(queries, keys, values, kept, rows)
        errors.append(float((out - full).square().mean()))
        off = float(((mass - total).exp() - 1).square().mean().sqrt())
    assert off < 0.1
    dropped = float((masked(queries, keys, values, kept)[0] - full).square().mean())
    assert errors == sorted(errors, reverse=True) and errors[2] < dropped / 4
    merged = summarize_evicted(queries, keys, values, kept, 4, D**-0.5, Evicted.MERGE)
    assert errors[2] < float((masked(queries, keys, values, kept, merged)[0] - full).square().mean()) < dropped


@pytest.mark.parametrize("method", [Evicted.MERGE, Evicted.SUMMARIZE])
def test_degenerate_bins_give_numbers(method: Evicted) -> None:
    queries, keys, values, kept = case(heads=7)
    kept[0] = True  # nothing evicted
    kept[1] = False  # everything
    keys[2] = keys[2, :1]  # identical keys
    values[3] = 0
    keys[4] = 0
    keys[5] = 1e4 * keys[5]  # a softmax that sees one token; most masses are 0
    queries[6] = 0
    for size in (24, 1):  # fewer references than rows, too
        for count in (1, 8):
            rows = summarize_evicted(queries[:, :size], keys, values, kept, count, D**-0.5, method)
            assert all(bool(x.isfinite().all()) for x in (rows.keys, rows.values, rows.bias))
            out, _ = masked(queries, keys, values, kept, rows)
            assert bool(out.isfinite().all())
            assert bool((rows.bias[0] == EMPTY).all())
    same = slice(2, 3)
    found, _ = masked(queries[same], keys[same], values[same], kept[same], rows := SummaryRows(
        *(getattr(rows, name)[same] for name in ("keys", "values", "bias", "tokens"))))  # fmt: skip
    full, _ = masked(queries[same], keys[same], values[same], torch.ones_like(kept[same]))
    if method is Evicted.SUMMARIZE:  # every key alike: one row can carry all of it
        torch.testing.assert_close(found, full, atol=2e-2, rtol=2e-2)


def test_more_rows_than_tokens() -> None:
    queries, keys, values, kept = case(tokens=3)
    kept[:] = False
    rows = summarize_evicted(queries, keys, values, kept, 8, D**-0.5)
    full = masked(queries, keys, values, torch.ones_like(kept))
    for a, b in zip(masked(queries, keys, values, kept, rows), full, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_float32_is_float64() -> None:
    """Small weights ride on large ones: where float32 lost them, the two would part."""
    arguments = case(heads=6, references=48, tokens=300, keep=0.1)
    single = summarize_evicted(*arguments, 4, D**-0.5)
    double = summarize_evicted(*(x.double() if x.is_floating_point() else x for x in arguments), 4, D**-0.5)
    torch.testing.assert_close(single.bias.double(), double.bias, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(single.values.double(), double.values, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(single.keys.double(), double.keys, atol=1e-4, rtol=1e-4)


def test_nonnegative_least_squares_meets_its_conditions() -> None:
    """x >= 0, gradient >= 0, and 0 where x is not (Karush, Kuhn, Tucker): that is the least."""
    for seed, count in itertools.product(range(4), (1, 3, 8)):
        a, z = random(5, 20, count, seed=seed).abs().double(), random(5, 20, seed=seed + 99).double()
        x = nonnegative_least_squares(a, z)
        gradient = (a.mT @ (a @ x.unsqueeze(-1) - z.unsqueeze(-1))).squeeze(-1)
        assert bool((x >= 0).all()) and bool((gradient > -1e-5).all())
        assert float((gradient * x).abs().max()) < 1e-5


def test_nonnegative_least_squares_of_degenerate_columns() -> None:
    a = random(1, 10, 1).abs().expand(1, 10, 4).clone()
    a[..., 3] = 0
    x = nonnegative_least_squares(a, 6 * a[..., 0])
    assert bool((x >= 0).all()) and float(x[0, :3].sum()) == pytest.approx(6, rel=1e-4) and x[0, 3] == 0
    assert nonnegative_least_squares(a, -a[..., 0]).abs().max() == 0


def test_clusters() -> None:
    """Far groups are found; weight makes the center; a token without weight is in none."""
    centers = 100 * torch.eye(3, D).unsqueeze(0)
    keys = (centers.repeat_interleave(5, 1) + random(1, 15, D)).contiguous()
    weights = torch.rand(1, 15, generator=torch.Generator().manual_seed(3)) + 0.1
    weights[0, 4] = 0
    values = torch.zeros_like(keys)
    members = cluster(keys, values, weights, 3, (rms(keys), rms(values)))
    groups = (members > 0).float().view(3, 5, 3).sum(1)
    assert sorted(groups.max(1).values.tolist()) == [4, 5, 5] and int((groups > 0).sum()) == 3
    first = members[0, :5].argmax(1)[0]
    expected = (keys[0, :4] * weights[0, :4, None]).sum(0) / weights[0, :4].sum()
    torch.testing.assert_close(mean(keys, members)[0, first], expected)


def test_references_stand_behind_the_prompt() -> None:
    """A query rotated at its place and moved is the query rotated at the new place."""
    inv_freq = torch.from_numpy(rope_frequencies(RopeConfig(), D, 512)[0])

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions.double()[:, None] * inv_freq.double()).unsqueeze(1)
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    plain = random(100, 6, D)
    found = reference_queries(rotate(plain, torch.arange(100)).float(), inv_freq, 20)
    tokens = torch.linspace(0, 99, 20).round().long()
    torch.testing.assert_close(found.double(), rotate(plain[tokens], 100 + torch.arange(20)), atol=1e-4, rtol=1e-4)
    assert reference_queries(plain[:5], inv_freq).shape == (5, 6, D)
    grouped = by_kv_head(found, 2)
    assert grouped.shape == (2, 3 * 20, D)
    torch.testing.assert_close(grouped[1, 20:40], found[:, 4])
