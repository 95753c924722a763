# SPDX-License-Identifier: Apache-2.0
"""Every kernel against its oracle on small shapes, and on wrong tables: small enough for compute-sanitizer.

python -m device.kernels [STAGE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decoding_cache import SINKS, DecodingCache, decoding_cache
from device.moved import computing_on
from hubkv_trt import ops, reference
from ragged_cache import RaggedCache, as_numpy, new_rows, random_cache

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same values that many elements past a 16-byte boundary."""
    return torch.cat([x.new_zeros(elements), x.flatten()])[elements:].view(x.shape)


def same_bytes(got: Tensor, want: np.ndarray, case: object) -> None:
    equal = np.array_equal(as_numpy(got.contiguous()).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))
    assert equal, f"{case}: not the bytes of the oracle"


def check_refine() -> None:
    scores = np.random.default_rng(0).random((2, 3, 2300), np.float32)
    scores[0, 0, 50:60] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 0.5, 0.5]
    alpha, window = np.array([0.7], np.float32), np.array([40], np.int32)
    for nms_kernel in (1, 3, 5, 7, 9, 11, 301, 2501):
        for temperature in (0.0, 0.5):
            parameters = (nms_kernel, 0.5, temperature, 0.8, 1.2, 4)
            want, want_count = reference.refine(scores, alpha, window, *parameters)
            for offset in (0, 3):
                arguments = shifted(torch.from_numpy(scores), offset), torch.from_numpy(alpha), torch.from_numpy(window)
                refined, count = ops.refine(*arguments, *parameters)
                same_bytes(refined, want, f"refine, window {nms_kernel}")
                assert count.tolist() == want_count.tolist()


