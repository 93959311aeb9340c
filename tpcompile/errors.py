"""Errors that say what is wrong, at which call, from which line, and how to mend it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

_OWN = {Path(__file__).resolve().parent, Path(__file__).resolve().parent.parent / "passes"}


class TpcompileError(Exception):
    """What is wrong, then one line each for `at`, `from` and `fix`, where they are known.

        a batch of 10 rows cannot be divided into 4 equal micro-batches
          at   compiled.train_step(input_ids=[10, 128])
          from train.py:31
          fix  use a batch of 8 or 12 rows, or microbatches=2 or 5

    They are attributes too: `what`, `at`, `source` and `fix`.
    """

    def __init__(self, what: str, *, at: str = "", source: str = "", fix: str = "") -> None:
        self.what, self.at, self.source, self.fix = what, at, source, fix
        lines = [what]
        for word, text in (("at", at), ("from", source), ("fix", fix)):
            if text:
                lines.append(f"  {word:<4} {text}")
        super().__init__("\n".join(lines))


class InputError(TpcompileError):
    """The call does not fit the model, the mesh or the schedule."""


class CaptureError(TpcompileError):
    """The model's forward cannot be captured faithfully; the message gives the reason and the user's line."""


class Refused(TpcompileError, NotImplementedError):
    """A combination that would give wrong numbers, or that no test has shown right."""


class VerifyError(TpcompileError):
    """A program that breaks the laws of layouts. It is a fault of a pass, never of the user."""


def several(problems: Iterable[TpcompileError]) -> TpcompileError | None:
    """All problems of one check as a single error; None when there are none."""
    found = list(problems)
    if len(found) < 2:
        return found[0] if found else None
    return type(found[0])(f"{len(found)} problems\n" + "\n".join(str(problem) for problem in found))


def caller() -> str:
    """`file:line` of the nearest frame that is neither ours nor torch's: the user's own line."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _OWN.isdisjoint(path.resolve().parents) and "torch" not in path.parts and path.name != "contextlib.py":
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
