"""Equal captures of one process are made once: tests compile equal models for many meshes, and capturing is most of a compile.

A capture is a function of the model, the batch, the loss and torch's settings, and passes leave what they are given as it is. Arguments
are equal if they are pickled alike, classes and functions by their names and tensors by their values; what cannot be pickled, such as a
model of a class inside a test, is captured every time.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from tpcompile import driver
from tpcompile.ir import Program
from tpcompile.passes.capture import capture

_FOUND: dict[bytes, Program] = {}


class _Pickler(pickle.Pickler):
    """Of tensors, what a capture may depend on; one that stands in several places is the same in all of them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.seen: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        if (place := self.seen.get(id(item))) is not None:
            return place
        self.seen[id(item)] = len(self.seen)
        kind = type(item).__qualname__, str(item.dtype), tuple(item.shape), item.stride(), str(item.device), item.requires_grad
        return *kind, b"" if item.is_meta else hashlib.sha256(_bytes(item)).digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _key(*arguments: Any) -> bytes | None:
    made = io.BytesIO()
    settings = torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu")
    try:
        _Pickler(made).dump((settings, arguments))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None
    return hashlib.sha256(made.getvalue()).digest()


def once(*arguments: Any, **options: Any) -> Program:
    """What `capture` gives for these arguments."""
    key = _key(arguments, options)
    if key is None:
        return capture(*arguments, **options)
    if key not in _FOUND:
        _FOUND[key] = capture(*arguments, **options)
    return _FOUND[key]


def begin() -> None:
    """From here on in this process, for what `driver.lower` captures."""
    driver.capture = once


def forget() -> None:
    _FOUND.clear()
