"""Why a capture fails, and at which line of the user's code."""

from __future__ import annotations

import linecache
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

import torch

from tpcompile import errors
from tpcompile.errors import CaptureError
from tpcompile.ir import Source

OWN, TORCH = Path(errors.__file__).parent, Path(torch.__file__).parent


@cache
def is_user_file(name: str) -> bool:
    """Whether a file is neither torch's nor ours nor generated. The demo's model counts as a user's."""
    path = Path(name)
    ours = OWN in path.parents and OWN / "demo" not in path.parents
    return not ours and TORCH not in path.parents and not name.startswith("<") and path.name != "contextlib.py"


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """`file:line` of the innermost frame of the user's code."""
    frame = user_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def user_code() -> str:
    """The text of that line."""
    frame = user_frame()
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame else ""


def raised_at(error: BaseException, below: CodeType) -> Source | None:
    """The innermost line of the user's code that an error passed through below a function of ours; else of torch.nn's code."""
    own, layer, inside, trace = None, None, False, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if inside and is_user_file(name):
            own = _source(name, trace.tb_lineno)
        elif inside and TORCH / "nn" in Path(name).parents and not trace.tb_frame.f_code.co_name.startswith("_"):
            layer = _source(name, trace.tb_lineno)
        inside = inside or trace.tb_frame.f_code is below
        trace = trace.tb_next
    if own is None and error.__cause__ is not None:
        return raised_at(error.__cause__, below)
    return own or layer


def _source(name: str, line: int) -> Source:
    return Source(Path(name).name, line, linecache.getline(name, line).strip(), "")


def reason_of(error: BaseException) -> str:
    """The first sentence of an error, without what is only of use to torch's developers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines[0] if lines else type(error).__name__).split(" (unhinted:")[0].split(". ")[0].rstrip(".")
    return first if len(first) <= 200 else first[:199] + "…"


def refuse(what: str, source: Source | None, fix: str) -> NoReturn:
    """Raise CaptureError at the line of a graph's node."""
    raise CaptureError(what, at=source.code if source else "", source=str(source) if source else user_line(), fix=fix)
