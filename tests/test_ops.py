# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them, and the library below: found, loaded, refused."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hubkv_trt
from decoding_cache import decoding_cache
from hubkv_trt import _abi, _library, _operators, ops
from hubkv_trt._library import call, workspace_bytes
from hubkv_trt._tensors import BoundedCache
from ragged_cache import new_rows, random_cache

HEADER = Path(__file__).parents[1] / "cpp" / "include" / "hubkv" / "hubkv.h"


def samples() -> dict[str, tuple]:
    """Arguments of each operator."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(2, 2, 60, generator=generator)
    k, v = ([torch.randn(2, 60, 16, generator=generator) for _ in range(2)] for _ in range(2))
    positions, offsets = ops.select(scores, 1, 50)
    cache = random_cache(sequences=[(20, 5), (None, 2)])
    q, k_new, v_new = new_rows(cache, 2, 3)
    all_new = new_rows(cache, 2, 3, layers=2)[1:]
    lengths = torch.tensor([2, 1], dtype=torch.int32)
    tail = (cache.block_table, cache.tail_lengths, lengths)
    sizes = (cache.page_tokens, cache.page_base)
    return {
        "refine": (scores, torch.full((1,), 0.5), torch.full((1,), 3, dtype=torch.int32), 5, 0.5, 0.5, 0.8, 1.2, 4),
        "select": (scores, 2, 25),
        "compact": (k, v, positions, offsets),
        "compact_into": (k, v, positions, offsets, torch.zeros(50, 16), torch.zeros(50, 16)),
        "plan": (cache.arena, cache.segments, 2, 2, 20, 16),
        "attend": (q, k_new, v_new, cache.arena, cache.segments, *tail, *cache.plan(), 1, 2, *sizes, 0.0),
        "append": (*all_new, cache.arena, *tail, *sizes),
        **decoding_samples(),
    }


def decoding_samples() -> dict[str, tuple]:
    decoding = decoding_cache(row_bias=True)
    arguments = decoding.score_arguments(decoding.queries(5, 2), "snapkv")
    raw, transformed, *candidates = ops.score_window(*arguments)
    calibration = (raw, transformed, *candidates, 2, 0.9, 4, 2, 40, 70, False)
    counts, *_ = ops.calibrate_top_p(*calibration)
    selection = (transformed, *candidates, counts, int(counts.sum()), 4)
    indices, head_offsets = ops.select_ragged(*selection)
    rows, cache, later = len(indices), decoding.cache, decoding.queries(3, 2)
    sizes = (decoding.positions.numel(), decoding.tail_tokens, decoding.tail_base, 2, cache.page_tokens)
    outputs = (torch.zeros(rows, 64), torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.int32), torch.zeros(rows))
    return {
        "score_window": arguments,
        "held_out_loss": (
            *(later, transformed, candidates[0], *decoding.tables, decoding.tail_tokens),
            *(int(cache.tail_lengths[0]), cache.num_kv_heads, cache.page_tokens, cache.page_base, 4, 0.0),
        ),
        "calibrate_top_p": calibration,
        "select_ragged": selection,
        "rewrite_into": (candidates[0], indices, head_offsets, *decoding.tables, *sizes, cache.page_base, *outputs),
        "merge_into": (
            *(raw, candidates[0], indices, head_offsets, *decoding.tables, *sizes, cache.page_base, 2),
            *(torch.cat([x, x[:8]]) for x in outputs),
        ),
    }


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(samples()))
def test_opcheck(name: str) -> None:
    """Schema (what is written to), fake kernel, autograd registration and tracing with dynamic shapes."""
    torch.library.opcheck(getattr(torch.ops.hubkv, name).default, samples()[name])


@pytest.mark.parametrize("name", sorted(samples()))
def test_fake_kernel_gives_the_shapes_of_the_real_one(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def facts(result: object) -> list[object]:
        tensors = [result] if isinstance(result, Tensor) else list(result or ())
        return [(x.shape, x.dtype, x.stride(), x.device) for x in tensors]

    function: Callable = getattr(ops, name)
    arguments = samples()[name]
    with FakeTensorMode() as mode:
        fake = [
            mode.from_tensor(x)
            if isinstance(x, Tensor)
            else [mode.from_tensor(y) for y in x]
            if isinstance(x, list)
            else x
            for x in arguments
        ]
        faked = facts(function(*fake))
    assert faked == facts(function(*arguments))


@pytest.mark.parametrize("name", sorted(samples()))
def test_fake_kernel_stays_on_the_gpu(name: str) -> None:
    """On tensors without data, which need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def faked(x: object) -> object:
        if isinstance(x, list):
            return [faked(y) for y in x]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x

    arguments = samples()[name]
    with FakeTensorMode():
        result = getattr(ops, name)(*map(faked, arguments))
        for x in [result] if isinstance(result, Tensor) else result or ():
            assert x.device.type == "cuda"


