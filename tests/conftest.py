# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test files share. Everything slow is made once per session."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the package sets them, but torch is imported first here
os.environ.setdefault("OMP_WAIT_POLICY", "active")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is wrong

import pytest
import torch

DEMO_MAX_INPUT = 4096


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"GPU: {torch.cuda.get_device_name()}"
    return "GPU: torch sees none; the tests marked gpu are deselected"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if "gpu" in item.keywords]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "gpu" not in item.keywords]


# ---- the demo model: SmolLM2-135M-Instruct ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The GGUF file of the demo model (30 layers, 9/3 heads, D = 64)."""
    from hubkv_trt.models.checkpoint import demo_model_path

    return Path(demo_model_path())


@pytest.fixture(scope="session")
def demo_reference(demo_model_path: Path) -> Any:
    """transformers' own reading of the demo model, float32, eager attention, in eval mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(demo_model_path.parent), gguf_file=demo_model_path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_path: Path) -> Any:
    """The demo model's tokenizer, as the package reads it from the GGUF file."""
    from hubkv_trt.models.checkpoint import load_tokenizer

    return load_tokenizer(demo_model_path)


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """An engine directory of the demo model with HubKV (its own gate), float32, 4096 input tokens, 16 sequences."""
    from hubkv_trt.config import HubKVConfig
    from hubkv_trt.engine.build import build_engine

    directory = tmp_path_factory.mktemp("engines") / "demo"
    build_engine(demo_model_path, directory, hubkv=HubKVConfig(), dtype="float32", max_input_len=DEMO_MAX_INPUT)
    return directory


# ---- tiny random models ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("llama" | "qwen2" | "qwen3")``: the directory of a random model, made once (read only)."""
    from tiny_models import save_tiny_model  # with transformers, which the tests of the stages do without

    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_tiny_model(architecture, tmp_path_factory.mktemp("models") / architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_gate(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """``tiny_gate("llama")``: a random FastKVzip gate for ``tiny_model("llama")``, a safetensors file."""
    from hubkv_trt.models.checkpoint import load_config
    from hubkv_trt.scorers.fastkvzip import Gate, gate_shapes, save_gate

    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp("gates") / f"{architecture}.safetensors"
            generator = torch.Generator().manual_seed(1)
            shapes = gate_shapes(load_config(tiny_model(architecture)))
            save_gate(
                path=path, gate=Gate({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
            )
            made[architecture] = path
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_engine(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], tiny_gate: Callable[..., Path]
) -> Callable[..., Path]:
    """``tiny_engine("llama", ...)``: an engine of the random model, float32; options as ``build_engine`` has them."""
    from hubkv_trt.config import HubKVConfig, Scorer
    from hubkv_trt.engine.build import build_engine

    made: dict[Any, Path] = {}

    def make(architecture: str = "llama", **options: Any) -> Path:
        key = (architecture, *sorted((k, str(v)) for k, v in options.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("engines") / architecture
            values = {"hubkv": HubKVConfig(), "dtype": "float32", "max_input_len": 512, "max_batch_size": 4, **options}
            if values["hubkv"] is not None and values["hubkv"].scorer is Scorer.FASTKVZIP:
                values.setdefault("gate", tiny_gate(architecture))
            build_engine(tiny_model(architecture), directory, **values)
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def _tiny_llm(tiny_engine: Callable[..., Path]) -> Any:
    from hubkv_trt.runtime.llm import LLM

    return LLM(tiny_engine("llama"))


@pytest.fixture
def tiny(_tiny_llm: Any) -> Iterator[Any]:
    """An LLM on the tiny llama engine. After every test it holds nothing, and its books are right."""
    yield _tiny_llm
    gc.collect()
    _tiny_llm.cache.audit()
    assert _tiny_llm.cache.held_bytes == 0


# ---- Triton ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def triton_site(tmp_path_factory: pytest.TempPathFactory, tiny_engine: Callable[..., Path]) -> Iterator[Any]:
    """A real Triton server on the tiny llama engine (``triton_site.TritonSite``)."""
    from triton_site import TritonSite

    site = TritonSite(tiny_engine("llama"), tmp_path_factory.mktemp("triton"))
    try:
        site.server.wait_until_ready(timeout=120)
        assert site.log().count("successfully loaded 'hubkv") == 2, site.log()
        yield site
    finally:
        status = site.stop()
    assert status == 0, site.log()[-20000:]


@pytest.fixture
def triton(triton_site: Any) -> Iterator[Any]:
    """The same; what it prints during a test is shown where the test fails."""
    before = len(triton_site.log())
    yield triton_site
    print("---- log of tritonserver\n" + triton_site.log()[before:][-20000:])
