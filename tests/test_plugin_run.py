# SPDX-License-Identifier: Apache-2.0
"""Plugins that run, over the emulated kernels: equal to the oracles, alone and side by side."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from plugin import harness
from plugin.harness import Library, Plugin, Tensor, log
from plugin.nodes import (
    FIELDS,
    NAMES,
    ROW_TYPES,
    SHAPE_VALUES,
    Case,
    cache_cases,
    compact_case,
    node,
    refine_case,
    select_case,
)

plugins = pytest.fixture(scope="module")(harness.loaded)


def check_run(plugins: Library, name: str, case: Case) -> None:
    case.check(plugins.make(name, **case.fields).run(case.inputs, *case.values))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 40), (2, 3, 4500)])
def test_refine_equals_oracle(plugins: Library, shape: tuple[int, ...]) -> None:
    check_run(plugins, "HubKVRefine", refine_case(shape))


@pytest.mark.parametrize(("groups", "rows"), [(1, 300), (3, 17), (6, 0), (6, 700), (1, 1)])
def test_select_equals_oracle(plugins: Library, groups: int, rows: int) -> None:
    check_run(plugins, "HubKVSelect", select_case((3, 2, 700), groups, rows))


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("token_major", [0, 1])
def test_compact_equals_oracle(plugins: Library, dtype: str, token_major: int) -> None:
    check_run(plugins, "HubKVCompact", compact_case((3, 2, 70), 24, 90, dtype, token_major))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 5])
def test_plan_and_attend_equal_oracles(plugins: Library, dtype: torch.dtype, num_new: int) -> None:
    for name, case in cache_cases(dtype, num_new):
        check_run(plugins, name, case)


def test_decoding_fits_the_workspace_of_a_profile_of_long_questions(plugins: Library) -> None:
    """The profile ends at 11 new tokens of each sequence, 33 queries of a KV head, whose rows are not shared out.
    One of each comes and needs more memory: AddressSanitizer sees where it has less.
    """
    for name, case in cache_cases(torch.float16, 1):
        if name == "HubKVAttend":
            plugin = plugins.make(name, **case.fields)
            outputs = plugin.empty_outputs(case.inputs)
            given, wanted = [harness.describe(x) for x in case.inputs], [harness.describe(x) for x in outputs]
            longest = [Tensor.from_buffer_copy(x) for x in (*given[:3], *wanted)]
            for x in longest:
                x.d[0 if x.rank == 3 else 1] *= 11
            profile = [*longest[:3], *given[3:]], longest[3:]
            assert plugin.configure(*profile) == 0, log()
            ready = context(plugin.reload(), case, outputs)
            assert ready.enqueue(case.inputs, outputs, plugin.workspace(*profile)) == 0, log()
            case.check(outputs)


# ---- execution contexts ----------------------------------------------------------------------------------------------


def pairs() -> dict[str, tuple[Case, Case]]:
    """Two cases of other shapes or numbers for one plugin of each kind."""
    (_, plan), (_, attend), *_ = cache_cases(torch.float16, 1)
    (_, other_plan), (_, other_attend), *_ = cache_cases(torch.float16, 5)
    return {
        "HubKVRefine": (refine_case((2, 2, 3000)), refine_case((3, 1, 900), seed=9)),
        "HubKVSelect": (select_case((3, 2, 700), 3, 300), select_case((1, 3, 2000), 3, 17, seed=9)),
        "HubKVCompact": (
            compact_case((3, 2, 70), 24, 90, "float16", 1),
            compact_case((1, 3, 200), 64, 300, "float16", 1, seed=9),
        ),
        "HubKVPlan": (plan, other_plan),
        "HubKVAttend": (attend, other_attend),
    }


def context(plugin: Plugin, case: Case, outputs: list[np.ndarray]) -> Plugin:
    """What an execution context gets of an engine's plugin, with its shapes set."""
    made = plugin.attach()
    assert made.shape_change([harness.describe(x) for x in case.inputs], [harness.describe(x) for x in outputs]) == 0
    return made


def test_two_contexts_at_once_equal_oracles(plugins: Library) -> None:
    """Contexts of one plugin, enqueued from two threads at the same time. The emulator runs one launch at a time: those
    of the two alternate.
    """
    for name, cases in pairs().items():
        built = plugins.make(name, **cases[0].fields)
        engine = built.reload()
        outputs = [built.empty_outputs(case.inputs, *case.values) for case in cases]
        contexts = [context(engine, c, out) for c, out in zip(cases, outputs, strict=True)]
        for _ in range(20):  # once does, unless the machine runs one thread after the other
            for x in (x for out in outputs for x in out):
                x[...] = 1
            together = harness.enqueue_together(contexts, [case.inputs for case in cases], outputs)
            for case, out in zip(cases, outputs, strict=True):
                case.check(out)
            if together == 2:
                break
        assert together == 2, name


def test_contexts_and_copies_keep_their_own_shapes(plugins: Library) -> None:
    for name, cases in pairs().items():
        built = plugins.make(name, **cases[0].fields)
        engine = built.reload()
        outputs = [built.empty_outputs(case.inputs, *case.values) for case in cases]
        contexts = [context(engine, c, out) for c, out in zip(cases, outputs, strict=True)]
        copies = [*contexts, *(x.clone() for x in contexts)]
        del contexts, engine
        for copy, case, out in zip(copies, cases * 2, outputs * 2, strict=True):
            for x in out:
                x[...] = 1
            described = [harness.describe(x) for x in case.inputs], [harness.describe(x) for x in out]
            assert copy.enqueue(case.inputs, out, copy.workspace(*described)) == 0, log()
            case.check(out)


# ---- phases and failures ---------------------------------------------------------------------------------------------


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


def test_wrong_dimensions_at_enqueue_are_refused(plugins: Library) -> None:
    for name, cases in pairs().items():
        built = plugins.make(name, **cases[0].fields)
        out = built.empty_outputs(cases[0].inputs, *cases[0].values)
        ready = context(built.reload(), cases[0], out)
        smaller: list[Any] = [x[..., :-1].copy() for x in out]
        log()
        assert ready.enqueue(cases[0].inputs, smaller, 1 << 20) != 0, name
        assert log().startswith(f"1 {name}: ")


# The count of scores that are not finite, and the lengths of new tokens: null means none, and all.
MAY_BE_NULL = {("HubKVRefine", 4), ("HubKVAttend", 7)}


def test_null_addresses_are_refused(plugins: Library) -> None:
    for name, cases in pairs().items():
        built = plugins.make(name, **cases[0].fields)
        inputs, out = cases[0].inputs, built.empty_outputs(cases[0].inputs, *cases[0].values)
        ready = context(built.reload(), cases[0], out)
        log()
        for null in range(len(inputs) + len(out)):
            if (name, null) not in MAY_BE_NULL:
                assert ready.enqueue(inputs, out, 1 << 20, null=null) != 0, (name, null)
                assert re.fullmatch(rf"1 {name}: .*null.*\n", log()), (name, null)


@pytest.mark.parametrize("kind", [harness.NO_FINDER, harness.FINDER_OF_NONE, harness.FINDER_THAT_THROWS])
def test_without_a_logger_messages_go_to_stderr(plugins: Library, kind: int, capfd: pytest.CaptureFixture[str]) -> None:
    log()
    with plugins.finder(kind):
        assert plugins.create("HubKVSelect", num_groups=np.array([0], np.int32)) is None
    assert capfd.readouterr().err == "HubKVSelect: field num_groups: 0 is not in 1..2.14748e+09\n"
    assert log() == ""