def test_signatures_are_the_schemas() -> None:
    """Names in order, what is written to, and that a name works as an argument."""
    schemas = {name: str(getattr(torch.ops.hubkv, name).default._schema) for name in samples()}
    assert schemas["select"] == (
        "hubkv::select(Tensor refined, SymInt num_groups, SymInt rows_per_group) -> (Tensor, Tensor)"
    )
    assert schemas["compact_into"] == (
        "hubkv::compact_into(Tensor[] k, Tensor[] v, Tensor positions, Tensor head_offsets, "
        "Tensor(a!) k_rows, Tensor(b!) v_rows) -> ()"
    )
    assert schemas["append"] == (
        "hubkv::append(Tensor k_new, Tensor v_new, Tensor(a!) arena, Tensor block_table, Tensor tail_lengths, "
        "Tensor? new_lengths, SymInt page_tokens, SymInt page_base) -> ()"
    )
    for name, arguments in samples().items():
        function = getattr(ops, name)
        assert function.__doc__
        getattr(ops, name)(**dict(zip(inspect.signature(function).parameters, arguments, strict=True)))


def test_the_first_cuda_tensor_names_the_device() -> None:
    """Also where it is in a list, or comes after tensors of the CPU that the stage then refuses by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    refine = inspect.unwrap(ops.refine)
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda:1")
        assert _operators.cuda_device([5, torch.empty(3), [torch.empty(2), on_gpu]]) == on_gpu.device
        assert _operators.cuda_device([on_gpu, torch.empty(2, device="cuda:0")]) == on_gpu.device
        with pytest.raises(ValueError, match="alpha: it is on cuda:1, not on cpu"):
            refine(torch.empty(1, 1, 8), on_gpu, on_gpu, 5, 0.5, 0.5, 0.8, 1.2, 4)


def test_compiled_code_calls_the_operators() -> None:
    cache = random_cache(sequences=[(20, 5), (None, 2)])
    q, k_new, v_new = new_rows(cache, 1, 3)
    work = cache.plan()

    def step(q: Tensor, k: Tensor, v: Tensor, arena: Tensor, tail_lengths: Tensor) -> Tensor:
        tables = (cache.block_table, tail_lengths, None)
        sizes = (cache.page_tokens, cache.page_base)
        ops.append(torch.stack([k, k]), torch.stack([v, v]), arena, *tables, *sizes)
        return (
            ops.attend(
                q * 2, k, v, arena, cache.segments, cache.block_table, tail_lengths + 1, None, *work, 0, 2, *sizes, 0.0
            )
            + 1
        )

    arenas = cache.arena.clone(), cache.arena.clone()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = compiled(q, k_new, v_new, arenas[0], cache.tail_lengths)
    assert torch.equal(got, step(q, k_new, v_new, arenas[1], cache.tail_lengths))
    assert torch.equal(*arenas)
    assert not torch.equal(arenas[0], cache.arena)


@pytest.mark.parametrize("name", sorted(set(samples()) - {"select"}))
def test_tensors_on_two_devices_are_refused(name: str) -> None:
    arguments = list(samples()[name])
    last = max(i for i, x in enumerate(arguments) if isinstance(x, Tensor))
    arguments[last] = arguments[last].to("meta")
    with pytest.raises(ValueError, match="meta"):
        getattr(ops, name)(*arguments)


def test_threads_do_not_share_scratch_memory() -> None:
    cache = random_cache(sequences=[(300, 5), (200, 40)], row_bias=True)
    inputs = [new_rows(cache, 1 + n % 3, 4, seed=n) for n in range(6)]
    want = [cache.attend(*x) for x in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(60):
            if not torch.equal(cache.attend(*inputs[n]), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_attend_remembers_shapes_not_data() -> None:
    """The second call with equal shapes takes the short way: other data, other pages, another arena."""
    for seed in range(3):
        cache = random_cache(sequences=[(30, 20)], seed=seed, num_layers=1)
        rows = new_rows(cache, 1, 2, seed=seed)
        torch.testing.assert_close(
            cache.attend(*rows).double(), torch.from_numpy(cache.oracle(*rows)), rtol=1e-5, atol=1e-5
        )


def test_bounded_cache_is_bounded() -> None:
    cache = BoundedCache()
    for n in range(100):
        cache.put(n, n, most=10)
        assert cache[n] == n
        assert len(cache) <= 10


# ---- the C ABI -------------------------------------------------------------------------------------------------------


C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "hubkv_dtype": ctypes.c_int32,
    "hubkv_device": ctypes.c_int32,
    "hubkv_status": ctypes.c_int32,
    "char const*": ctypes.c_char_p,
    "hubkv_cache_params": _abi.CacheParams,
    "hubkv_refine_params": _abi.RefineParams,
    "hubkv_select_params": _abi.SelectParams,
    "hubkv_compact_params": _abi.CompactParams,
    "hubkv_attend_params": _abi.AttendParams,
    "hubkv_score": ctypes.c_int32,
    "hubkv_candidates_params": _abi.CandidatesParams,
    "hubkv_score_window_params": _abi.ScoreWindowParams,
    "hubkv_held_out_loss_params": _abi.HeldOutLossParams,
    "hubkv_calibrate_top_p_params": _abi.CalibrateTopPParams,
    "hubkv_select_ragged_params": _abi.SelectRaggedParams,
    "hubkv_rewrite_params": _abi.RewriteParams,
}


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


@pytest.mark.parametrize("name", sorted(n for n in C_TYPES if n.endswith("_params")))
def test_structs_are_those_of_the_header(name: str) -> None:
    body = re.search(r"typedef struct\s*\{([^{}]*)\}\s*" + name + ";", header()).group(1)
    fields = [tuple(f.split()) for f in body.split(";") if f.strip()]
    assert C_TYPES[name]._fields_ == [(field, C_TYPES[kind]) for kind, field in fields]


def test_functions_are_those_of_the_header() -> None:
    found = {}
    for result, name, arguments in re.findall(r"HUBKV_API ([\w\s*]+?)\s*(hubkv_\w+)\(([^)]*)\);", header()):
        kinds = []
        for argument in arguments.split(","):
            kind = " ".join(argument.split()[:-1]) if "*" not in argument else argument.rpartition("*")[0] + "*"
            if argument.strip() == "void":
                continue
            parameters = re.match(r"\s*(hubkv_\w+_params) const\*$", kind)
            if parameters:
                kinds.append(ctypes.POINTER(C_TYPES[parameters.group(1)]))
            elif kind.strip() == "int64_t*" and name.endswith("_workspace"):
                kinds.append(ctypes.POINTER(ctypes.c_int64))
            else:
                kinds.append(ctypes.c_void_p if "*" in kind else C_TYPES[kind])
        found[name] = (C_TYPES[result], tuple(kinds))
    assert found == _abi.PROTOTYPES


def test_constants_are_those_of_the_header() -> None:
    values = dict(re.findall(r"HUBKV_(\w+)(?: = | )(\d+)\b", header()))
    assert int(values.pop("ABI_VERSION")) == _abi.ABI_VERSION
    assert {name: int(value) for name, value in values.items()} == {
        name: getattr(_abi, name)
        for name in (
            "OK",
            "INVALID_ARGUMENT",
            "NOT_SUPPORTED",
            "CUDA_ERROR",
            "INTERNAL_ERROR",
            "CPU",
            "CUDA",
            "FLOAT32",
            "FLOAT16",
            "BFLOAT16",
            "SCORE_VANILLA",
            "SCORE_SNAPKV",
            "SCORE_RKV",
            "LEVELS",
        )
    }


CACHE = _abi.CacheParams(1, 1, 1, 8, _abi.FLOAT32, 16, 0, 0, 1)
CANDIDATES = _abi.CandidatesParams(CACHE, 4, 0, 0, 4)
SCORE = _abi.ScoreWindowParams(CANDIDATES, 1, 1, _abi.SCORE_SNAPKV, 5, 0.1, 0.0)
LOSS = _abi.HeldOutLossParams(
    _abi.CandidatesParams(_abi.CacheParams(1, 1, 1, 8, _abi.FLOAT32, 16, 1, 0, 1), 4, 0, 0, 4), 1, 1, 1, 0.0
)
CALIBRATE = _abi.CalibrateTopPParams(1, 1, 4, 0.9, 4, 0, 0, 0, 0)
BUFFER = torch.zeros(4096, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("refine_workspace", (_abi.RefineParams(1, 1, 8, 5, 0.5, 0.5, 0.8, 1.2, 4), ctypes.c_int64())),
        ("select_workspace", (_abi.SelectParams(1, 1, 8, 4), ctypes.c_int64())),
        ("attend_workspace", (_abi.AttendParams(CACHE, 1, 1, 0, 0.0, 8, 8, 8), ctypes.c_int64())),
        ("refine", (None, _abi.RefineParams(1, 1, 8, 5, 0.5, 0.5, 0.8, 1.2, 4), *[BUFFER.data_ptr()] * 6, 4096)),
        ("select", (None, _abi.SelectParams(1, 1, 8, 4), *[BUFFER.data_ptr()] * 4, 4096)),
        ("compact", (None, _abi.CompactParams(1, 1, 8, 8, 4, _abi.FLOAT32, 64, 8, 64, 8), *[BUFFER.data_ptr()] * 6)),
        ("plan", (None, CACHE, 16, *[BUFFER.data_ptr()] * 4)),
        ("attend", (None, _abi.AttendParams(CACHE, 1, 1, 0, 0.0, 8, 8, 8), *[BUFFER.data_ptr()] * 12, 4096)),
        ("append", (None, CACHE, 1, *[BUFFER.data_ptr()] * 6)),
        ("score_window_workspace", (SCORE, ctypes.c_int64())),
        ("score_window", (None, SCORE, *[BUFFER.data_ptr()] * 10, 4096)),
        ("held_out_loss_workspace", (LOSS, ctypes.c_int64())),
        ("held_out_loss", (None, LOSS, *[BUFFER.data_ptr()] * 9, 4096)),
        ("calibrate_top_p_workspace", (CALIBRATE, ctypes.c_int64())),
        ("calibrate_top_p", (None, CALIBRATE, *[BUFFER.data_ptr()] * 8, 4096)),
        ("select_ragged", (None, _abi.SelectRaggedParams(1, 4, 2, 4), *[BUFFER.data_ptr()] * 6)),
        ("rewrite", (None, _abi.RewriteParams(CANDIDATES, 2, 0), *[BUFFER.data_ptr()] * 10)),
        ("merge", (None, _abi.RewriteParams(CANDIDATES, 2, 1), *[BUFFER.data_ptr()] * 11)),
    ],
)
@pytest.mark.skipif(ops.has_cuda(), reason="this library was built with CUDA")
def test_a_build_without_cuda_says_so(name: str, arguments: tuple) -> None:
    with pytest.raises(NotImplementedError, match="not built with CUDA"):
        call(f"hubkv_{name}", _abi.CUDA, *arguments)
    assert not bool(BUFFER.any())
    with pytest.raises(ValueError, match="device: 7"):
        call(f"hubkv_{name}", 7, *arguments)


def test_too_little_workspace_is_refused() -> None:
    params = _abi.SelectParams(1, 4, 100, 4)
    needed = workspace_bytes("hubkv_select_workspace", _abi.CPU, params)
    with pytest.raises(ValueError, match=f"workspaceBytes: {needed - 1}"):
        call("hubkv_select", _abi.CPU, None, params, *[BUFFER.data_ptr()] * 4, needed - 1)


def test_null_pointers_are_refused() -> None:
    stages = ("refine", "select", "compact", "plan", "attend", "append")
    for name in (*stages, "score_window", "held_out_loss", "calibrate_top_p", "select_ragged", "rewrite", "merge"):
        _, kinds = _abi.PROTOTYPES[f"hubkv_{name}"]
        with pytest.raises(ValueError, match="params"):
            call(f"hubkv_{name}", _abi.CPU, None, None, *[0 if k is ctypes.c_int64 else None for k in kinds[3:]])


def test_errors_of_the_library_by_status() -> None:
    for status, error in (
        (_abi.INVALID_ARGUMENT, ValueError),
        (_abi.NOT_SUPPORTED, NotImplementedError),
        (_abi.CUDA_ERROR, RuntimeError),
        (_abi.INTERNAL_ERROR, RuntimeError),
    ):
        with pytest.raises(error):
            _library.fail(status)


# ---- finding and loading ---------------------------------------------------------------------------------------------


def test_information() -> None:
    assert ops.version() == hubkv_trt.__version__
    assert ops.cpu_isa() in ("scalar", "avx2", "avx512")
    before = ops.num_threads()
    assert before >= 1
    ops.set_num_threads(before + 1)
    assert ops.num_threads() == before + 1
    ops.set_num_threads(before)
    for wrong in (0, -1, 10**6, 2**40):
        with pytest.raises(ValueError, match="threads: "):
            ops.set_num_threads(wrong)


def python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_environment() -> None:
    code = "from hubkv_trt import _library as o; print(o.cpu_isa(), o.num_threads())"
    assert python(code, HUBKV_CPU_ISA="scalar", HUBKV_NUM_THREADS="3") == "scalar 3"
    assert python(code, HUBKV_CPU_ISA="", HUBKV_NUM_THREADS="") == python(code)
    assert python(code, HUBKV_CPU_ISA="avx512") == python(code)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HUBKV_NUM_THREADS", "abc", "'abc' is not a whole number in 1..1024"),
        ("HUBKV_NUM_THREADS", "2x", "'2x' is not a whole number in 1..1024"),
        ("HUBKV_NUM_THREADS", "0", "'0' is not a whole number in 1..1024"),
        ("HUBKV_NUM_THREADS", "9" * 99, f"'{'9' * 64}' is not a whole number in 1..1024"),
        ("HUBKV_CPU_ISA", "bogus", "'bogus' is not scalar, avx2 or avx512"),
        ("HUBKV_CPU_ISA", "AVX2", "'AVX2' is not scalar, avx2 or avx512"),
    ],
)
def test_wrong_environment(name: str, value: str, message: str) -> None:
    """An error of the first use, in Python and in every stage of the C ABI on the CPU."""
    code = """
