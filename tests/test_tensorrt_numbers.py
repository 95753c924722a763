# SPDX-License-Identifier: Apache-2.0
"""What the TensorRT networks compute: their evaluation in float32 equals the eager backend, to the last kept row.

Nodes of HubKV's plugins are run by ``torch.ops.hubkv``, everything else from the attributes of the network's layers.
"""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hubkv_trt.config import DType, ModelConfig, Scope, WeightsPlace
from hubkv_trt.models.checkpoint import load_config, load_weights
from hubkv_trt.scorers.fastkvzip import engine_weights, find_gate, load_gate, random_gate
from prompt_cache import prompt_cache
from tiny_models import save_tiny_model
from trt_eval.checks import check_engine, check_extend, check_prefill, tokens
from trt_eval.evaluated import Evaluated, OlderOps
from trt_eval.twins import engine_config

SCOPES = [*Scope, None]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def weights_of(directory: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The model's and a random gate's."""
    gate = engine_weights(random_gate(model, seed=3), DType.FLOAT32)
    return {**load_weights(directory, DType.FLOAT32), **gate}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_models(architecture: str, scope: Scope | None, tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model(architecture)
    model = load_config(directory)
    check_engine(Evaluated(engine_config(model, scope, last_queries=5, new_queries=True), weights_of(directory, model)))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}, "head_dim": 40}),
        ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}, "num_key_value_heads": 1}),
        ("qwen2", {"num_key_value_heads": 4}),
    ],
)
def test_variants_of_the_models(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Biases everywhere, other frequencies and a factor on them, all heads of a group and groups of one."""
    directory = save_tiny_model(architecture, tmp_path, seed=1, **changes)
    model = load_config(directory)
    check_engine(Evaluated(engine_config(model), weights_of(directory, model)))


def test_prompts_of_few_tokens_and_ratios_at_both_ends(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("qwen3")
    model = load_config(directory)
    twins = Evaluated(engine_config(model, last_queries=4), weights_of(directory, model))
    for count, ratio in ((1, 0.0), (2, 0.9), (3, 0.0), (5, 0.5), (120, 0.0), (120, 0.99)):
        wanted = check_prefill(twins, tokens(model, count, seed=count), ratio)
        assert wanted.last_queries is not None
        assert wanted.last_queries.shape[1] == min(count, 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_calls_of_older_versions(architecture: str, tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model(architecture)
    model = load_config(directory)
    twins = Evaluated(engine_config(model), weights_of(directory, model), OlderOps)
    kinds = {twins.networks["prefill"].definition.get_layer(i).type.name for i in range(60)}
    assert "ROTARY_EMBEDDING" not in kinds
    check_engine(twins)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_embedded_weights(dtype: DType, tiny_model: Callable[..., Path]) -> None:
    """Constants instead of inputs: the same numbers, from the rounded weights."""
    directory = tiny_model("llama")
    model = load_config(directory)
    config = engine_config(model, dtype=dtype, weights=WeightsPlace.EMBEDDED)
    check_engine(Evaluated(config, weights_of(directory, model)))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_16_bit_networks_are_as_near_as_the_eager_backend(
    architecture: str, dtype: DType, tiny_model: Callable[..., Path]
) -> None:
    """With every value in the type that the network gives it: what a network rounds where eager does not would show."""
    directory = tiny_model(architecture)
    model = load_config(directory)
    weights, ids = weights_of(directory, model), tokens(model, 200, seed=4)
    exact = Evaluated(engine_config(model, None, dtype), weights, exact=True)
    rounded = Evaluated(engine_config(model, None, dtype, weights=WeightsPlace.EMBEDDED), weights)
    (got, eager), (_, wanted) = exact.prefill(ids), rounded.prefill(ids)
    for name in ("logits", "k_rows", "v_rows"):
        ideal, error = getattr(wanted, name), {}
        for backend, value in (("network", got[name]), ("eager", getattr(eager, name))):
            error[backend] = (value.float() - ideal).norm() / ideal.norm()
        assert 0 < error["network"] < 1.3 * error["eager"] < 0.1, (name, error)


@pytest.fixture(scope="module")
def demo_weights(demo_model_path: Path) -> dict[str, Tensor]:
    """float32, of SmolLM2-135M-Instruct and its gate."""
    gate = find_gate("SmolLM2-135M-Instruct")
    assert gate is not None
    own = engine_weights(load_gate(gate, load_config(demo_model_path)), DType.FLOAT32)
    return {**load_weights(demo_model_path, DType.FLOAT32), **own}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_demo_model(
    scope: Scope | None, demo_model_path: Path, demo_tokenizer: Any, demo_weights: dict[str, Tensor]
) -> None:
    """A real text, a question over what is left of it, then two tokens."""
    text = pydoc.render_doc("collections", renderer=pydoc.plaintext)
    ids = torch.tensor(demo_tokenizer(text)["input_ids"][:320], dtype=torch.int32)
    twins = Evaluated(engine_config(load_config(demo_model_path), scope), demo_weights)
    wanted = check_prefill(twins, ids[:300], 0.75)
    cache = prompt_cache(twins.config.model, [wanted], 32)
    for first, last in ((300, 317), (317, 318), (318, 319)):
        check_extend(twins, cache, [ids[first:last]], [300])
