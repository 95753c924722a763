# SPDX-License-Identifier: Apache-2.0
"""TensorRT's own builder takes the networks: no warning, for every model, type and GPU; and what they are made of.

The builder is TensorRT-RTX's, which needs no GPU. It has no plugins: their nodes are native layers of the same shapes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx_bindings as trt

from hubkv_trt.config import DType, EngineConfig, ModelConfig, RopeConfig, Scope
from hubkv_trt.engine.network import Network, extend_network, prefill_network
from hubkv_trt.engine.profiles import Range, extend_profiles, prefill_profiles
from hubkv_trt.graph.lowered import LoweredOps
from hubkv_trt.models.checkpoint import load_config
from trt_eval import rebuild
from trt_eval.attention_layers import causal_kind
from trt_eval.builder import Builder
from trt_eval.evaluated import OlderOps
from trt_eval.twins import engine_config

TARGETS = ["SM80", "SM86", "SM89", "SM120"]
DTYPES = [DType.BFLOAT16, DType.FLOAT16]
ROW_TYPES = ("float32", "float16", "bfloat16", "int32", "int64")
PLANS: dict[str, tuple[Callable[..., Network], Callable[[EngineConfig], list[dict[str, Range]]]]] = {
    "prefill": (prefill_network, prefill_profiles),
    "extend": (extend_network, extend_profiles),
}
QWEN3_8B = ModelConfig(
    "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, rope=RopeConfig(theta=1e6), qk_norm=True,
)  # fmt: skip
LLAMA_31_8B = ModelConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5,
    RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
)  # fmt: skip


def made(plan: str, config: EngineConfig, ops: type[LoweredOps] = LoweredOps) -> tuple[Builder, Network]:
    """Without weights in memory: they are inputs."""
    builder = Builder()
    return builder, PLANS[plan][0](trt, builder.builder, config, {}, ops)


def builds(plan: str, config: EngineConfig, *targets: str, ops: type[LoweredOps] = LoweredOps) -> Network:
    """The network, if it has the documented inputs and outputs and the builder takes it without a word."""
    builder, network = made(plan, config, ops)
    assert interface(network) == {
        name: (b.dtype, b.shape, "input" if b.is_input else "output") for name, b in network.bindings.items()
    }
    assert len(builder.plan(network, PLANS[plan][1](config), *targets)) > 100_000
    assert builder.messages == []
    return network


def together(*arguments: Any, ops: type[LoweredOps] = LoweredOps) -> list[Network]:
    """``builds`` of each at the same time: a build uses one core."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda one: builds(*one, ops=ops), arguments))


def interface(network: Network) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """dtype and shape of what the network reads and gives, by name."""
    definition, names = network.definition, {getattr(trt, name): name for name in ROW_TYPES}
    inputs = [(definition.get_input(i), "input") for i in range(definition.num_inputs)]
    outputs = [(definition.get_output(i), "output") for i in range(definition.num_outputs)]
    return {x.name: (names[x.dtype], tuple(x.shape), side) for x, side in (*inputs, *outputs)}


# ---- it builds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_models(architecture: str, dtype: DType, tiny_model: Callable[..., Path]) -> None:
    config = engine_config(load_config(tiny_model(architecture)), dtype=dtype)
    together(*((plan, config, *TARGETS) for plan in PLANS))


@pytest.mark.parametrize("target", TARGETS)
def test_each_gpu_alone(target: str, tiny_model: Callable[..., Path]) -> None:
    config = engine_config(load_config(tiny_model("llama")))
    together(*((plan, config, target) for plan in PLANS))


@pytest.mark.parametrize("scope", [Scope.LAYER, Scope.HEAD, None])
def test_scopes_and_dense_engines(scope: Scope | None, tiny_model: Callable[..., Path]) -> None:
    config = engine_config(load_config(tiny_model("qwen3")), scope, last_queries=8, new_queries=True)
    together(*((plan, config, "SM89") for plan in PLANS))


def test_calls_of_older_versions(tiny_model: Callable[..., Path]) -> None:
    config = engine_config(load_config(tiny_model("llama")))
    together(*((plan, config, "SM89") for plan in PLANS), ops=OlderOps)


def test_the_demo_model(demo_model_path: Path) -> None:
    config = engine_config(load_config(demo_model_path), max_input_len=8192, max_batch_size=16)
    together(("prefill", config, "SM80"), ("extend", config, "SM120"))