import ctypes, torch
from hubkv_trt import _abi, _library, ops
try:
    ops.select(torch.zeros(1, 1, 4), 1, 2)
except ValueError as error:
    print(error)
library = _library.load(_library.find())
for i in range(2):
    assert library.hubkv_select_workspace(_abi.CPU, _abi.SelectParams(1, 1, 4, 2), ctypes.c_int64()) == 1
    print(library.hubkv_last_error().decode())
"""
    assert python(code, **{name: value}).splitlines() == [f"{name}: {message}"] * 3


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import hubkv_trt.ops as o\ntry: o.version()\nexcept ImportError as e: print(e)"
    message = python(code, HUBKV_LIBRARY=str(tmp_path / "absent.so"))
    assert "HUBKV_LIBRARY: there is no file" in message
    assert "absent.so" in message
    assert "pip install ." in message

    monkeypatch.delenv("HUBKV_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "FILE_NAME", "libabsent.so")
    with pytest.raises(ImportError, match=r"libabsent.so: not found in .*cmake --build build"):
        _library.find()


def test_library_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = _library.find()
    (tmp_path / "lib").mkdir()
    copy = Path(shutil.copy(named, tmp_path / "lib" / _library.FILE_NAME))
    monkeypatch.delenv("HUBKV_LIBRARY", raising=False)
    monkeypatch.setattr(hubkv_trt, "__path__", [str(tmp_path), *hubkv_trt.__path__])
    assert _library.find() == copy
    monkeypatch.setenv("HUBKV_LIBRARY", str(named))
    assert _library.find() == named


def test_what_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libhubkv.so"
    file.write_text("not a library")
    with pytest.raises(ImportError, match="cannot be loaded"):
        _library.load(file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int hubkv_abi_version() { return 999; }", "its ABI version is 999, this package needs 1"),
        ("int hubkv_abi_version() { return 1; }", "not a complete libhubkv"),
        ("int something_else() { return 1; }", "not a complete libhubkv"),
    ],
)
def test_another_library_is_refused(tmp_path: Path, source: str, message: str) -> None:
    code, file = tmp_path / "other.cpp", tmp_path / "libother.so"
    code.write_text(f'extern "C" {source}\n')
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-o", file, code], check=True, timeout=60)
    with pytest.raises(ImportError, match=message):
        _library.load(file)
