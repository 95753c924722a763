# SPDX-License-Identifier: Apache-2.0
"""Real TensorRT plans on a GPU: their numbers against the eager backend's in the same type, and text by ``LLM``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hubkv_trt.config import DType, HubKVConfig, Scope, TensorRTConfig, WeightsPlace
from hubkv_trt.engine.backend import missing_for_tensorrt
from hubkv_trt.engine.build import build_engine
from hubkv_trt.models.checkpoint import load_config, load_weights
from hubkv_trt.runtime.llm import LLM, SamplingParams
from hubkv_trt.scorers.fastkvzip import engine_weights, random_gate
from recorder import Recorder
from tiny_models import save_tiny_model
from trt_eval.checks import check_engine
from trt_eval.device import OnDevice
from trt_eval.twins import engine_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def tensorrt() -> None:
    if missing := list(missing_for_tensorrt()):
        pytest.skip(f"tensorrt needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model whose heads TensorRT's attention has kernels for; tame, as 16 bits are to be near."""
    folder = tmp_path_factory.mktemp("wide")

    def make(architecture: str) -> Path:
        directory = folder / architecture
        if not directory.exists():
            save_tiny_model(architecture, directory, hidden_size=256, head_dim=64, initializer_range=0.08)
        return directory

    return make


@pytest.mark.parametrize("weights", list(WeightsPlace))
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("scope", [*Scope, None])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_plans_compute_what_the_eager_backend_does(
    architecture: str,
    scope: Scope | None,
    dtype: DType,
    weights: WeightsPlace,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    directory = model(architecture)
    config = load_config(directory)
    tensors = load_weights(directory, DType.FLOAT32)
    tensors |= engine_weights(random_gate(config, seed=3), DType.FLOAT32)
    plans = engine_config(config, scope, dtype, weights=weights, last_queries=5, new_queries=True)
    check_engine(OnDevice(plans, tensors, tmp_path))


@pytest.mark.parametrize("ratio", [0.0, 0.75])
def test_text_of_the_demo_model(ratio: float, demo_model_path: Path, tmp_path: Path) -> None:
    """From text to text through both backends in bfloat16: the first logits are near, the answer is the same."""
    logits, answers = [], []
    for backend in ("eager", "tensorrt"):
        build_engine(
            demo_model_path,
            tmp_path / backend,
            hubkv=HubKVConfig(),
            dtype="bfloat16",
            max_input_len=1024,
            max_batch_size=4,
            backend=backend,
            tensorrt=TensorRTConfig(max_extend_len=32) if backend == "tensorrt" else None,
        )
        llm = LLM(tmp_path / backend)
        recorder = Recorder(llm)
        text = "The lighthouse keeper is called Marek. " + "The sea was calm and the sky was clear. " * 20
        prompt = text + "What is the lighthouse keeper called? Answer with one word."
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8), ratio=ratio, chat=True)
        logits.append(recorder.logits[0])
        answers.append(output.text)
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
    assert "Marek" in answers[0] or ratio
    assert answers[0].split()[:1] == answers[1].split()[:1]
