# SPDX-License-Identifier: Apache-2.0
"""Strict frozen dataclasses: to JSON data and back; unknown keys, wrong types and bad values are errors."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

C = TypeVar("C", bound="Config")

INT32_MAX = 2**31 - 1
FLOAT32_MIN, FLOAT32_MAX = 1.2e-38, 3.4e38  # positive and normal


def require(condition: bool, field_name: str, value: object, expected: str) -> None:
    """Raises ``ValueError("field: value is not expected")`` unless the condition holds."""
    if not condition:
        raise ValueError(f"{field_name}: {value!r} is not {expected}")


@dataclass(frozen=True)
class Config:
    """Base of all settings: strict conversion from and to JSON data."""

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any]) -> C:
        """Builds the config from JSON data.

        Raises:
            ValueError: a key is unknown or missing, or a value has the wrong type or is out of range.
        """
        if not isinstance(data, dict):
            raise ValueError(f"{cls.__name__}: {data!r} is not an object")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise ValueError(f"{cls.__name__}.{key}: unknown key (known: {', '.join(sorted(fields))})")
        values = {}
        for name, f in fields.items():
            if name in data:
                values[name] = _convert(data[name], hints[name], f"{cls.__name__}.{name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__}.{name}: missing")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON data that ``from_dict`` reads back to an equal config."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def replace(self: C, **changes: Any) -> C:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), name)
    if origin is tuple:
        require(isinstance(value, (list, tuple)), name, value, "a list")
        return tuple(_convert(v, args[0], f"{name}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        require(isinstance(value, dict), name, value, "an object")
        return {str(k): _convert(v, args[1], f"{name}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [e.value for e in hint]
        require(value in choices or isinstance(value, hint), name, value, f"one of {', '.join(choices)}")
        return hint(value)
    if hint is float:
        require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, "a number")
        require(abs(value) <= sys.float_info.max, name, value, "a finite number")  # also of an int past any float
        return float(value)
    if hint in (int, bool, str):
        require(type(value) is hint, name, value, {int: "an integer", bool: "true or false", str: "a text"}[hint])
    return value
