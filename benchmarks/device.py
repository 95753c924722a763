# SPDX-License-Identifier: Apache-2.0
"""The stages on a GPU: time, bytes/s over the copy bandwidth of the run, torch beside."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch  # first, as in stages.py

# isort: split
import common
import torch_steps
from device_clock import Call, DeviceTiming, copy_bandwidth, measure, measure_peer
from hubkv_trt import ops
from hubkv_trt.config import DEFAULT_PRESET, DType, HubKVConfig
from ragged import RaggedCache, Shape, draw_scores, make_rows

DESCRIPTION = """\
Times the stages on CUDA tensors. Every time is the median over replays of a CUDA graph that
holds the calls, on inputs that together exceed the caches; "from Python" is the same without
a graph, launches included. Results are compared with torch's before anything is timed.

  refine    reads and writes 4 bytes a KV pair
  select    reads 4 bytes a pair and writes 4 a kept row
  compact   reads and writes every kept row of K and V once
  attend    reads every kept row once; one new token a sequence
  append    reads and writes every new row once

torch: max_pool1d and element-wise operations; topk, sort and searchsorted; index_select;
scaled_dot_product_attention over rows padded to the longest head, with a mask, and
without one (which attends to the padding, too: the fastest torch could be)."""
EPILOG = """\
examples:
  python benchmarks/device.py
  python benchmarks/device.py --quick --device cpu    shows, without a GPU, that it works"""
COLD_BYTES = 256 * common.MIB  # five times the second-level cache of an H200
RATIO = 0.75


@dataclass
class Row:
    """One stage on one shape, and whether it reached the target that is set for it."""

    stage: str
    case: str
    num_bytes: int
    ours: DeviceTiming
    torch: dict[str, DeviceTiming] = field(default_factory=dict)
    target: str = ""


class Bench:
    """Args:
    device: "cuda", or "cpu" to see the script work.
    quick: small shapes, which caches hold.
    """

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.hubkv = HubKVConfig.from_preset(DEFAULT_PRESET)
        self.rows: list[Row] = []
        self.copy = copy_bandwidth(device, common.MIB if quick else common.GIB)

    def add(self, stage: str, case: str, num_bytes: int, ours: list[Call], **peers: list[Call]) -> Row:
        common.progress(f"{stage}: {case}")
        row = Row(stage, case, num_bytes, measure(ours), {name: measure_peer(calls) for name, calls in peers.items()})
        self.rows.append(row)
        return row

    def scores(self, layers: int, heads: int, tokens: int) -> None:
        """refine, select and both of [L, Hkv, T] scores."""
        c, window = self.hubkv, self.hubkv.window(tokens)
        first = draw_scores(layers, heads, tokens, self.device)
        count = 1 if self.quick else max(2, min(64, COLD_BYTES // (4 * first.numel())))
        scores = [first, *(first.roll(n, -1).contiguous() for n in range(1, count))]
        alpha = torch.tensor([c.alpha(RATIO)], dtype=torch.float32, device=self.device)
        windows = torch.tensor([window], dtype=torch.int32, device=self.device)
        rows = first.numel() - int(RATIO * first.numel())
        weights = (c.head_weight_temperature, c.min_head_weight, c.max_head_weight)
        bounds = torch.arange(layers * heads + 1, device=self.device) * tokens

        def refine(x: torch.Tensor) -> torch.Tensor:
            return ops.refine(x, alpha, windows, c.nms_kernel, c.penalty_factor, *weights, c.sink_tokens)[0]

        def refine_torch(x: torch.Tensor) -> torch.Tensor:
            return torch_steps.refine(x, c.alpha(RATIO), window, c)

        def select_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept = torch.topk(x.flatten(), rows, sorted=False).indices.sort().values
            return (kept % tokens).int(), torch.searchsorted(kept, bounds)

        refined = [refine(x) for x in scores]
        torch.testing.assert_close(refined[0], refine_torch(first), rtol=1e-5, atol=1e-6)
        distance = (ops.select(refined[0], 1, rows)[1] - select_torch(refined[0])[1]).abs().max()
        if int(distance) > 1000:  # topk takes any of several equal values at the border
            raise RuntimeError("select and torch.topk keep different rows")
        case = f"{first.numel() / 1e6:.1f}M scores"
        refine_bytes, select_bytes = 8 * first.numel(), 4 * (first.numel() + rows)
        self.add("refine", case, refine_bytes, over(refine, scores), torch=over(refine_torch, scores))
        self.add(
            "select",
            case,
            select_bytes,
            over(lambda x: ops.select(x, 1, rows), refined),
            torch=over(select_torch, refined),
        )
        both = self.add(
            "refine + select", case, refine_bytes + select_bytes, over(lambda x: ops.select(refine(x), 1, rows), scores)
        )
        per_million = both.ours.device / first.numel() * 1e12
        both.target = f"<= 50 us per 1M scores: {per_million:.1f} us, {verdict(per_million <= 50)}"

    def compact(self, shape: Shape, tokens: int) -> None:
        """All layers of one prompt in one call."""
        refined = draw_scores(shape.num_layers, shape.num_kv_heads, tokens, self.device)
        rows = refined.numel() - int(RATIO * refined.numel())
        positions, offsets = ops.select(refined, 1, rows)
        dense = [make_rows(shape.num_layers, shape, tokens, self.device) for _ in "kv"]
        k, v = ([x.transpose(0, 1) for x in side] for side in dense)
        index = torch_steps.flat_rows(positions, offsets, shape.num_layers)
        ours, theirs = ([x.new_empty(rows, shape.head_dim) for x in (k[0], v[0])] for _ in range(2))

        def compact() -> None:
            ops.compact_into(k, v, positions, offsets, *ours)

        def compact_torch() -> None:
            torch_steps.compact(*dense, index, *theirs)

        compact()
        compact_torch()
        if not all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)):
            raise RuntimeError("compact and index_select give different rows")
        heads = shape.num_layers * shape.num_kv_heads
        case = f"{heads} heads, {rows // heads} rows each"
        row = self.add("compact", case, 2 * rows * shape.row_bytes + 4 * rows, [compact] * 4, torch=[compact_torch] * 4)
        self.bandwidth_target(row)

    def attend(self, shape: Shape, batch: int, rows_per_head: int) -> None:
        """One new token of B sequences; the layers lie apart in memory and are called in turn."""
        tokens = 4 * rows_per_head
        scores = draw_scores(shape.num_layers, shape.num_kv_heads, tokens, self.device)
        _, offsets = ops.select(scores, 1, scores.numel() // 4)
        rows, heads = int(offsets[-1]), batch * shape.num_kv_heads
        dtype = getattr(torch, shape.dtype.value)
        q = torch.randn(batch, 1, shape.num_kv_heads * shape.group_size, shape.head_dim, device=self.device).to(dtype)
        new = [torch.randn(batch, 1, shape.num_kv_heads, shape.head_dim, device=self.device).to(dtype) for _ in "kv"]
        cache = RaggedCache(shape, shape.num_layers, rows, batch, offsets)
        for side in cache.rows(0):
            side.normal_()
        for b in range(1, batch):
            for target, source in zip(cache.rows(b), cache.rows(0), strict=True):
                target.copy_(source)
        padded = cache.padded(offsets, new, shape.group_size)
        num_bytes = batch * rows * shape.row_bytes // shape.num_layers
        case = f"B = {batch}, Hkv = {shape.num_kv_heads}, G = {shape.group_size}, {rows_per_head} rows"
        for items in (6 * heads, 16 * heads, 32 * heads):
            cache.plan(items - heads)
            row = self.add("attend", f"{case}, {items} items", num_bytes, self.attend_calls(cache, q, new))
            self.bandwidth_target(row)
        expected = torch_steps.attend(q.transpose(1, 2), *padded[-1])
        out = cache.attend(shape.num_layers - 1, q, *new).transpose(1, 2)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)

        def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, enable_gqa=shape.group_size > 1
            )

        masked = [lambda x=x: torch_steps.attend(q.transpose(1, 2), *x) for x in padded]
        row.torch["torch"] = measure_peer(masked)
        row.torch["without mask"] = measure_peer([lambda k=k, v=v: sdpa(k, v) for k, v, _ in padded])

    def attend_calls(self, cache: RaggedCache, q: torch.Tensor, new: list[torch.Tensor]) -> list[Call]:
        return [lambda layer=layer: cache.attend(layer, q, *new) for layer in range(cache.layers)]

    def tables(self, shape: Shape, batch: int) -> None:
        """append of one token, and plan."""
        _, offsets = ops.select(draw_scores(shape.num_layers, shape.num_kv_heads, 64, self.device), 1, 128)
        cache = RaggedCache(shape, shape.num_layers, 128, batch, offsets)
        page = shape.num_layers * shape.num_kv_heads * 16 * shape.row_bytes
        arena = torch.zeros(batch * page, dtype=torch.uint8, device=self.device)
        pages = torch.arange(batch, dtype=torch.int32, device=self.device)[:, None]
        sizes = (shape.num_layers, batch, 1, shape.num_kv_heads, shape.head_dim)
        k, v = (torch.randn(sizes, device=self.device).to(getattr(torch, shape.dtype.value)) for _ in "kv")
        num_bytes = 2 * shape.num_layers * batch * shape.num_kv_heads * shape.row_bytes
        case = f"L = {shape.num_layers}, B = {batch}"
        self.add("append", case, num_bytes, [lambda: ops.append(k, v, arena, pages, cache.tails, None, 16, 0)] * 8)
        listed = 16 * shape.num_layers * 16 * batch * shape.num_kv_heads
        self.add("plan", case, listed, [lambda: cache.plan(15 * batch * shape.num_kv_heads)] * 8)

    def bandwidth_target(self, row: Row) -> None:
        share = row.num_bytes / row.ours.device / self.copy
        row.target = f">= 80 % of copy: {100 * share:.0f} %, {verdict(share >= 0.8)}"

    def run(self) -> None:
        bf16 = DType.BFLOAT16
        if self.quick:
            self.scores(2, 2, 2048)
            self.compact(Shape(2, 2, 1, 64, bf16), 256)
            self.attend(Shape(2, 2, 2, 64, bf16), 2, 128)
            self.tables(Shape(2, 2, 1, 64, bf16), 2)
            return
        self.scores(32, 8, 4096)
        self.scores(32, 8, 131_072)
        self.compact(Shape(8, 8, 1, 128, bf16), 32_768)
        for group in (1, 4):
            self.attend(Shape(2, 8, group, 128, bf16), 8, 8192)
        self.tables(Shape(32, 8, 1, 128, bf16), 32)

    def report(self) -> str:
        lines = []
        for row in self.rows:
            rate = row.num_bytes / row.ours.device
            cells = [row.stage, row.case, f"{row.num_bytes / 1e6:.1f}", common.human_seconds(row.ours.device)]
            cells += [f"{rate / 1e9:.0f}", f"{100 * rate / self.copy:.0f}", common.human_seconds(row.ours.python)]
            for name in ("torch", "without mask"):
                peer = row.torch.get(name)
                cells.append(
                    f"{common.human_seconds(peer.device)}, {peer.device / row.ours.device:.1f}x" if peer else "-"
                )
            lines.append(cells)
        header = ["stage", "case", "MB", "time", "GB/s", "% of copy", "from Python", "torch", "torch without mask"]
        return common.table(header, lines)


def over(call: Callable[[torch.Tensor], object], inputs: list[torch.Tensor]) -> list[Call]:
    return [lambda x=x: call(x) for x in inputs]


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--json", type=common.Path, metavar="FILE", help="also write every figure, unrounded, to FILE")
    args = parser.parse_args()
    bench = Bench(args.device, args.quick)
    bench.run()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, copy {bench.copy / 1e9:.0f} GB/s (read + written)\n")
    print(bench.report() + "\n")
    for row in bench.rows:
        if row.target:
            print(f"{row.stage}, {row.case}: {row.target}")
    common.write_json(args.json, device=name, torch=torch.__version__, copy=bench.copy, rows=bench.rows)


if __name__ == "__main__":
    main()
