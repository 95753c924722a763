# SPDX-License-Identifier: Apache-2.0
"""Files of FastKVzip gates: published ``.pt`` files, our safetensors, and the gates that come with the package."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..config import DType, ModelConfig
from ..models.gate import GATE_DIM

FORMAT = "hubkv-gate-1"
PUBLISHED = "huggingface.co/Jang-Hyun/Fast-KVzip"
GATES_DIR = Path(__file__).resolve().parent.parent / "gates"

FIELDS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")
"""Tensors of one layer, in the names of the published gates."""


@dataclass(frozen=True)
class Gate:
    """The tensors of a gate, named ``{layer}.{field}``.

    Shapes, with C = 16 and S sinks: ``q_proj.weight`` [Hkv*G*C, E], ``q_proj.bias`` [Hkv*G*C], ``k_proj.weight``
    [Hkv*C, E], ``q_norm.weight`` and ``k_norm.weight`` [C], ``k_base`` [Hkv, S, C], ``b`` [Hkv, G].
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] = field(default_factory=dict)  # of the file: model, sources, figures; free text

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(name.endswith(".k_base") for name in self.tensors)

    @property
    def num_sinks(self) -> int:
        """S."""
        return int(self.tensors["0.k_base"].shape[1])


def gate_shapes(model: ModelConfig, num_sinks: int = 16) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a gate for this model, by name ``{layer}.{field}``."""
    heads, groups, c = model.num_kv_heads, model.group_size, GATE_DIM
    layer = {
        "q_proj.weight": (heads * groups * c, model.hidden_size),
        "q_proj.bias": (heads * groups * c,),
        "k_proj.weight": (heads * c, model.hidden_size),
        "q_norm.weight": (c,),
        "k_norm.weight": (c,),
        "k_base": (heads, num_sinks, c),
        "b": (heads, groups),
    }
    return {f"{i}.{name}": shape for i in range(model.num_layers) for name, shape in layer.items()}


def random_gate(model: ModelConfig, seed: int = 0, num_sinks: int = 16) -> Gate:
    """A gate before training: random projections, float32. Scores start near 1 / (1 + S)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in gate_shapes(model, num_sinks).items():
        if name.endswith("proj.weight"):
            tensors[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        elif name.endswith("k_base"):
            tensors[name] = torch.randn(shape, generator=generator) * 0.5
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.zeros(shape)
    return Gate(tensors, {"source": f"random, seed {seed}"})


def check_gate(gate: Gate, model: ModelConfig, source: str = "gate") -> Gate:
    """The gate itself, if it fits the model.

    Raises:
        ValueError: a tensor is missing, not finite, or has the shape of another model's gate.
    """
    base = gate.tensors.get("0.k_base")
    sinks = int(base.shape[1]) if base is not None and base.ndim == 3 else 16
    expected = gate_shapes(model, sinks)
    for name in sorted(set(gate.tensors) | set(expected), key=lambda n: (int(n.split(".")[0]), n)):
        if name not in expected:
            raise ValueError(
                f"{source}: tensor {name}: the gate has {gate.num_layers} layers and the model "
                f"{model.num_layers}: it is a gate of another model"
            )
        if name not in gate.tensors:
            raise ValueError(
                f"{source}: tensor {name}: missing; a gate for this model has {model.num_layers} layers of "
                f"{', '.join(FIELDS)}"
            )
        shape = tuple(gate.tensors[name].shape)
        if shape != expected[name]:
            raise ValueError(
                f"{source}: tensor {name}: shape {list(shape)}, but this model needs {list(expected[name])}: "
                "it is a gate of another model"
            )
        if not torch.isfinite(gate.tensors[name]).all():
            raise ValueError(f"{source}: tensor {name}: holds values that are not finite")
    return gate


def load_gate(path: str | os.PathLike[str], model: ModelConfig | None = None) -> Gate:
    """Reads a gate: a published ``.pt`` file (a list of state dicts under "module") or our safetensors.

    Args:
        path: the file.
        model: the model the gate has to fit; None checks the names only.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, would run code when unpickled, or is the gate of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"gate: {str(path)!r} is not a file")
    gate = _load_pt(path) if path.suffix in (".pt", ".pth", ".bin") else _load_safetensors(path)
    _check_names(gate, path)
    return gate if model is None else check_gate(gate, model, str(path))


def save_gate(gate: Gate, path: str | os.PathLike[str], dtype: DType | None = None) -> None:
    """Writes a gate as safetensors, atomically: the file is whole or not there.

    Args:
        gate: what ``load_gate`` gives back.
        path: where; an existing file is replaced.
        dtype: of all tensors; None keeps each as it is.
    """
    path = Path(path)
    cast = None if dtype is None else torch_dtype(dtype)
    tensors = {f"gate.{n}": t.detach().to("cpu", cast or t.dtype).contiguous() for n, t in gate.tensors.items()}
    metadata = {**gate.metadata, "format": FORMAT, "layers": str(gate.num_layers), "sinks": str(gate.num_sinks)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(save(tensors, metadata=metadata))  # save_file would make it readable to its owner only
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def engine_weights(gate: Gate, dtype: DType) -> dict[str, torch.Tensor]:
    """The gate as ``models.gate.gate_scores`` reads it.

    Query and key projections are stacked (one matrix product per layer) and in the engine's dtype; the rest, which
    enters the exponential, is float32.

    Returns:
        ``gate.{layer}.qk_proj.weight`` [Hkv*G*C + Hkv*C, E], ``.qk_proj.bias``, ``.q_norm.weight`` [C],
        ``.k_norm.weight`` [C], ``.k_base`` [Hkv, 1, S, C], ``.b`` [Hkv, G, 1, 1].
    """
    weights: dict[str, torch.Tensor] = {}
    for i in range(gate.num_layers):
        t = {name: gate.tensors[f"{i}.{name}"] for name in FIELDS}
        bias = torch.cat([t["q_proj.bias"], t["q_proj.bias"].new_zeros(t["k_proj.weight"].shape[0])])
        weights[f"gate.{i}.qk_proj.weight"] = torch.cat([t["q_proj.weight"], t["k_proj.weight"]]).to(torch_dtype(dtype))
        weights[f"gate.{i}.qk_proj.bias"] = bias.to(torch_dtype(dtype))
        weights[f"gate.{i}.q_norm.weight"] = t["q_norm.weight"].float()
        weights[f"gate.{i}.k_norm.weight"] = t["k_norm.weight"].float()
        weights[f"gate.{i}.k_base"] = t["k_base"].float()[:, None]
        weights[f"gate.{i}.b"] = t["b"].float()[:, :, None, None]
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name of the dtype."""
    result = getattr(torch, DType(dtype).value)
    assert isinstance(result, torch.dtype)
    return result


# ---- gates that come with the package --------------------------------------------------------------------------------


def gate_name(model_name: str) -> str:
    """The name of a model without its place, owner, file suffix and quantisation, in lower case."""
    name = str(model_name).rstrip("/").replace("\\", "/").split("/")[-1].lower()
    name = re.sub(r"\.gguf$", "", name)
    return re.sub(r"[.-](i?q\d\w*|f16|f32|bf16)$", "", name)


def find_gate(model_name: str) -> Path | None:
    """The gate that comes with the package for this model (a name, directory or GGUF file); None if there is none."""
    path = GATES_DIR / f"{gate_name(model_name)}.safetensors"
    return path if path.is_file() else None


def no_gate_message(model_name: str) -> str:
    """What to do for a model without a gate: the text of the error."""
    known = ", ".join(sorted(p.stem for p in GATES_DIR.glob("*.safetensors"))) or "none"
    return (
        f"gate: no gate comes with the package for model {gate_name(model_name)!r} (it has: {known}). Give one with "
        f"--gate FILE: published gates (.pt) are at {PUBLISHED}, or train one on texts of your own: "
        f"python build_scripts/train_gate.py --model {model_name} --output gate.safetensors TEXT ... (docs/gates.md)"
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def _load_safetensors(path: Path) -> Gate:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"gate: {path}: format {metadata.get('format')!r} in its metadata is not {FORMAT!r}: the file "
                    "is no gate of this version"
                )
            names = list(file.keys())
            return Gate({name.removeprefix("gate."): file.get_tensor(name) for name in names}, metadata)
    except SafetensorError as error:
        raise ValueError(f"gate: {path}: not a whole safetensors file ({error})") from error


def _numpy_globals() -> list[tuple[object, str]]:
    """Published files hold loss curves as NumPy arrays, data that cannot run code; NumPy 1 and 2 name them apart."""
    core = getattr(np, "_core", None) or np.core
    parts: list[tuple[object, str]] = [(np.ndarray, "numpy.ndarray"), (np.dtype, "numpy.dtype")]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        parts += [(getattr(core.multiarray, f), f"{module}.{f}") for f in ("_reconstruct", "scalar")]
    return parts + [(type(np.dtype(t)), f"numpy.dtypes.{type(np.dtype(t)).__name__}") for t in ("f4", "f8", "i8")]


def _load_pt(path: Path) -> Gate:
    try:
        with torch.serialization.safe_globals(_numpy_globals()):  # type: ignore[arg-type]
            data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"gate: {path}: refused, for unpickling it would need more than tensors and arrays, which can run "
            f"code ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"gate: {path}: not a whole .pt file ({_first_line(error)})") from error
    layers = data.get("module") if isinstance(data, dict) else None
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError(f'gate: {path}: "module" is not a list of state dicts, one per layer')
    tensors = {}
    for i, layer in enumerate(layers):
        for name, tensor in layer.items():
            extra_axis = isinstance(tensor, torch.Tensor) and tensor.ndim == {"k_base": 4, "b": 3}.get(name)
            tensors[f"{i}.{name}"] = tensor.squeeze(1) if extra_axis else tensor  # [Hkv, 1, S, C], [Hkv, 1, G] there
    return Gate(tensors, {"source": path.name})


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _check_names(gate: Gate, path: Path) -> None:
    for name, tensor in gate.tensors.items():
        layer, _, part = name.partition(".")
        if not layer.isdigit() or part not in FIELDS:
            raise ValueError(f"gate: {path}: tensor {name}: unknown; a gate has {', '.join(FIELDS)} for each layer")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise ValueError(f"gate: {path}: tensor {name}: not a floating-point tensor")
    for i in range(max((int(n.split(".")[0]) for n in gate.tensors), default=0) + 1):
        for part in FIELDS:
            if f"{i}.{part}" not in gate.tensors:
                raise ValueError(f"gate: {path}: tensor {i}.{part}: missing")
