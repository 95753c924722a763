# SPDX-License-Identifier: Apache-2.0
"""Model repositories for Triton: written from the template in ``triton_repo``, read back by its model.py.

OUTPUT/NAME/config.pbtxt    names, types, limits
OUTPUT/NAME/1/model.py      as in triton_repo/hubkv/1
OUTPUT/NAME/1/engine/       the engine directory, where it is copied into the repository
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from ..config import Backend, HardKVConfig, require
from ..engine.directory import load_engine
from .fields import INPUTS, OUTPUTS, pbtxt

VERSION = "1"
_ENGINE_COPY = "engine"


@dataclass(frozen=True)
class ModelParameters:
    """What a model is started with; in config.pbtxt as ``parameters``.

    Attributes:
        engine: the engine directory; a relative path begins at the folder of model.py.
        cache_bytes, tail_tokens, decode_compression: as ``LLM`` has them.
        max_waiting, prefill_tokens_per_step, overcommit: as ``Service`` has them; None is its default.
    """

    engine: str
    cache_bytes: int | None = None
    tail_tokens: int | None = None
    max_waiting: int | None = None
    prefill_tokens_per_step: int | None = None
    overcommit: float | None = None
    decode_compression: HardKVConfig | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "overcommit":
                require(value is None or 0 <= value <= 1, name, value, "a fraction in [0, 1]")
            elif name not in ("engine", "decode_compression"):
                require(value is None or (type(value) is int and value > 0), name, value, "an integer greater than 0")

    @property
    def llm(self) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        return {name: getattr(self, name) for name in ("cache_bytes", "tail_tokens", "decode_compression")}

    @property
    def service(self) -> dict[str, Any]:
        """Arguments of ``Service``."""
        given = {name: getattr(self, name) for name in ("max_waiting", "prefill_tokens_per_step", "overcommit")}
        return {name: value for name, value in given.items() if value is not None}


def write_model(
    template: Path,
    output: Path,
    parameters: ModelParameters,
    *,
    name: str = "hubkv",
    decoupled: bool = True,
    copy_engine: bool = False,
    force: bool = False,
) -> Path:
    """Writes one model of a repository; other models in it stay as they are.

    Args:
        template: the folder with config.pbtxt and 1/model.py.
        output: the repository.
        parameters: ``engine`` is the path as it is seen here; it is checked, and written absolute.
        name: of the model.
        decoupled: requests may get several responses (streams); else each gets one.
        copy_engine: put the engine into the repository, which then needs no other path.
        force: replace the model if it is there.

    Returns:
        The model's folder.

    Raises:
        ValueError: the engine is not sound, a parameter is refused, or the model is there already.
    """
    require(re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None, "name", name, "made of letters, digits and _ . -")
    folder = output / name
    if folder.exists() and not force:
        raise ValueError(f"output: {folder}: exists; use --force to replace it")
    config = load_engine(parameters.engine).config
    engine = Path(parameters.engine).resolve()
    values = {**asdict(parameters), "engine": _ENGINE_COPY if copy_engine else str(engine)}
    if parameters.decode_compression is not None:
        values["decode_compression"] = json.dumps(parameters.decode_compression.to_dict())
    text = Template((template / "config.pbtxt").read_text(encoding="utf-8")).substitute(
        name=name,
        decoupled=str(decoupled).lower(),
        inputs=pbtxt(INPUTS, optional=True),
        outputs=pbtxt(OUTPUTS, optional=False),
        kind="KIND_GPU gpus: [ 0 ]" if config.backend is Backend.TENSORRT else "KIND_CPU",
        parameters=",\n".join(_parameter(key, value) for key, value in values.items() if value is not None),
    )
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=output) as scratch:
        made = Path(scratch) / "model"
        (made / VERSION).mkdir(parents=True)
        (made / "config.pbtxt").write_text(text.split("\n", 2)[2], encoding="utf-8")
        shutil.copyfile(template / VERSION / "model.py", made / VERSION / "model.py")
        if copy_engine:
            shutil.copytree(engine, made / VERSION / _ENGINE_COPY)
        if folder.exists():
            os.rename(folder, Path(scratch) / "replaced")
        os.rename(made, folder)
    return folder


def read_parameters(model_config: Mapping[str, Any], directory: Path) -> ModelParameters:
    """The parameters of a model's config, as Triton gives it to model.py.

    Args:
        model_config: the config as JSON data.
        directory: of model.py.

    Raises:
        ValueError: one is unknown, missing, or not a number where it should be.
    """
    given = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    known = set(ModelParameters.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    require(not unknown, "parameters", unknown, f"known; those of config.pbtxt are {', '.join(sorted(known))}")
    require(bool(given.get("engine")), "parameters", given, "complete: engine is missing")
    numbers: dict[str, Any] = {}
    for key, value in given.items():
        if key == "decode_compression":
            numbers[key] = _decode_compression(value)
        elif key == "overcommit":
            require(re.fullmatch(r"[0-9.]+", value) is not None, key, value, "a fraction in [0, 1]")
            numbers[key] = float(value)
        elif key != "engine":
            require(value.isdecimal(), key, value, "an integer greater than 0")
            numbers[key] = int(value)
    return ModelParameters(engine=str(directory / given["engine"]), **numbers)


def _decode_compression(value: str) -> HardKVConfig:
    try:
        data = json.loads(value)
    except ValueError:
        raise ValueError(f"decode_compression: {value!r} is not JSON") from None
    return HardKVConfig.from_dict(data)


def _parameter(key: str, value: object) -> str:
    return f'  {{ key: "{key}" value: {{ string_value: {json.dumps(str(value))} }} }}'