@pytest.mark.parametrize(
    ("model", "dtype", "targets"),
    [(QWEN3_8B, DType.BFLOAT16, ("SM89", "SM120")), (LLAMA_31_8B, DType.FLOAT16, ("SM80", "SM86"))],
    ids=["Qwen3-8B", "Llama-3.1-8B"],
)
def test_models_of_real_size(model: ModelConfig, dtype: DType, targets: tuple[str, str]) -> None:
    """All their layers, prompts of full length; the 16 GB of weights are nowhere."""
    limits = {"max_input_len": model.max_position_embeddings, "max_batch_size": 16, "max_extend_len": 512}
    config = engine_config(model, dtype=dtype, min_ratio=0.75, **limits)
    prefill, extend = together(("prefill", config, targets[0]), ("extend", config, targets[1]))
    assert len(prefill.ops.calls) == 3
    assert len(extend.ops.calls) == model.num_layers
    for network in (prefill, extend):
        assert {n: shape for n, (_, shape, _) in interface(network).items() if n.startswith("layers.7.")} == {
            "layers.7.input_norm.weight": (4096,),
            "layers.7.qkv.weight": (6144, 4096),
            "layers.7.o.weight": (4096, 4096),
            "layers.7.post_norm.weight": (4096,),
            "layers.7.gate_up.weight": (2 * model.intermediate_size, 4096),
            "layers.7.down.weight": (4096, model.intermediate_size),
            **({"layers.7.q_norm.weight": (128,), "layers.7.k_norm.weight": (128,)} if model.qk_norm else {}),
        }


def test_a_build_again_is_of_the_same_network(tiny_model: Callable[..., Path]) -> None:
    """In another process, with other hashes of strings; what TensorRT-RTX makes of it has the same size."""
    command = [sys.executable, "-m", rebuild.__name__, str(tiny_model("llama"))]
    folder = Path(__file__).parent
    seeds = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    runs = [subprocess.Popen(command, cwd=folder, env=e, text=True, stdout=subprocess.PIPE) for e in seeds]
    first, second = (run.communicate(timeout=300)[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert [len(line.split()) for line in first.splitlines()] == [2, 2]
    assert first == second


# ---- attention -------------------------------------------------------------------------------------------------------


def attentions(network: Network) -> list[Any]:
    layers = map(network.definition.get_layer, range(network.definition.num_layers))
    found = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    for layer in found:
        layer.__class__ = trt.IAttentionInputLayer
    return [layer.attention for layer in found]


@pytest.mark.parametrize("ops", [LoweredOps, OlderOps])
def test_attention_is_causal_and_fused(ops: type[LoweredOps], tiny_model: Callable[..., Path]) -> None:
    """Every layer but the last, whose only query sees all; no mask beside causality, no T x T matrix."""
    _, network = made("prefill", engine_config(load_config(tiny_model("llama"))), ops)
    kinds = [causal_kind(a) for a in attentions(network)]
    assert kinds == ["UPPER_LEFT", "UPPER_LEFT", "NONE"]
    for attention, kind in zip(attentions(network), kinds, strict=True):
        assert attention.mask is None
        assert attention.norm_op == trt.AttentionNormalizationOp.SOFTMAX
        assert kind == "NONE" or not attention.decomposable
    _, network = made("extend", engine_config(load_config(tiny_model("llama"))), ops)
    assert attentions(network) == []


OTHER = r"another attention of model\.attention than was asked for"


class Disobedient:
    """A network that makes another attention layer than it is asked for."""

    def __init__(self, network: Any, change: Callable[..., Any]) -> None:
        self._network, self._change = network, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_attention_v2(self, *arguments: Any) -> Any:
        return self._change(self._network, *arguments)


def other_kind(network: Any, q: Any, k: Any, v: Any, norm: Any, kind: Any) -> Any:
    kinds = trt.CausalMaskKind
    return network.add_attention_v2(q, k, v, norm, kinds.NONE if kind != kinds.NONE else kinds.UPPER_LEFT)


def mask_instead(network: Any, q: Any, k: Any, v: Any, norm: Any, kind: Any) -> Any:
    layer = network.add_attention_v2(q, k, v, norm, kind)
    layer.mask = network.add_input("mask", trt.bool, (1, 1, -1, -1))
    return layer


def refusal(network: Any, *_: Any) -> None:
    return None


def no_softmax(network: Any, q: Any, k: Any, v: Any, norm: Any, kind: Any) -> Any:
    return network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.NONE, kind)


@pytest.mark.parametrize(
    ("change", "queries", "message"),
    [
        (other_kind, -1, OTHER),
        (other_kind, 1, OTHER),
        (mask_instead, 1, OTHER),
        (no_softmax, -1, OTHER),
        (refusal, -1, r"TensorRT refused the layer model\.attention"),
    ],
)
def test_another_attention_than_asked_for_is_refused(change: Callable[..., Any], queries: int, message: str) -> None:
    network = Builder().network()
    ops = LoweredOps(trt, Disobedient(network, change), DType.BFLOAT16, {})
    q = network.add_input("q", trt.bfloat16, (queries, 4, 16))
    k, v = (network.add_input(name, trt.bfloat16, (-1, 2, 16)) for name in "kv")
    with pytest.raises(RuntimeError, match=message):
        ops.causal_attention(q, k, v, 0.25)