def check_select() -> None:
    rng = np.random.default_rng(1)
    for shape in ((1, 1, 1), (2, 2, 2500), (3, 2, 4099), (1, 160, 1250)):
        refined = rng.random(shape, np.float32).round(2)
        refined[:, :, :1] = np.inf
        refined[rng.random(shape) < 0.01] = np.nan
        for groups in {1, shape[0], shape[0] * shape[1]}:
            size = refined.size // groups
            for rows in {0, 1, size // 3, size}:
                got = ops.select(shifted(torch.from_numpy(refined), groups % 4), groups, rows)
                for x, want in zip(got, reference.select(refined, groups, rows), strict=True):
                    same_bytes(x, want, f"select {rows} of {shape} in {groups} groups")


def check_compact() -> None:
    for dtype in DTYPES:
        for head_dim, offset in ((64, 0), (80, 1), (24, 2), (256, 4)):
            k, v = ([shifted(torch.randn(3, 50, head_dim).to(dtype), offset) for _ in range(2)] for _ in "kv")
            positions, offsets = ops.select(torch.rand(2, 3, 50), 1, 111)
            got = ops.compact(k, v, positions, offsets)
            sides = [[as_numpy(x) for x in side] for side in (k, v)]
            for rows, want in zip(got, reference.compact(*sides, positions.numpy(), offsets.numpy()), strict=True):
                same_bytes(rows, want, f"compact {dtype}, D = {head_dim}, {offset} off the grid")


def check_append() -> None:
    for dtype in DTYPES:
        for head_dim, offset in ((40, 0), (128, 1), (256, 2)):
            cache = random_cache(sequences=[(5, 0), (None, 15), (3, 33)], head_dim=head_dim, dtype=dtype)
            k, v = (shifted(x, offset) for x in new_rows(cache, 19, 1, layers=2)[1:])
            lengths = torch.tensor([0, 19, 7], dtype=torch.int32)
            want = cache.arena.clone().numpy()
            sizes = (cache.page_tokens, cache.page_base)
            tables = (cache.block_table, cache.tail_lengths, lengths)
            reference.append(as_numpy(k), as_numpy(v), want, *(x.numpy() for x in tables), *sizes)
            ops.append(k, v, cache.arena, *tables, *sizes)
            same_bytes(cache.arena, want, f"append {dtype}, D = {head_dim}, {offset} off the grid")


def check_plan() -> None:
    for sequences, heads in (([(40, 0), (None, 0), (300, 0)] * 45, 2), ([(2, 0)], 9000), ([(5000, 0)], 1)):
        cache = random_cache(sequences=sequences, num_layers=2, num_kv_heads=heads, head_dim=8, max_pages=0)
        for spare, rows in ((0, 1), (500, 16), (3000, 1)):
            capacity = len(sequences) * heads + spare
            work, counts = cache.plan(capacity, rows)
            want, want_counts = reference.plan(cache.arena.numpy(), cache.segments.numpy(), 2, heads, capacity, rows)
            assert counts.tolist() == want_counts.tolist()
            for layer, count in enumerate(counts.tolist()):
                items = ({tuple(item) for item in x[layer, :count].tolist()} for x in (work, want))
                assert len(set(map(frozenset, items))) == 1, f"plan of {heads} heads, capacity {capacity}"


def check_attend() -> None:
    """Kernels of every type, width of row and number of queries; one, two and four tiles; parts and no parts."""
    for dtype, tolerance in DTYPES.items():
        for head_dim in (40, 64, 80, 128, 256):
            sequences = [(70, 40), (None, 5), (0, 0), (33, 300)]
            cache = random_cache(sequences=sequences, num_layers=1, head_dim=head_dim, dtype=dtype, row_bias=True)
            for num_new, group, offset in (
                (1, 1, 0),
                (1, 2, 1),
                (1, 4, 0),
                (2, 3, 0),
                (3, 4, 0),
                (5, 7, 1),
                (17, 2, 0),
            ):
                q, k, v = (shifted(x, offset) for x in new_rows(cache, num_new, group))
                lengths = torch.tensor([num_new, 1, 0, num_new], dtype=torch.int32) if num_new != 3 else None
                out = cache.attend(q, k, v, new_lengths=lengths, capacity=64, rows_per_item=16)
                want = cache.oracle(q, k, v, new_lengths=lengths)
                case = f"attend {dtype}, D = {head_dim}, Tq = {num_new}, G = {group}"
                np.testing.assert_allclose(out.double().numpy(), want, rtol=tolerance, atol=tolerance, err_msg=case)


def check_decode() -> None:
    """The stages that compress while decoding, each on what the one before gave."""
    for dtype, head_dim, window in ((torch.float32, 40, 3), (torch.float16, 64, 9), (torch.bfloat16, 128, 32)):
        decoding = decoding_cache(rows=200, tail=150, tail_tokens=144, dtype=dtype, head_dim=head_dim, row_bias=True)
        for score in ("vanilla", "snapkv", "rkv"):
            arguments = decoding.score_arguments(decoding.queries(window, 3), score)
            got = ops.score_window(*arguments)
            want = reference.score_window(*[as_numpy(x) if isinstance(x, Tensor) else x for x in arguments])
            case = f"{score} {dtype}, D = {head_dim}, W = {window}"
            np.testing.assert_allclose(got[0].double(), want[0], rtol=1e-4, atol=1e-4, err_msg=case)
            shares = (np.exp(got[1].double().numpy()), np.exp(want[1]))
            np.testing.assert_allclose(*shares, rtol=1e-3, atol=1e-5, err_msg=case)
            for x, y in zip(got[2:], want[2:], strict=True):
                same_bytes(x, y, case)
            compare_selection(decoding, got, case)
        compare_loss(decoding, window, f"held_out_loss {dtype}, D = {head_dim}, W = {window}")


def compare_loss(decoding: DecodingCache, window: int, case: str) -> None:
    """held_out_loss of rankings by other queries, where the tail has room behind the candidates: rows exactly."""
    cache = decoding.cache
    early = replace(decoding, tail_tokens=int(cache.tail_lengths[0]) - window)
    _, ranking, places, _ = ops.score_window(*early.score_arguments(early.queries(2, 3)))
    sizes = (early.tail_tokens, int(cache.tail_lengths[0]), cache.num_kv_heads, cache.page_tokens, cache.page_base)
    arguments = (early.queries(window, 3, 2), ranking, places, *early.tables, *sizes, SINKS, 0.0)
    loss, rows = ops.held_out_loss(*arguments)
    want = reference.held_out_loss(*[as_numpy(x) if isinstance(x, Tensor) else x for x in arguments])
    np.testing.assert_allclose(loss.double(), want[0], rtol=1e-4, atol=1e-6, err_msg=case)
    same_bytes(rows, want[1], case)


def compare_selection(decoding: DecodingCache, scores: tuple[Tensor, ...], case: str) -> None:
    """calibrate_top_p, select_ragged and rewrite: the bytes of the oracles."""
    raw, transformed, *candidates = scores
    for bounds in ((0, 0, 0, False), (3, 90, 120, False), (3, 0, 300, True)):
        parameters = (2, 0.9, 4, *bounds)
        counts, *rest = ops.calibrate_top_p(raw, transformed, *candidates, *parameters)
        oracle = reference.calibrate_top_p(*(x.numpy() for x in (raw, transformed, *candidates)), *parameters)
        for x, y in zip((counts, *rest), oracle, strict=True):
            same_bytes(x, y, f"calibrate_top_p of {case}, {bounds}")
        selection, rows = (transformed, *candidates, counts), int(counts.sum())
        chosen = ops.select_ragged(*selection, rows, 4)
        for x, y in zip(chosen, reference.select_ragged(*(x.numpy() for x in selection), rows, 4), strict=True):
            same_bytes(x, y, f"select_ragged of {case}, {bounds}")
        decoding.rewrite(candidates[0], *chosen)
        decoding.merge(raw, candidates[0], *chosen, 5)


def wild(generator: torch.Generator, x: Tensor) -> Tensor:
    """Some entries of an integer tensor replaced: by neighbours, by the edges of the type, by anything."""
    info = torch.iinfo(x.dtype)
    edges = torch.tensor([info.min, info.min + 1, -1, 0, 1, info.max], dtype=x.dtype)
    choices = torch.stack(
        [
            x,
            x + torch.randint(-2, 3, x.shape, generator=generator).to(x.dtype),
            edges[torch.randint(len(edges), x.shape, generator=generator)],
            torch.randint(info.min, info.max, x.shape, generator=generator, dtype=x.dtype),
        ]
    )
    return choices.gather(0, torch.randint(len(choices), x.shape, generator=generator)[None])[0]


def check_wrong_tables() -> None:
    """Random numbers in every table: any result, and no access outside."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        right = random_cache(sequences=[(70, 40), (None, 5), (33, 90)], head_dim=64, seed=seed, row_bias=True)
        tables = {name: wild(generator, getattr(right, name)) for name in ("segments", "block_table", "tail_lengths")}
        cache: RaggedCache = replace(right, **tables)
        work, counts = (wild(generator, x) for x in right.plan())
        cache.plan()
        for num_new in (1, 12):
            q, k, v = new_rows(cache, num_new, 4, layers=2)
            lengths = wild(generator, torch.full((3,), num_new, dtype=torch.int32))
            tails = (cache.block_table, cache.tail_lengths, lengths)
            sizes = (cache.page_tokens, cache.page_base)
            ops.attend(q[0], k[0], v[0], cache.arena, cache.segments, *tails, work, counts, 0, 2, *sizes, 0.0)
            ops.append(k, v, cache.arena, *tails, *sizes)
        positions, offsets = ops.select(torch.rand(2, 2, 50, generator=generator), 1, 99)
        dense = [torch.randn(2, 50, 64, generator=generator) for _ in range(2)]
        ops.compact(dense, dense, wild(generator, positions), wild(generator, offsets))


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main() -> None:
    torch.manual_seed(0)
    with computing_on("cuda"):
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name]()
            print(f"  {name}: as the oracle" if name != "wrong_tables" else "  wrong tables: no fault", flush=True)


if __name__ == "__main__":
    main()
