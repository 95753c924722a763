# SPDX-License-Identifier: Apache-2.0
"""refine, select, compact and attend on the host: time, bytes/s over the copy bandwidth of the run, torch beside."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for both, as in the runtime's arena

import torch  # before the package: its threads wait as they do without it, the torch steps lose nothing

# isort: split
import common
import torch_steps
from hubkv_trt import ops
from hubkv_trt.config import DEFAULT_PRESET, HubKVConfig
from ragged import SHAPES, RaggedCache, Shape, draw_scores, make_rows
from stages_report import COLD_BYTES, Cell, report, targets

DESCRIPTION = """\
Times the stages of libhubkv beside the same steps written in torch, over the KV cache
of one prompt of T tokens. Results are compared before anything is timed.

  refine    reads and writes 4 bytes a KV pair (N = L*Hkv*T pairs)
  select    reads 4 bytes a pair and writes 4 a kept row
  compact   reads and writes every kept row of K and V once
  attend    reads every kept row once: one decode step, all layers, B sequences

The torch steps: max_pool1d and element-wise operations; topk over all scores, sort and
bincount; index_select; scaled_dot_product_attention over the rows padded to the
longest head of each layer. Percentages are bytes moved per second over the copy
bandwidth (read + written bytes, best of several ways) measured in the same run."""
EPILOG = """\
Scores are drawn per head with different skew, so that heads keep different numbers of
rows, as real ones do. K and V lie token-major, as a decoder makes them. Where the K and
V of all layers would take more than --memory, compact and attend see fewer layers: the
column says how many. attend's batch grows until its rows exceed 64 MiB, more than any
cache holds; a * marks compact rows below that.

examples:
  python benchmarks/stages.py --quick              under a minute
  python benchmarks/stages.py                      about 6 minutes on two cores, 12 GiB of memory
  python benchmarks/stages.py --shape demo --tokens 4096 --ratio 0.9"""


TOKENS = {"qwen3-8b": [1024, 8192, 32768, 131072, 1048576], "demo": [1024, 4096, 7936, 131072]}
MAX_PAIRS = 1 << 26  # refine and select: more would take 6 GB in torch's topk and sort


class Bench:
    """One shape at one T.

    Args:
        shape: of the model.
        tokens: T.
        ratio: r.
        memory: bytes of dense K and V at most.
        seconds: how long to measure each call.
    """

    def __init__(self, shape: Shape, tokens: int, ratio: float, memory: int, seconds: float, peers: bool) -> None:
        self.shape, self.tokens, self.ratio, self.seconds, self.peers = shape, tokens, ratio, seconds, peers
        self.hubkv = HubKVConfig.from_preset(DEFAULT_PRESET)
        pairs_of_layer = shape.num_kv_heads * tokens
        self.score_layers = max(1, min(shape.num_layers, MAX_PAIRS // pairs_of_layer))
        self.row_layers = max(1, min(self.score_layers, memory // (pairs_of_layer * shape.row_bytes)))
        self.ours: dict[str, common.Timing] = {}
        self.theirs: dict[str, common.Timing] = {}
        self.num_bytes: dict[str, int] = {}

    def time(self, stage: str, num_bytes: int, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        self.num_bytes[stage] = num_bytes
        self.ours[stage] = common.measure(ours, self.seconds)
        if self.peers:
            self.theirs[stage] = common.measure(theirs, self.seconds, max_runs=20)

    def kept(self, layers: int) -> int:
        pairs = layers * self.shape.num_kv_heads * self.tokens
        return pairs - int(self.ratio * pairs)

    def run(self) -> Cell:
        refined = self.refine_and_select()
        return self.compact_and_attend(refined)

    def refine_and_select(self) -> torch.Tensor:
        c, window = self.hubkv, self.hubkv.window(self.tokens)
        scores = draw_scores(self.score_layers, self.shape.num_kv_heads, self.tokens)
        alpha = torch.tensor([c.alpha(self.ratio)], dtype=torch.float32)
        window_tensor = torch.tensor([window], dtype=torch.int32)
        rows = self.kept(self.score_layers)

        def refine() -> torch.Tensor:
            return ops.refine(
                scores,
                alpha,
                window_tensor,
                c.nms_kernel,
                c.penalty_factor,
                c.head_weight_temperature,
                c.min_head_weight,
                c.max_head_weight,
                c.sink_tokens,
            )[0]

        refined = refine()
        if self.peers:
            expected = torch_steps.refine(scores, float(alpha), window, c)
            torch.testing.assert_close(refined, expected, rtol=1e-5, atol=1e-6)
            positions, offsets = ops.select(refined, 1, rows)
            positions_torch, offsets_torch = torch_steps.select(refined, rows)
            equal = torch.equal(offsets, offsets_torch) and torch.equal(positions, positions_torch)
            # topk takes any of several equal values at the border, select the first ones
            if not equal and int((offsets - offsets_torch).abs().max()) > 1000:
                raise RuntimeError("select and torch.topk keep different rows")
            del expected, positions, positions_torch
        self.time("refine", 8 * scores.numel(), refine, lambda: torch_steps.refine(scores, float(alpha), window, c))
        self.time(
            "select",
            4 * (scores.numel() + rows),
            lambda: ops.select(refined, 1, rows),
            lambda: torch_steps.select(refined, rows),
        )
        return refined[: self.row_layers].clone()

    def compact_and_attend(self, refined: torch.Tensor) -> Cell:
        s, layers, rows = self.shape, self.row_layers, self.kept(self.row_layers)
        positions, offsets = ops.select(refined, 1, rows)
        batch = max(1, -(-COLD_BYTES // (rows * s.row_bytes)))
        cache = RaggedCache(s, layers, rows, batch, offsets)
        self.compact(positions, offsets, cache)
        padding = self.attend(cache, offsets)
        kept = rows * s.row_bytes
        return Cell(
            self.tokens, self.score_layers, layers, batch, kept, padding, self.ours, self.theirs, self.num_bytes
        )

    def compact(self, positions: torch.Tensor, offsets: torch.Tensor, cache: RaggedCache) -> None:
        """Into the cache's first segment. Dense K and V are gone when this returns."""
        dense = [make_rows(self.row_layers, self.shape, self.tokens) for _ in "kv"]
        k, v = ([x.transpose(0, 1) for x in side] for side in dense)
        k_rows, v_rows = cache.rows(0)
        index: list[torch.Tensor] = []
        torch_k = torch_v = torch.empty(0)
        if self.peers:
            index = torch_steps.flat_rows(positions, offsets, self.row_layers)
            torch_k, torch_v = torch.zeros_like(k_rows), torch.zeros_like(v_rows)
        self.time(
            "compact",
            2 * len(positions) * self.shape.row_bytes,
            lambda: ops.compact_into(k, v, positions, offsets, k_rows, v_rows),
            lambda: torch_steps.compact(dense[0], dense[1], index, torch_k, torch_v),
        )
        if self.peers and not (torch.equal(k_rows, torch_k) and torch.equal(v_rows, torch_v)):
            raise RuntimeError("compact and index_select give different rows")

    def attend(self, cache: RaggedCache, offsets: torch.Tensor) -> float:
        s, layers, batch = self.shape, self.row_layers, cache.batch
        for b in range(1, batch):
            for target, source in zip(cache.rows(b), cache.rows(0), strict=True):
                target.copy_(source)
        dtype = cache.rows(0)[0].dtype
        q = torch.randn(batch, 1, s.num_kv_heads * s.group_size, s.head_dim).to(dtype)
        new = [torch.randn(batch, 1, s.num_kv_heads, s.head_dim).to(dtype) for _ in "kv"]
        padded: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        if self.peers:
            padded = cache.padded(offsets, new, s.group_size)
            for layer in (0, layers - 1):
                expected = torch_steps.attend(q.transpose(1, 2), *padded[layer]).transpose(1, 2)
                tolerance = 1e-4 if dtype is torch.float32 else 2e-2
                torch.testing.assert_close(cache.attend(layer, q, *new), expected, rtol=tolerance, atol=tolerance)

        def ours() -> None:
            for layer in range(layers):
                cache.attend(layer, q, *new)

        def theirs() -> None:
            for layer in padded:
                torch_steps.attend(q.transpose(1, 2), *layer)

        kept_bytes = batch * int(offsets[-1]) * s.row_bytes
        self.time("attend", kept_bytes, ours, theirs)
        return sum(k.shape[0] * k.shape[1] * k.shape[2] for k, _, _ in padded) * s.row_bytes / kept_bytes


