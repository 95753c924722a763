# SPDX-License-Identifier: Apache-2.0
"""What plugins say of a node: types, formats and shapes; what they refuse; how they are copied and stored."""

from __future__ import annotations

import ctypes
import re
from dataclasses import fields, replace

import numpy as np
import pytest

from hubkv_trt import _abi
from plugin import harness, registry
from plugin.harness import Library, Plugin, Tensor, log, tensor
from plugin.nodes import FIELDS, NAMES, ROW_TYPES, SHAPE_VALUES, Sizes, node, outputs
from simt.library import ROOT, load

plugins = pytest.fixture(scope="module")(harness.loaded)


@pytest.mark.parametrize("rows", ROW_TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_types_and_formats(plugins: Library, name: str, rows: str) -> None:
    plugin = plugins.make(name, **FIELDS[name])
    inputs = node(name, rows)
    given = plugin.outputs(inputs, *SHAPE_VALUES.get(name, ()))
    assert given is not None, log()
    assert [(x.dtype.name, x.shape) for x in given] == outputs(name, rows)
    assert plugin.num_tactics == 0
    right = [*inputs, *given]
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
def test_shapes_follow_inputs(plugins: Library, name: str) -> None:
    random = np.random.default_rng(6)
    plugin = plugins.make(name, **FIELDS[name])
    for _ in range(20):
        sizes = replace(Sizes(*map(int, random.integers(1, 3000, len(fields(Sizes))))), L=int(random.integers(1, 5)))
        given = plugin.outputs(node(name, s=sizes), *SHAPE_VALUES.get(name, ()))
        assert given is not None, log()
        assert [(x.dtype.name, x.shape) for x in given] == outputs(name, s=sizes)


def test_budget_sets_the_rows_of_select(plugins: Library) -> None:
    for groups, rows in ((1, 0), (1, 240), (6, 40), (3, 2**27)):
        given = plugins.make("HubKVSelect", num_groups=groups).outputs(node("HubKVSelect"), rows)
        assert given is not None
        assert [x.shape for x in given] == [(groups * rows,), (7,)]


def test_documented_fields_are_those_that_there_are(plugins: Library) -> None:
    """Names, types and defaults of docs/plugin.md: ``default 5``, or for several names ``default 0.8, 1.2``."""
    sections = (ROOT / "docs" / "plugin.md").read_text().split("\n### ")[1:]
    assert [section.split("\n", 1)[0] for section in sections] == NAMES
    for name, section in zip(NAMES, sections, strict=True):
        documented: dict[str, str] = {}
        defaults: dict[str, float] = {}
        for names, kind, text in re.findall(r"^\| field \| (.*?) \| (\w+) \| (.*) \|$", section, flags=re.M):
            fields = re.findall(r"`(\w+)`", names)
            documented |= dict.fromkeys(fields, kind)
            values = re.search(r"default:? ([\d., ]+\d|\d)", text.replace("0, the default", "default 0"))
            if values is not None:
                defaults |= zip(fields, map(float, values[1].split(", ")), strict=True)
        assert documented == {n: v.dtype.name for n, v in registry.GOOD[name].items()}
        made = plugins.create(name, **{n: v for n, v in registry.GOOD[name].items() if n not in defaults})
        assert made is not None, log()
        assert {n: v for n, v in made.fields().items() if n in defaults} == pytest.approx(defaults)
        for field in documented.keys() - defaults.keys():
            rest = {n: v for n, v in registry.GOOD[name].items() if n != field}
            assert plugins.create(name, **rest) is None, field


@pytest.mark.parametrize("name", NAMES)
def test_fields_survive_serialization_and_clones(plugins: Library, name: str) -> None:
    plugin = plugins.create(name, **registry.GOOD[name])
    assert plugin is not None
    wanted = {n: v.item() for n, v in registry.GOOD[name].items()}
    assert plugin.fields() == wanted
    for other in (plugin.clone(), plugin.reload(), plugin.reload().clone().attach()):
        assert other.fields() == wanted
        assert other.address.value != plugin.address.value


# Inputs whose first dimension no other tensor has.
FREE = {("HubKVPlan", 1)}


@pytest.mark.parametrize("name", NAMES)
def test_refuses_wrong_nodes(plugins: Library, name: str) -> None:
    plugin = plugins.make(name, **FIELDS[name])
    inputs = node(name)
    given = plugin.outputs(inputs, *SHAPE_VALUES.get(name, ()))
    assert given is not None
    assert plugin.configure(inputs, given) == 0, log()
    runtime = plugin.reload()
    assert runtime.shape_change(inputs, given) == 0, log()
    assert plugin.outputs(inputs[:-1], *SHAPE_VALUES.get(name, ())) is None
    assert "inputs: " in log()
    for calls in (runtime.shape_change, plugin.configure):
        assert calls(inputs, given[1:]) != 0
        assert "outputs: " in log()
    right = [*inputs, *given]
    for position, item in enumerate(right):
        for change in ("type", "rank", "negative", "larger"):
            wrong = list(right)
            wrong[position] = changed = Tensor.from_buffer_copy(item)
            if change == "type":
                changed.type = 2
            elif change == "rank":
                changed.rank = 7
            elif change == "negative":
                changed.d[0] = -1
            elif (name, position) in FREE:
                continue
            else:
                changed.d[0] += 1
            assert runtime.shape_change(wrong[: len(inputs)], wrong[len(inputs) :]) != 0, (position, change)
            assert log().startswith(f"1 {name}: ")
            if change != "negative":  # the plugin sees the upper bound of a profile
                assert plugin.configure(wrong[: len(inputs)], wrong[len(inputs) :]) != 0, (position, change)
                assert plugin.workspace(wrong[: len(inputs)], wrong[len(inputs) :]) == 0
                assert log().count(f"1 {name}: ") == 2


def test_select_needs_its_shape_tensor(plugins: Library) -> None:
    plugin = plugins.make("HubKVSelect")
    assert plugin.outputs(node("HubKVSelect")) is None
    assert "rows_per_group: one shape tensor" in log()
    assert plugin.outputs(node("HubKVSelect"), 1, 2) is None


def workspace(plugin: Plugin, inputs: list[Tensor], *values: int) -> int:
    given = plugin.outputs(inputs, *values)
    assert given is not None, log()
    assert plugin.configure(inputs, given) == 0, log()
    return plugin.workspace(inputs, given)


@pytest.mark.parametrize("name", ["HubKVRefine", "HubKVSelect"])
def test_workspace_of_a_profile_covers_what_lies_below(plugins: Library, name: str) -> None:
    random = np.random.default_rng(7)
    plugin = plugins.make(name)
    values = (1,) if name == "HubKVSelect" else ()
    for _ in range(50):
        most = [int(random.integers(1, end + 1)) for end in (4, 8, 20000)]
        below = [int(random.integers(1, end + 1)) for end in most]
        sizes = [workspace(plugin, node(name, s=Sizes(*x)), *values) for x in (below, most)]
        assert 0 < sizes[0] <= sizes[1], (below, most)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_workspace_of_attend_covers_what_lies_below(plugins: Library, by_sequence: bool) -> None:
    """Fewer tokens can need more memory than many: the workspace of a profile covers them too."""
    random = np.random.default_rng(8)
    plugin = plugins.make("HubKVAttend", layer=0, page_tokens=16)

    for _ in range(200):
        Hkv, G, D = int(random.integers(1, 9)), int(random.integers(1, 17)), 64
        B, Tq, pages = (int(random.integers(1, end)) for end in (20, 100, 600))
        capacity = B * Hkv + int(random.integers(0, 100))
        less, fewer = int(random.integers(1, B + 1)), int(random.integers(1, pages + 1))
        tokens = int(random.integers(1, (Tq if by_sequence else B * Tq // less) + 1))
        sizes = Sizes(Hkv=Hkv, G=G, D=D, B=B, Tq=Tq, max_pages=pages, capacity=capacity)
        inputs = node("HubKVAttend", s=sizes)
        if by_sequence:
            inputs[:3] = [tensor("float32", B, Tq, *x.shape[1:]) for x in inputs[:3]]
        most = workspace(plugin, inputs)
        cache = _abi.CacheParams(less, 3, Hkv, D, _abi.FLOAT32, 16, fewer, 0, capacity)
        params = _abi.AttendParams(cache, tokens, Hkv * G, 0, 0.0, Hkv * G * D, Hkv * D, Hkv * D)
        needed = ctypes.c_int64()
        assert load("plain").hubkv_attend_workspace(_abi.CUDA, params, needed) == 0
        assert 0 < needed.value <= most, (sizes, less, tokens, fewer)


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


def test_collections_without_fields_are_read(plugins: Library) -> None:
    assert plugins.create_raw("HubKVRefine", []) is not None
    for count in (1, -1):
        assert plugins.create_raw("HubKVRefine", None, count) is None
        assert f"fields: {count} fields without data" in log()
    nameless = harness.Field(None, None, 5, 1)
    assert plugins.create_raw("HubKVRefine", [nameless]) is None
    assert "field 0 has no name" in log()


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
