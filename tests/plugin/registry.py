# SPDX-License-Identifier: Apache-2.0
"""``python registry.py LIBRARY CYCLES`` loads plugins into TensorRT's own registry and prints what it saw as JSON.

A process of its own: the registry writes to stderr where no GPU gives TensorRT a logger. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

INT, LONG, FLOAT, DOUBLE = np.int32, np.int64, np.float32, np.float64
GOOD: dict[str, dict[str, Any]] = {
    "HubKVRefine": {
        "nms_kernel": INT([7]), "penalty_factor": FLOAT([0.2]), "head_weight_temperature": FLOAT([0.25]),
        "min_head_weight": FLOAT([0.9]), "max_head_weight": FLOAT([1.1]), "sink_tokens": INT([0]),
    },
    "HubKVSelect": {"num_groups": INT([36])},
    "HubKVCompact": {"token_major": INT([0])},
    "HubKVPlan": {"num_layers": INT([36]), "num_kv_heads": INT([8]),
                  "capacity": INT([640]), "min_rows_per_item": INT([64])},
    "HubKVAttend": {"layer": INT([3]), "page_tokens": INT([16]), "page_base": LONG([4096]), "scale": FLOAT([0.125])},
}  # fmt: skip
DEFAULTS = {"HubKVRefine": (), "HubKVSelect": (), "HubKVCompact": ()}  # nodes that need no field
REQUIRED = [("HubKVPlan", n) for n in ("num_layers", "num_kv_heads", "capacity")]
REQUIRED += [("HubKVAttend", n) for n in ("layer", "page_tokens")]
BAD_VALUES = [
    ("HubKVRefine", "nms_kernel", INT([4]), "4 is not odd"),
    ("HubKVRefine", "nms_kernel", INT([-1]), "-1 is not in"),
    ("HubKVRefine", "nms_kernel", LONG([5]), "type 10 is not INT32"),
    ("HubKVRefine", "nms_kernel", INT([5, 5]), "2 values"),
    ("HubKVRefine", "nms_kernel", None, "type"),
    ("HubKVRefine", "penalty_factor", FLOAT([1.5]), "1.5 is not in 0..1"),
    ("HubKVRefine", "penalty_factor", FLOAT([np.nan]), "nan is not in"),
    ("HubKVRefine", "penalty_factor", DOUBLE([0.5]), "type 2 is not FLOAT32"),
    ("HubKVRefine", "head_weight_temperature", FLOAT([np.inf]), "inf is not in"),
    ("HubKVRefine", "min_head_weight", FLOAT([0]), "0 is not in"),
    ("HubKVRefine", "max_head_weight", FLOAT([0.5]), "0.5 is less than min_head_weight"),
    ("HubKVRefine", "sink_tokens", INT([-1]), "-1 is not in"),
    ("HubKVRefine", "nms_kernels", INT([5]), "no field of this name"),
    ("HubKVSelect", "num_groups", INT([0]), "0 is not in"),
    ("HubKVCompact", "token_major", INT([2]), "2 is not in 0..1"),
    ("HubKVPlan", "capacity", INT([7]), "7 is less than num_kv_heads = 8"),
    ("HubKVAttend", "page_base", LONG([8]), "8 is not a multiple of 16"),
    ("HubKVAttend", "page_base", INT([16]), "type 5 is not INT64"),
    ("HubKVAttend", "layer", INT([-1]), "-1 is not in"),
    ("HubKVAttend", "scale", FLOAT([-1]), "-1 is not in"),
]


def collection(*fields: tuple[str, Any]) -> Any:
    import tensorrt_lean_bindings as trt

    types = trt.PluginFieldType.__members__
    return trt.PluginFieldCollection(
        [trt.PluginField(n, v, types[v.dtype.name.upper()]) if v is not None else trt.PluginField(n) for n, v in fields]
    )


def refusals() -> list[tuple[str, str, list[tuple[str, Any]]]]:
    """Creator, two parts of its message, fields."""
    cases = []
    for name, field, value, said in BAD_VALUES:
        cases.append((name, f"field {field}: |{said}", list({**GOOD[name], field: value}.items())))
    for name, field in REQUIRED:
        rest = [(n, v) for n, v in GOOD[name].items() if n != field]
        cases.append((name, f"field {field}: |not given", rest))
    cases.append(
        ("HubKVSelect", "field num_groups: |given twice", [("num_groups", INT([1])), ("num_groups", INT([1]))])
    )
    return cases


def main() -> None:
    import tensorrt_lean_bindings as trt
    import tensorrt_lean_libs  # noqa: F401 (loads the library that the bindings need)

    library, cycles = sys.argv[1], int(sys.argv[2])
    registry = trt.get_plugin_registry()
    phases = (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME)
    seen: dict[str, Any] = {"created": [], "fields": {}, "refused": [], "cycles": 0}
    handle = registry.load_library(library)
    for name, fields in GOOD.items():
        creator = registry.get_creator(name, "1", "hubkv")
        seen["fields"][name] = {f.name: str(f.type).split(".")[-1].split(":")[0] for f in creator.field_names}
        for phase in phases:
            plugins = [creator.create_plugin("node", collection(*fields.items()), phase)]
            if name in DEFAULTS:
                plugins.append(creator.create_plugin("node", collection(), phase))
            seen["created"].append([name, all(p is not None for p in plugins)])
            del plugins
    for name, said, given in refusals():
        print(f"== {name} {said}", file=sys.stderr, flush=True)
        plugin = registry.get_creator(name, "1", "hubkv").create_plugin("node", collection(*given), phases[0])
        seen["refused"].append([name, said, plugin is None])
    registry.deregister_library(handle)
    for _ in range(cycles):
        handle = registry.load_library(library)
        plugin = registry.get_creator("HubKVRefine", "1", "hubkv").create_plugin("node", collection(), phases[0])
        seen["cycles"] += plugin is not None
        del plugin
        registry.deregister_library(handle)
    seen["left"] = registry.get_creator("HubKVRefine", "1", "hubkv") is not None
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
