# SPDX-License-Identifier: Apache-2.0
"""Files that hold weights, as mappings from Hugging Face tensor names to tensors that are read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = {"F32", "F16", "BF16", "F64"}


class TensorFiles(Protocol):
    """Tensors by Hugging Face name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, floating point, on the CPU. Raises ValueError naming file and tensor where it cannot be read."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file is missing, is no JSON or no object; names the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


class SafetensorsFile:
    """One file.

    Attributes:
        path: the file.
        shapes: shape of every tensor.

    Raises:
        ValueError: the file is missing, truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            names = list(self._file.keys())
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: corrupt or truncated: {error}") from error

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Some rows of one tensor, floating point, on the CPU.

        Raises:
            ValueError: it cannot be read or is not floating point; names file and tensor.
        """
        part = self._file.get_slice(name)
        dtype = part.get_dtype()
        if dtype not in FLOAT_DTYPES:
            choices = ", ".join(sorted(FLOAT_DTYPES))
            raise ValueError(f"{self.path}: tensor {name} has dtype {dtype}, not one of {choices}")
        try:
            tensor: Tensor = part[rows]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path}: tensor {name} is not readable: {error}") from error
        return tensor


class SafetensorsFiles:
    """A directory with ``model.safetensors``, or with an index and shards.

    Raises:
        ValueError: a file is missing, truncated or corrupt, or index and shards disagree; names the file.
    """

    def __init__(self, directory: Path) -> None:
        self._where: dict[str, SafetensorsFile] = {}
        index_path = directory / INDEX_FILE
        if index_path.exists():
            index = read_json(index_path).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
                raise ValueError(f"{index_path}: weight_map is missing or no map from tensors to files")
            for shard in sorted(set(index.values())):
                if Path(shard).name != shard:
                    raise ValueError(f"{index_path}: {shard!r} is not a file name in this directory")
                self._open(directory / shard)
            for name, shard in index.items():
                if name not in self._where or self._where[name].path != directory / shard:
                    raise ValueError(f"{directory / shard}: has no tensor {name}, which {INDEX_FILE} puts there")
        elif (directory / SINGLE_FILE).exists():
            self._open(directory / SINGLE_FILE)
        else:
            raise ValueError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _open(self, path: Path) -> None:
        file = SafetensorsFile(path)
        for name in file.shapes:
            if name in self._where:
                raise ValueError(f"{path}: tensor {name} is also in {self._where[name].path.name}")
            self._where[name] = file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.shapes[name] for name, file in self._where.items()}

    def read(self, name: str) -> Tensor:
        return self._where[name].read(name)
