# SPDX-License-Identifier: Apache-2.0
"""The engine directory: what a build leaves behind and a runtime starts from.

    engine.json            EngineConfig: model, HubKV parameters, dtype, limits, versions, sha256 of every other file
    weights.safetensors    the model's tensors, by the names of models/checkpoint.py
    gate.safetensors       the scorer's tensors (engines whose scorer is the gate)
    prefill.plan           for TensorRT, and extend.plan (engines of that backend)
    tokenizer.json, ...    as transformers saves them

A directory appears whole or not at all: it is written beside its final place and renamed. It is read only after every
file has been found to be the one that was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Backend, EngineConfig, Evicted

if TYPE_CHECKING:
    import torch

ENGINE_FILE = "engine.json"
WEIGHTS_FILE = "weights.safetensors"
GATE_FILE = "gate.safetensors"
PREFILL_FILE = "prefill.plan"
EXTEND_FILE = "extend.plan"

HASH_CHUNK = 8 << 20
Progress = Callable[[int], None]  # called with the bytes done since the last call


@dataclass(frozen=True)
class Engine:
    """A verified engine directory. Tensors are mapped from the files, not copied."""

    path: Path
    config: EngineConfig
    weights: dict[str, torch.Tensor]  # of config.dtype
    gate: dict[str, torch.Tensor]  # empty where config.has_gate is False

    def with_evicted(self, evicted: Evicted | None, centroids: int | None = None) -> Engine:
        """The same engine with another way for KV pairs that are not kept; None leaves a setting as it was built.

        Raises:
            ValueError: the engine is dense, its backend has no such way, or the number of rows is out of range.
        """
        changes = {"evicted": evicted, "centroids": centroids}
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            return self
        if self.config.hubkv is None:
            name, value = next(iter(changes.items()))
            raise ValueError(f"{name}: {value!r} is of use only in an engine built with --hubkv")
        return replace(self, config=self.config.replace(hubkv=self.config.hubkv.replace(**changes)))

    def load_tokenizer(self) -> Any:
        """The tokenizer that was built in (a transformers ``PreTrainedTokenizerFast``)."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.path), local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise anything over a damaged file
            raise ValueError(f"engine: {self.path}: no tokenizer could be loaded: {error}") from error


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_config(path: str | os.PathLike[str]) -> EngineConfig:
    """``engine.json`` of a directory, checked; reads no other file.

    Raises:
        ValueError: no engine directory there, another schema version, an unknown key, or a value out of range.
    """
    directory = Path(path)
    file = directory / ENGINE_FILE
    if not directory.exists():
        raise ValueError(f"engine: {directory}: no such directory (hubkv build makes one)")
    if not file.is_file():
        raise ValueError(f"engine: {directory}: no {ENGINE_FILE} in it, so it is no engine directory")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"engine: {file}: not valid JSON ({error}); build the engine again") from None
    try:
        return EngineConfig.from_dict(data)
    except ValueError as error:
        raise ValueError(f"engine: {file}: {error}") from None


def load_engine(path: str | os.PathLike[str], *, verify: bool = True, progress: bool = False) -> Engine:
    """Opens an engine directory.

    Args:
        path: the directory.
        verify: compare every file with its recorded sha256 (about a second per GB, once per start).
        progress: show a bar on stderr while verifying, where that takes more than two seconds.

    Raises:
        ValueError: a file is missing, truncated or changed, or ``engine.json`` is refused (see ``read_config``).
    """
    directory = Path(path)
    config = read_config(directory)
    plans = (PREFILL_FILE, EXTEND_FILE) if config.backend is Backend.TENSORRT else ()
    for name in (WEIGHTS_FILE, *((GATE_FILE,) if config.has_gate else ()), *plans):
        if name not in config.files:
            raise ValueError(f"engine: {directory / ENGINE_FILE}: files has no {name}; build the engine again")
    for name in config.files:
        if Path(name).name != name or name == ENGINE_FILE:
            raise ValueError(f"engine: {directory / ENGINE_FILE}: files: {name!r} is not a plain file name")
        if not (directory / name).is_file():
            raise ValueError(f"engine: {directory / name}: missing; build the engine again")
    if verify:
        _verify(directory, config.files, progress)
    weights = load_tensors(directory / WEIGHTS_FILE)
    _check_weights(directory / WEIGHTS_FILE, config, weights)
    gate = load_tensors(directory / GATE_FILE) if config.has_gate else {}
    if config.has_gate:
        _check_gate(directory / GATE_FILE, config, gate)
    return Engine(directory, config, weights, gate)


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped from it.

    Raises:
        ValueError: the file is not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(file)))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from None