def main() -> None:
    parser = common.arguments(DESCRIPTION, EPILOG)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all", help="whose cache (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="prompt lengths (default: 1k .. 1M)")
    parser.add_argument("--ratio", type=float, default=0.75, help="compression ratio r (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=float,
        default=4.5,
        metavar="GIB",
        help="dense K and V at most; layers beyond are left out (default: %(default)s)",
    )
    parser.add_argument("--no-torch", dest="peers", action="store_false", help="only our stages")
    args = parser.parse_args()
    if not 0 <= args.ratio < 1:
        parser.error(f"--ratio: {args.ratio} is not in [0, 1)")
    if args.tokens and min(args.tokens) < 16:
        parser.error(f"--tokens: {min(args.tokens)} is not at least 16")
    run(args)


def run(args: argparse.Namespace) -> None:
    common.set_threads(args.threads)
    seconds = 0.3 if args.quick else 1.5
    info = common.machine()
    print(common.machine_line(info))
    before = common.copy_bandwidth(args.threads, 512 * common.MIB, seconds * 2)
    cells: dict[str, list[Cell]] = {}
    for name in SHAPES if args.shape == "all" else [args.shape]:
        cells[name] = []
        for tokens in args.tokens or ([1024, 8192] if args.quick else TOKENS[name]):
            common.progress(f"{name}, T = {tokens}")
            bench = Bench(SHAPES[name], tokens, args.ratio, int(args.memory * common.GIB), seconds, args.peers)
            cells[name].append(bench.run())
            del bench
    after = common.copy_bandwidth(args.threads, 512 * common.MIB, seconds * 2)
    copy, read = max(before, after, key=lambda b: b.best), common.read_bandwidth()
    print(
        f"copy bandwidth, read + written: {copy.best / 1e9:.1f} GB/s ({copy.name}; median of the runs "
        f"{statistics.mean([before.median, after.median]) / 1e9:.1f}); "
        f"reading alone: {read.best / 1e9:.1f} GB/s ({read.name}); r = {args.ratio}; best times\n"
    )
    for name, found in cells.items():
        print(report(name, found, copy) + "\n")
    print(targets([c for found in cells.values() for c in found], copy))
    common.write_json(args.json, machine=info, copy=copy, read=read, ratio=args.ratio, cells=cells)


if __name__ == "__main__":
    main()
