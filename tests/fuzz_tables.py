# SPDX-License-Identifier: Apache-2.0
"""Wrong tables are never a fault: the stages that read tables on random bytes, each buffer beside a guard page.

    python tests/fuzz_tables.py FIRST_SEED SEEDS [emulated]

With ``emulated`` the CUDA kernels do it, on the CPU (tests/simt).

Every buffer ends where an inaccessible page begins (arenas of whole pages also begin at one), so an access that leaves
it kills the process. ``test_fuzz.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np

from hubkv_trt import _abi, _library
from hubkv_trt._library import call, library, workspace_bytes

PAGE = mmap.PAGESIZE
DEVICE = _abi.CUDA if "emulated" in sys.argv else _abi.CPU
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """Memory of that many bytes between two inaccessible pages; it touches the second. Ends are aligned to 16 bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        inside = -(-max(size, 1) // PAGE) * PAGE
        self.map = mmap.mmap(-1, inside + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for guard in (start, start + PAGE + inside):
            if _libc.mprotect(guard, PAGE, 0) != 0:  # PROT_NONE
                raise OSError(ctypes.get_errno(), "mprotect")
        self.address = start + PAGE + inside - size
        self.array = np.frombuffer(self.map, np.uint8, size, PAGE + inside - size)

    def fill(self, data: np.ndarray) -> Guarded:
        self.array[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return self


def wild(rng: np.random.Generator, shape: tuple[int, ...], dtype: type, likely: int) -> np.ndarray:
    """Integers: some plausible (about 0..likely), some at the edges of the type, some random bits."""
    info = np.iinfo(dtype)
    plausible = rng.integers(-2, max(likely, 1) + 3, shape)
    edges = rng.choice([info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max, info.max // 2], shape)
    anything = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    kind = rng.choice(3, shape, p=rng.dirichlet([4, 1, 1]))
    return np.choose(kind, [plausible, edges, anything]).astype(dtype)


def fuzz_cache(rng: np.random.Generator) -> None:
    """plan, attend and append over an arena and tables of random numbers."""
    B, L, Hkv = (int(rng.integers(1, 4)) for _ in range(3))
    G, Tq, P = int(rng.integers(1, 17)), int(rng.choice([1, 1, 2, 5, 40])), int(rng.integers(1, 20))
    D = 8 * int(rng.integers(1, 33))
    dtype = int(rng.integers(0, 3))
    item = 4 if dtype == _abi.FLOAT32 else 2
    max_pages = int(rng.integers(0, 5))
    capacity = B * Hkv + int(rng.integers(0, 40))
    size = int(rng.choice([16 * rng.integers(0, 4000), PAGE * rng.integers(0, 16)]))
    arena = Guarded(size).fill(rng.integers(0, 256, size, np.uint8))
    # Ascending offsets somewhere in the arena, so that segments are often right in part.
    for _ in range(4):
        if size >= 4096:
            counts = np.cumsum(rng.integers(0, 40, L * Hkv + 1)).astype(np.int64)
            at = 8 * int(rng.integers(0, (size - counts.nbytes) // 8))
            arena.array[at : at + counts.nbytes] = counts.view(np.uint8)
    segments = Guarded(B * 32).fill(
        wild(rng, (B, 4), np.int64, size) // (16 if rng.random() < 0.8 else 1) * (16 if rng.random() < 0.8 else 1)
    )
    tables = [
        Guarded(B * max_pages * 4).fill(wild(rng, (B, max_pages), np.int32, size // (L * 2 * Hkv * P * D * item) + 1)),
        Guarded(B * 4).fill(wild(rng, (B,), np.int32, max_pages * P)),
        Guarded(B * 4).fill(wild(rng, (B,), np.int32, Tq)) if rng.random() < 0.5 else None,
    ]
    addresses = [None if t is None else t.address for t in tables]
    base = 16 * int(rng.choice([0, rng.integers(0, 1000), 2**40]))
    cache = _abi.CacheParams(B, L, Hkv, D, dtype, P, max_pages, base, capacity)
    arena_table = Guarded(16).fill(np.array([arena.address, size], np.int64))
    work, work_count = Guarded(L * capacity * 16), Guarded(L * 4)
    call(
        "hubkv_plan",
        DEVICE,
        None,
        cache,
        int(rng.integers(1, 100)),
        arena_table.address,
        segments.address,
        work.address,
        work_count.address,
    )
    planned = work_count.array.view(np.int32)
    assert np.all((planned >= 0) & (planned <= capacity)), planned
    if rng.random() < 0.6:
        work.fill(wild(rng, (L, capacity, 4), np.int32, 30))
        work_count.fill(wild(rng, (L,), np.int32, capacity))

    rows = [Guarded(B * Tq * heads * D * item) for heads in (Hkv * G, Hkv, Hkv, Hkv * G)]
    for buffer in rows[:3]:
        values = rng.standard_normal(buffer.size // item)
        buffer.fill(values.astype(np.float16) if item == 2 else values.astype(np.float32))
    attend = _abi.AttendParams(
        cache, Tq, Hkv * G, int(rng.integers(0, L)), float(rng.choice([0.0, 1e30, -1.0])), Hkv * G * D, *(Hkv * D,) * 2
    )
    scratch = Guarded(-(-workspace_bytes("hubkv_attend_workspace", DEVICE, attend) // 256) * 256)
    scratch.array[:] = 0xFF
    call(
        "hubkv_attend",
        DEVICE,
        None,
        attend,
        *(b.address for b in rows[:3]),
        arena_table.address,
        segments.address,
        *addresses,
        work.address,
        work_count.address,
        rows[3].address,
        scratch.address,
        scratch.size,
    )
    new = [Guarded(L * B * Tq * Hkv * D * item) for _ in range(2)]
    call("hubkv_append", DEVICE, None, cache, Tq, *(b.address for b in new), arena_table.address, *addresses)


def fuzz_compact(rng: np.random.Generator) -> None:
    L, Hkv, T = (int(rng.integers(1, 5)) for _ in range(3))
    D = 8 * int(rng.integers(1, 33))
    K = int(rng.integers(0, L * Hkv * T + 1))
    dtype = int(rng.integers(0, 3))
    item = 4 if dtype == _abi.FLOAT32 else 2
    layers = [[Guarded(Hkv * T * D * item) for _ in range(L)] for _ in range(2)]
    pointers = [(ctypes.c_void_p * L)(*(x.address for x in rows)) for rows in layers]
    positions = Guarded(K * 4).fill(wild(rng, (K,), np.int32, T))
    offsets = Guarded((L * Hkv + 1) * 8).fill(wild(rng, (L * Hkv + 1,), np.int64, K))
    if rng.random() < 0.5:
        offsets.fill(np.sort(offsets.array.view(np.int64)))
    out = [Guarded(K * D * item) for _ in range(2)]
    params = _abi.CompactParams(L, Hkv, T, D, K, dtype, *(T * D, D) * 2)
    call(
        "hubkv_compact",
        DEVICE,
        None,
        params,
        *pointers,
        positions.address,
        offsets.address,
        *(x.address for x in out),
    )


def fuzz_decode(rng: np.random.Generator) -> None:
    """The stages that compress while decoding, each on tables of random numbers or on what the one before gave."""
    L, Hkv, P = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 20))
    G, W, D = int(rng.integers(1, 5)), int(rng.integers(1, 12)), 8 * int(rng.integers(1, 9))
    dtype = int(rng.integers(0, 3))
    item = 4 if dtype == _abi.FLOAT32 else 2
    max_pages, heads = int(rng.integers(0, 5)), L * Hkv
    size = 16 * int(rng.integers(0, 4000))
    arena = Guarded(size).fill(rng.integers(0, 256, size, np.uint8))
    K, tail = int(rng.integers(0, 60)), int(rng.integers(0, max_pages * P + 1))
    if size >= 4096:
        counts = np.cumsum(rng.integers(0, 2 * K // heads + 2, heads + 1)).astype(np.int64)
        arena.array[1024 : 1024 + counts.nbytes] = counts.view(np.uint8)
    table = np.array([[0, 2048, 1024, 512]]) if rng.random() < 0.5 else wild(rng, (1, 4), np.int64, size) // 16 * 16
    segments = Guarded(32).fill(table.astype(np.int64))
    pages = size // (L * 2 * Hkv * P * D * item) + 1
    block_table = Guarded(max_pages * 4).fill(wild(rng, (max_pages,), np.int32, pages))
    arena_table = Guarded(16).fill(np.array([arena.address, size], np.int64))
    tables = (arena_table.address, segments.address, block_table.address)
    cache = _abi.CacheParams(1, L, Hkv, D, dtype, P, max_pages, 16 * int(rng.integers(0, 200)), Hkv)
    candidates = _abi.CandidatesParams(cache, K, tail, int(rng.integers(0, 99)), int(rng.integers(0, 9)))
    N = K + heads * tail

    q = Guarded(L * W * Hkv * G * D * item)
    values = rng.standard_normal(q.size // item)
    q.fill(values.astype(np.float16) if item == 2 else values.astype(np.float32))
    positions = Guarded(K * 4).fill(wild(rng, (K,), np.int32, 50))
    raw, transformed, places = (Guarded(N * 4) for _ in range(3))
    offsets = Guarded((heads + 1) * 8)
    score = _abi.ScoreWindowParams(candidates, W, Hkv * G, int(rng.integers(0, 3)), 5, 0.1, 0.0)
    scratch = Guarded(-(-workspace_bytes("hubkv_score_window_workspace", DEVICE, score) // 256) * 256)
    outputs = (x.address for x in (raw, transformed, places, offsets))
    inputs = (q.address, positions.address, *tables)
    call("hubkv_score_window", DEVICE, None, score, *inputs, *outputs, scratch.address, scratch.size)

    fuzz_loss(rng, candidates, q, G, W, transformed, places, tables)
    if rng.random() < 0.5:
        offsets.fill(wild(rng, (heads + 1,), np.int64, N))
        for scores in (raw, transformed):
            scores.fill(wild(rng, (N,), np.int32, 2**30))
        places.fill(wild(rng, (N,), np.int32, 50))
    ragged = (raw.address, transformed.address, places.address, offsets.address)
    kept, temperature, calibrated = Guarded(heads * 4), Guarded(heads * 4), Guarded(N * 4)
    bounds = (int(rng.integers(0, 5)), int(rng.integers(0, 40)), int(rng.integers(1, 90)), int(rng.integers(0, 2)))
    p = float(rng.choice([1e-30, 0.5, 0.9, 1.0]))
    calibration = _abi.CalibrateTopPParams(L, Hkv, N, p, int(rng.integers(0, 9)), *bounds)
    scratch = Guarded(-(-workspace_bytes("hubkv_calibrate_top_p_workspace", DEVICE, calibration) // 256) * 256)
    outputs = (x.address for x in (kept, temperature, calibrated, scratch))
    call("hubkv_calibrate_top_p", DEVICE, None, calibration, *ragged, *outputs, scratch.size)
    counts = kept.array.view(np.int32)
    assert np.all((counts >= 0) & (counts <= N)), counts

    if rng.random() < 0.5:
        kept.fill(wild(rng, (heads,), np.int32, N))
    rows = int(rng.integers(0, N + 1))
    indices, head_offsets = Guarded(rows * 4), Guarded((heads + 1) * 8)
    selection = _abi.SelectRaggedParams(heads, N, rows, int(rng.integers(0, 9)))
    outputs = (x.address for x in (kept, indices, head_offsets))
    call("hubkv_select_ragged", DEVICE, None, selection, *ragged[1:], *outputs)

    if rng.random() < 0.5:
        indices.fill(wild(rng, (rows,), np.int32, 50))
        head_offsets.fill(wild(rng, (heads + 1,), np.int64, rows))
    merged = int(rng.integers(0, 4))
    total = rows + heads * merged
    new = [Guarded(size) for size in (total * D * item, total * D * item, total * 4, total * 4)]
    addresses = [x.address for x in new]
    inputs = (places.address, indices.address, head_offsets.address, *tables)
    params = _abi.RewriteParams(candidates, rows, merged)
    call("hubkv_merge", DEVICE, None, params, raw.address, *inputs, *addresses)
    call("hubkv_rewrite", DEVICE, None, params, *inputs, *addresses[:3], addresses[3] if merged else None)


def fuzz_loss(
    rng: np.random.Generator,
    candidates: _abi.CandidatesParams,
    q: Guarded,
    group: int,
    window: int,
    ranking: Guarded,
    places: Guarded,
    tables: tuple[int, ...],
) -> None:
    """held_out_loss where the tail has room for the queries behind its candidates."""
    cache = candidates.cache
    most = cache.maxPages * cache.P
    if candidates.tailTokens + window > most:
        return
    heads, length = cache.L * cache.Hkv, int(rng.integers(candidates.tailTokens + window, most + 1))
    if rng.random() < 0.5:
        ranking, places = (Guarded(x.size).fill(wild(rng, (x.size // 4,), np.int32, 2**30)) for x in (ranking, places))
    params = _abi.HeldOutLossParams(candidates, window, cache.Hkv * group, length, 0.0)
    scratch = Guarded(-(-workspace_bytes("hubkv_held_out_loss_workspace", DEVICE, params) // 256) * 256)
    loss, rows = (Guarded(heads * (_abi.LEVELS + 1) * 4) for _ in range(2))
    inputs = (q.address, ranking.address, places.address, *tables)
    outputs = (x.address for x in (loss, rows, scratch))
    call("hubkv_held_out_loss", DEVICE, None, params, *inputs, *outputs, scratch.size)
    kept = rows.array.view(np.int32).reshape(heads, -1)
    assert np.all((kept >= 0) & (np.diff(kept, axis=1, prepend=0) >= 0)), kept
    assert np.all(kept[:, -1] <= ranking.size // 4), kept
    assert not loss.array.view(np.float32).reshape(heads, -1)[:, -1].any()


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    if DEVICE == _abi.CUDA:
        from simt.library import build

        os.environ[_library.VARIABLE] = str(build("plain"))
    library()
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)
        fuzz_cache(np.random.default_rng(seed))
        fuzz_compact(np.random.default_rng(seed))
        fuzz_decode(np.random.default_rng(seed))
    print("done", flush=True)


if __name__ == "__main__":
    main()
