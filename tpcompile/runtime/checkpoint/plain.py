"""Settings and counters as JSON, and back in their own types: what is neither a number nor a text is tagged."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import InputError

_TAG = "__type__"
_MOST = 65536  # elements of a tensor that is written as text


def encode(value: Any, where: str) -> Any:
    """A value as what JSON knows. Raises InputError that names its place for one that cannot be written without pickle."""
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case Tensor() if value.numel() <= _MOST:
            plain = value.detach().cpu()
            return {_TAG: "tensor", "dtype": dtype_name(plain.dtype), "shape": list(plain.shape), "values": plain.flatten().tolist()}
        case list():
            return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case tuple() | set() | deque():
            kind = "tuple" if isinstance(value, tuple) else type(value).__name__
            return {_TAG: kind, "items": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        case Mapping():
            kind = "counter" if isinstance(value, Counter) else "dict"
            plain_dict = kind == "dict" and all(isinstance(key, str) and key != _TAG for key in value)
            if plain_dict and type(value) in (dict, OrderedDict, defaultdict):
                return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
            return {_TAG: kind, "items": [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}
        case torch.dtype() | torch.device():
            return {_TAG: type(value).__name__, "name": str(value).removeprefix("torch.")}
    raise InputError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickle",
        at="compiled.save",
        fix="keep numbers, texts, and lists, tuples and dictionaries of them",
    )


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: decode(item) for key, item in value.items()}
        case "tensor":
            return torch.tensor(value["values"], dtype=dtype_of(value["dtype"])).reshape(value["shape"])
        case "tuple" | "set" | "deque" as kind:
            made: Any = {"tuple": tuple, "set": set, "deque": deque}[kind]
            return made(decode(item) for item in value["items"])
        case "counter" | "dict" as kind:
            pairs = {decode(key): decode(item) for key, item in value["items"]}
            return Counter(pairs) if kind == "counter" else pairs
        case "dtype":
            return dtype_of(value["name"])
        case "device":
            return torch.device(value["name"])
        case other:
            raise ValueError(f"unknown type {other!r}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is no element type."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no element type")
    return found
