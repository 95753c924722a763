# SPDX-License-Identifier: Apache-2.0
"""The TensorRT plugins: in TensorRT's own registry, and driven through their whole life over the emulated kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hubkv_trt import reference
from plugin import harness, registry
from plugin.harness import Library, Tensor, log, tensor
from ragged_cache import as_numpy, new_rows, random_cache
from simt.library import ROOT, run_under_asan

# An "asan" library loads only in a process that run_under_asan() starts.
MODE = "asan" if os.environ.get("HUBKV_TEST_DEVICE") == "sanitized" else "plain"
NAMES = list(registry.GOOD)
ROW_TYPES = ["float32", "float16", "uint16"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


# ---- in TensorRT's registry ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_registry() -> tuple[dict, str]:
    command = [sys.executable, Path(registry.__file__), harness.host_only(), "100"]
    done = subprocess.run([str(x) for x in command], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_registry_finds_and_creates_every_plugin(in_registry: tuple[dict, str]) -> None:
    seen, _ = in_registry
    assert seen["created"] == [[name, True] for name in NAMES for _ in range(2)]
    kinds = {name: {n: v.dtype.name.upper() for n, v in fields.items()} for name, fields in registry.GOOD.items()}
    listed = {
        name: {n: {"1": "FLOAT32", "5": "INT32", "10": "INT64"}.get(t, t) for n, t in fields.items()}
        for name, fields in seen["fields"].items()
    }
    assert listed == kinds


def test_documented_fields_are_those_that_there_are(in_registry: tuple[dict, str]) -> None:
    sections = (ROOT / "docs" / "plugin.md").read_text().split("\n### ")[1:]
    documented = {}
    for section in sections:
        rows = [line for line in section.splitlines() if line.startswith("| field |")]
        documented[section.split("\n", 1)[0]] = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {name: set(fields) for name, fields in in_registry[0]["fields"].items()}


def test_registry_gets_null_for_bad_fields(in_registry: tuple[dict, str]) -> None:
    seen, stderr = in_registry
    assert len(seen["refused"]) == len(registry.refusals())
    messages = stderr.split("== ")[1:]
    for (name, said, refused), message in zip(seen["refused"], messages, strict=True):
        assert refused, (name, said)
        for part in said.split("|"):
            assert part in message.split("\n", 1)[1], (name, said)


def test_library_loads_and_unloads(in_registry: tuple[dict, str]) -> None:
    seen, _ = in_registry
    assert seen["cycles"] == 100
    assert not seen["left"]


def test_exports_and_dependencies() -> None:
    for file in (harness.host_only(), harness.emulated()):
        symbols = subprocess.run(["nm", "-D", "--defined-only", file], check=True, capture_output=True, text=True)
        assert {line.split()[-1] for line in symbols.stdout.splitlines()} == {"getCreators", "setLoggerFinder"}
        needed = subprocess.run(["ldd", file], check=True, capture_output=True, text=True).stdout
        assert "libc.so" in needed
        assert not any(word in needed for word in ("nvinfer", "libhubkv", "cudart", "not found"))


# ---- described -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugins() -> Iterator[Library]:
    library = Library(harness.emulated(MODE))
    assert library.num_creators == len(NAMES)
    yield library
    library.close()


def node(name: str, rows: str = "float32", L: int = 3, Hkv: int = 2, T: int = 40, D: int = 16) -> list[Tensor]:
    """Inputs of a node of each kind."""
    B, N, G, K = 2, 6, 4, 50
    int32, int64 = (lambda *s: tensor("int32", *s)), (lambda *s: tensor("int64", *s))
    if name == "HubKVRefine":
        return [tensor("float32", L, Hkv, T), tensor("float32", 1), int32(1)]
    if name == "HubKVSelect":
        return [tensor("float32", L, Hkv, T)]
    if name == "HubKVCompact":
        return [tensor(rows, T, Hkv, D)] * (2 * L) + [int32(K), int64(L * Hkv + 1)]
    if name == "HubKVPlan":
        return [int64(2), int64(B, 4)]
    q, k = tensor(rows, N, Hkv * G, D), tensor(rows, N, Hkv, D)
    return [q, k, k, int64(2), int64(B, 4), int32(B, 5), int32(B), int32(B), int32(L, 20, 4), int32(L)]


FIELDS: dict[str, dict] = {
    "HubKVRefine": {},
    "HubKVSelect": {"num_groups": 3},
    "HubKVCompact": {},
    "HubKVPlan": {"num_layers": 3, "num_kv_heads": 2, "capacity": 20},
    "HubKVAttend": {"layer": 1, "page_tokens": 16},
}
SHAPE_VALUES = {"HubKVSelect": (17,)}
OUTPUTS = {
    "HubKVRefine": [("float32", (3, 2, 40)), ("int64", (1,))],
    "HubKVSelect": [("int32", (51,)), ("int64", (7,))],
    "HubKVCompact": [("rows", (50, 16)), ("rows", (50, 16))],
    "HubKVPlan": [("int32", (3, 20, 4)), ("int32", (3,))],
    "HubKVAttend": [("rows", (6, 8, 16))],
}


@pytest.mark.parametrize("rows", ROW_TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_formats(plugins: Library, name: str, rows: str) -> None:
    plugin = plugins.make(name, **FIELDS[name])
    inputs = node(name, rows)
    outputs = plugin.outputs(inputs, *SHAPE_VALUES.get(name, ()))
    assert outputs is not None, log()
    assert [(x.dtype.name, x.shape) for x in outputs] == [(t.replace("rows", rows), s) for t, s in OUTPUTS[name]]
    assert plugin.num_tactics == 0
    right = [*inputs, *outputs]
    for position, item in enumerate(right):
        accepted = []
        for number in range(12):
            for layout in range(13):
                others = list(right)
                others[position] = Tensor(number, layout, item.rank, item.d)
                if plugin.supports(position, others, len(inputs)):
                    accepted.append((number, layout))
        # The first row tensor chooses the type; all else is fixed, and linear.
        chooses = position == 0 and name in ("HubKVCompact", "HubKVAttend")
        assert accepted == ([(0, 0), (1, 0), (7, 0)] if chooses else [(item.type, 0)])


@pytest.mark.parametrize("name", NAMES)
def test_fields_survive_serialization_and_clones(plugins: Library, name: str) -> None:
    plugin = plugins.create(name, **registry.GOOD[name])
    assert plugin is not None
    wanted = {n: v.item() for n, v in registry.GOOD[name].items()}
    assert plugin.fields() == wanted
    for other in (plugin.clone(), plugin.reload(), plugin.reload().clone().attach()):
        assert other.fields() == wanted
        assert other.address.value != plugin.address.value


@pytest.mark.parametrize("name", NAMES)
def test_refuses_wrong_nodes(plugins: Library, name: str) -> None:
    plugin = plugins.make(name, **FIELDS[name])
    inputs = node(name)
    outputs = plugin.outputs(inputs, *SHAPE_VALUES.get(name, ()))
    assert outputs is not None
    assert plugin.configure(inputs, outputs) == 0, log()
    runtime = plugin.reload()
    assert runtime.shape_change(inputs, outputs) == 0, log()
    assert plugin.outputs(inputs[:-1], *SHAPE_VALUES.get(name, ())) is None
    assert "inputs: " in log()
    for position in range(len(inputs)):
        for change in ("type", "rank", "negative"):
            wrong = list(inputs)
            item = Tensor.from_buffer_copy(inputs[position])
            if change == "type":
                item.type = 2
            elif change == "rank":
                item.rank = 7
            else:
                item.d[0] = -1
            wrong[position] = item
            assert runtime.shape_change(wrong, outputs) != 0, (position, change)
            assert log().startswith(f"1 {name}: ")


def test_select_needs_its_shape_tensor(plugins: Library) -> None:
    plugin = plugins.make("HubKVSelect")
    assert plugin.outputs(node("HubKVSelect")) is None
    assert "rows_per_group: one shape tensor" in log()
    assert plugin.outputs(node("HubKVSelect"), 1, 2) is None


@pytest.mark.parametrize("name", ["HubKVRefine", "HubKVSelect", "HubKVAttend"])
def test_workspace_of_a_profile_covers_what_lies_below(plugins: Library, name: str) -> None:
    plugin = plugins.make(name, **{**FIELDS[name], **({"num_groups": 1} if name == "HubKVSelect" else {})})
    sizes = []
    for T, D in ((1, 8), (40, 16), (5000, 64), (20000, 256)):
        inputs = node(name, T=T, D=D)
        outputs = plugin.outputs(inputs, *((1,) if name == "HubKVSelect" else ()))
        assert outputs is not None
        sizes.append(plugin.workspace(inputs, outputs))
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def test_random_nodes_never_crash(plugins: Library) -> None:
    random = np.random.default_rng(0)
    sizes = [-(2**63), -1, 0, 1, 2, 3, 4, 7, 16, 2**31 - 1, 2**31, 2**62, 2**63 - 1]
    for _ in range(3000):
        name = NAMES[random.integers(len(NAMES))]
        plugin = plugins.make(name, **FIELDS[name])

        def some(count: int) -> list[Tensor]:
            items = [tensor("int32") for _ in range(count)]
            for item in items:
                item.type, item.format = int(random.integers(12)), int(random.integers(13))
                item.rank = int(random.integers(0, 8))
                item.d[:] = [sizes[i] for i in random.integers(len(sizes), size=8)]
            return items

        inputs, outputs = some(int(random.integers(1, 12))), some(plugin.num_outputs)
        if random.random() < 0.5:
            inputs = node(name)
            inputs[random.integers(len(inputs))] = some(1)[0]
        plugin.configure(inputs, outputs)
        plugin.workspace(inputs, outputs)
        plugin.reload().shape_change(inputs, outputs)
        plugin.supports(int(random.integers(-2, 14)), inputs + outputs, len(inputs))
    assert log()


def test_random_fields_never_crash(plugins: Library) -> None:
    random = np.random.default_rng(0)
    names = [n.encode() for fields in registry.GOOD.values() for n in fields] + [b"", None]
    made = 0
    for _ in range(5000):
        data = np.frombuffer(random.bytes(64), np.uint8)
        if random.random() < 0.5:
            data = np.array([random.integers(0, 40), 0], np.int32)
        name = NAMES[random.integers(len(NAMES))]
        own = [n.encode() for n in registry.GOOD[name]]
        fields = [
            harness.Field(
                (own if random.random() < 0.8 else names)[random.integers(len(own))],
                None if random.random() < 0.05 else data.ctypes.data,
                int(random.choice([1, 5, 5, 10, *range(14)])),
                int(random.choice([1, 1, 1, 1, 0, -1, 2**31 - 1])),
            )
            for _ in range(random.integers(0, 5))
        ]
        made += plugins.create_raw(name, fields) is not None
    assert 0 < made < 5000
    assert "no field of this name" in log()


# ---- run: the emulated kernels against the oracles -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 40), (2, 3, 4500)])
def test_refine_equals_oracle(plugins: Library, shape: tuple[int, ...]) -> None:
    scores = np.random.default_rng(1).random(shape, np.float32)
    scores[0, 0, 0] = np.nan
    alpha, window = np.array([0.81], np.float32), np.array([7], np.int32)
    refined, bad = plugins.make("HubKVRefine", nms_kernel=7, sink_tokens=2).run([scores, alpha, window])
    want, want_bad = reference.refine(scores, alpha, window, 7, 0.5, 0.5, 0.8, 1.2, 2)
    np.testing.assert_array_equal(refined, want)
    np.testing.assert_array_equal(bad, want_bad)


@pytest.mark.parametrize(("groups", "rows"), [(1, 300), (3, 17), (6, 0), (6, 700), (1, 1)])
def test_select_equals_oracle(plugins: Library, groups: int, rows: int) -> None:
    refined = np.random.default_rng(2).integers(0, 50, (3, 2, 700)).astype(np.float32)
    got = plugins.make("HubKVSelect", num_groups=groups).run([refined], rows)
    for x, y in zip(got, reference.select(refined, groups, rows), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("token_major", [0, 1])
def test_compact_equals_oracle(plugins: Library, dtype: str, token_major: int) -> None:
    random = np.random.default_rng(3)
    L, Hkv, T, D, K = 3, 2, 70, 24, 90
    refined = random.random((L, Hkv, T), np.float32)
    positions, offsets = reference.select(refined, 1, K)
    shape = (T, Hkv, D) if token_major else (Hkv, T, D)
    rows = [(random.random(shape) * 1000).astype(dtype) for _ in range(2 * L)]
    got = plugins.make("HubKVCompact", token_major=token_major).run([*rows, positions, offsets])
    heads = [x.swapaxes(0, 1) if token_major else x for x in rows]
    for x, y in zip(got, reference.compact(heads[:L], heads[L:], positions, offsets), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 5])
def test_plan_and_attend_equal_oracles(plugins: Library, dtype: torch.dtype, num_new: int) -> None:
    sequences: list[tuple[int | None, int]] = [(70, 20), (None, 5), (33, 0)]
    cache = random_cache(sequences=sequences, head_dim=64, dtype=dtype, row_bias=True)
    memory = cache.arena.numpy()
    arena = np.array([memory.ctypes.data, memory.nbytes], np.int64)
    tables = [as_numpy(x) for x in (cache.segments, cache.block_table, cache.tail_lengths)]
    L, Hkv, capacity = cache.num_layers, cache.num_kv_heads, len(sequences) * cache.num_kv_heads + 16
    plan = plugins.make("HubKVPlan", num_layers=L, num_kv_heads=Hkv, capacity=capacity, min_rows_per_item=32)
    work, count = plan.run([arena, tables[0]])
    for layer, (items, n) in enumerate(zip(*reference.plan(memory, tables[0], L, Hkv, capacity, 32), strict=True)):
        assert count[layer] == n
        np.testing.assert_array_equal(work[layer, :n], items[:n])
    lengths = np.array([num_new, 1, num_new], np.int32)
    for layer in range(L):
        rows = new_rows(cache, num_new, 3, seed=layer)
        attend = plugins.make(
            "HubKVAttend", layer=layer, page_tokens=cache.page_tokens, page_base=cache.page_base, scale=0.2
        )
        q, k, v = (as_numpy(x) for x in rows)
        want = cache.oracle(*rows, layer=layer, new_lengths=torch.from_numpy(lengths), scale=0.2)
        for flat in (False, True):
            new = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)] if flat else [q, k, v]
            (out,) = attend.run([*new, arena, tables[0], tables[1], tables[2], lengths, work, count])
            got = torch.from_numpy(out.reshape(q.shape))
            got = got.view(torch.bfloat16) if dtype == torch.bfloat16 else got
            np.testing.assert_allclose(got.double().numpy(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_contexts_are_apart(plugins: Library) -> None:
    random = np.random.default_rng(4)
    runtime = plugins.make("HubKVRefine").reload()
    window, alpha = np.array([3], np.int32), np.array([0.5], np.float32)
    cases = [random.random(shape, np.float32) for shape in ((2, 2, 30), (1, 3, 90))]
    contexts, outputs = [runtime.attach() for _ in cases], []
    for context, scores in zip(contexts, cases, strict=True):
        inputs = [harness.describe(x) for x in (scores, alpha, window)]
        outputs.append([np.empty(scores.shape, np.float32), np.empty(1, np.int64)])
        assert context.shape_change(inputs, [harness.describe(x) for x in outputs[-1]]) == 0
    for context, scores, out in zip(contexts, cases, outputs, strict=True):
        assert context.enqueue([scores, alpha, window], out, 1 << 20) == 0, log()
    for scores, out in zip(cases, outputs, strict=True):
        np.testing.assert_array_equal(out[0], reference.refine(scores, alpha, window, 5, 0.5, 0.5, 0.8, 1.2, 4)[0])


def junk(item: Tensor, random: np.random.Generator) -> np.ndarray:
    return np.frombuffer(random.bytes(int(np.prod(item.shape)) * item.dtype.itemsize), item.dtype).reshape(item.shape)


@pytest.mark.parametrize("name", NAMES)
def test_build_phase_writes_zeros_whatever_it_reads(plugins: Library, name: str) -> None:
    plugin = plugins.make(name, **FIELDS[name])
    described = node(name)
    wanted = plugin.outputs(described, *SHAPE_VALUES.get(name, ()))
    assert wanted is not None
    assert plugin.configure(described, wanted) == 0
    inputs = [junk(x, np.random.default_rng(5)) for x in described]
    outputs = [np.full(x.shape, 7, x.dtype) for x in wanted]
    assert plugin.attach().enqueue(inputs, outputs, plugin.workspace(described, wanted)) == 0, log()
    assert not any(x.any() for x in outputs)


def test_failures_reach_the_logger(plugins: Library) -> None:
    refine = plugins.make("HubKVRefine").reload()
    scores, alpha, window = np.zeros((1, 1, 4), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    outputs = [np.zeros((1, 1, 4), np.float32), np.zeros(1, np.int64)]
    log()
    assert refine.enqueue([scores, alpha, window], outputs, 0) != 0
    assert log() == "1 HubKVRefine: enqueue before configurePlugin or onShapeChange\n"


def test_core_without_cuda_answers_an_error() -> None:
    library = Library(harness.host_only())
    plugin = library.make("HubKVCompact")
    described = node("HubKVCompact")
    wanted = plugin.outputs(described)
    assert wanted is not None
    inputs = [np.zeros(x.shape, x.dtype) for x in described]
    outputs = [np.full(x.shape, 7, x.dtype) for x in wanted]
    for context in (plugin, plugin.reload()):
        assert context.shape_change(described, wanted) == 0
        assert context.enqueue(inputs, outputs, 0) != 0
        assert "not built with CUDA" in log()
    assert all((x == 7).all() for x in outputs)
    del plugin, context
    library.close()


def test_sanitizers_find_nothing() -> None:
    harness.emulated("asan")
    done = run_under_asan(
        "-c",
        "import os, sys, pytest; os.environ['HUBKV_TEST_DEVICE'] = 'sanitized'; sys.exit(pytest.main(sys.argv[1:]))",
        *(
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "not registry and not unloads and not documented and not exports and not sanitizers",
        ),
        *("--deselect", f"{__file__}::test_core_without_cuda_answers_an_error", __file__),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_sanitizers_would_find_something() -> None:
    """refine, given less memory than its descriptions say."""
    script = """
import numpy as np
from plugin import harness
library = harness.Library(harness.emulated("asan"))
plugin = library.make("HubKVRefine").reload()
inputs = [np.zeros((1, 2, 4000), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)]
outputs = [np.zeros((1, 2, 4000), np.float32), np.zeros(1, np.int64)]
described = [harness.describe(x) for x in inputs], [harness.describe(x) for x in outputs]
assert plugin.shape_change(*described) == 0
small = np.zeros(7999, np.float32)  # one value less
outputs[0] = np.lib.stride_tricks.as_strided(small, (1, 2, 4000), (32000, 16000, 4))
plugin.enqueue(inputs, outputs, 1 << 20)
"""
    harness.emulated("asan")
    done = run_under_asan("-c", script)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