def _check_weights(file: Path, config: EngineConfig, weights: Mapping[str, torch.Tensor]) -> None:
    from ..models.checkpoint import weight_parts

    dtype = f"torch.{config.dtype.value}"
    expected = {
        name: (dtype, [sum(shape[0] for _, shape in parts), *parts[0][1][1:]])
        for name, parts in weight_parts(config.model).items()
    }
    _compare(file, expected, weights)


def _check_gate(file: Path, config: EngineConfig, gate: Mapping[str, torch.Tensor]) -> None:
    import torch

    from ..scorers.fastkvzip import Gate, engine_weights, gate_shapes

    base = gate.get("gate.0.k_base")  # [Hkv, 1, S, C]: S is the gate's own
    sinks = base.shape[2] if base is not None and base.ndim == 4 else 1
    shapes = gate_shapes(config.model, sinks)
    like = engine_weights(Gate({name: torch.empty(s, device="meta") for name, s in shapes.items()}), config.dtype)
    _compare(file, {name: (str(t.dtype), list(t.shape)) for name, t in like.items()}, gate)


def _compare(file: Path, expected: Mapping[str, tuple[str, list[int]]], tensors: Mapping[str, torch.Tensor]) -> None:
    for name in sorted({*expected, *tensors}):
        if name not in tensors or name not in expected:
            raise ValueError(f"engine: {file}: tensor {name}: {'unknown' if name in tensors else 'missing'}")
        found = (str(tensors[name].dtype), list(tensors[name].shape))
        if found != expected[name]:
            raise ValueError(
                f"engine: {file}: tensor {name}: {found[0]} {found[1]} does not fit {ENGINE_FILE}, "
                f"which asks for {expected[name][0]} {expected[name][1]}"
            )


def _verify(directory: Path, files: Mapping[str, str], progress: bool) -> None:
    from tqdm import tqdm

    total = sum((directory / name).stat().st_size for name in files)
    with tqdm(total=total, desc="verify", unit="B", unit_scale=True, delay=2, leave=False, disable=not progress) as bar:
        for name, expected in files.items():
            actual = sha256_of(directory / name, bar.update)
            if actual != expected:
                raise ValueError(
                    f"engine: {directory / name}: sha256 {actual[:12]}... is not the recorded {expected[:12]}...: "
                    "the file was truncated or changed after the build; build the engine again"
                )


def sha256_of(file: Path, progress: Progress | None = None) -> str:
    """The sha256 of a file in hex."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            if progress:
                progress(count)
    return digest.hexdigest()


# ---- writing ---------------------------------------------------------------------------------------------------------


def check_output(output: Path, force: bool) -> None:
    """Refuses a place that cannot become an engine directory, before any work is done.

    Raises:
        ValueError: something is there and ``force`` is off, or what is there is not an engine directory.
    """
    for parent in output.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"output: {output}: {parent} is a file")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise ValueError(f"output: {output}: {parent} is not writable")
            break
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"output: {output} is a file or a link, not a directory")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / ENGINE_FILE).is_file():
        raise ValueError(f"output: {output} holds other files and no {ENGINE_FILE}; choose another directory")
    if not force:
        raise ValueError(f"output: {output} already holds an engine; --force replaces it")


@contextmanager
def engine_writer(output: Path, *, force: bool = False, need_bytes: int = 0) -> Iterator[Path]:
    """A fresh directory to fill; at the end of the block it becomes ``output`` by renaming.

    An exception in the block, Ctrl-C included, removes what was written and leaves ``output`` as it was.

    Args:
        output: where the engine directory shall be.
        force: replace an engine directory that is there.
        need_bytes: what the files will take; compared with the free disk space.

    Raises:
        ValueError: see ``check_output``; or the disk is too full.
    """
    check_output(output, force)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: {output}: {error.strerror}") from None
    free = shutil.disk_usage(output.parent).free
    if free < need_bytes:
        raise ValueError(
            f"output: {output}: {need_bytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free on that disk"
        )
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    replaced = output.parent / f".{output.name}.replaced-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()  # inside the block that removes it: a signal may arrive on the next instruction
        yield partial
        for file in partial.iterdir():
            _flush_to_disk(file)
        if output.exists():
            os.rename(output, replaced)
        os.rename(partial, output)
    except BaseException:
        if replaced.exists() and not output.exists():
            os.rename(replaced, output)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def write_config(directory: Path, config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """Hashes every file of the directory and writes ``engine.json``, the last file of a build."""
    names = sorted(file.name for file in directory.iterdir() if file.name != ENGINE_FILE)
    config = config.replace(files={name: sha256_of(directory / name, progress) for name in names})
    (directory / ENGINE_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    return config


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, readable by everyone whom the umask allows.

    ``about`` goes to the file's metadata as one JSON text: several entries would be written in a random order, and
    equal builds give equal files.
    """
    from safetensors.torch import save_file

    metadata = {"about": json.dumps(about, sort_keys=True)} if about else None
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file), metadata)
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _flush_to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
