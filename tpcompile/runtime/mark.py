"""Where a rank is in its work: a line in a file that outlives its process, beside the one in which torch's launcher looks for its error."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tpcompile.runtime.groups import Groups

Work = TypeVar("Work", bound=Callable[..., Any])

NAME, _WIDTH = "place.txt", 96


class Mark:
    """This rank's line, where a launcher gave it a directory of its own; else nothing is written."""

    def __init__(self) -> None:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._file = os.open(Path(error_file).parent / NAME, os.O_RDWR | os.O_CREAT, 0o600) if _is_ours(error_file) else None

    def at(self, place: str) -> None:
        """It is here now. One write of fixed length: whoever reads never sees half of it."""
        if self._file is not None:
            os.pwrite(self._file, place[:_WIDTH].ljust(_WIDTH).encode("ascii", "replace"), 0)


class Engine(Protocol):
    """What works at steps of a rank."""

    groups: Groups
    mark: Mark

    @property
    def clock(self) -> tuple[int, int]: ...


def placed(doing: str) -> Callable[[Work], Work]:
    """Let a method of an object with an `_engine` leave a mark, and add to its errors which rank, stage and step they come from."""

    def wrap(work: Work) -> Work:
        @wraps(work)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            engine: Engine | None = self._engine
            if engine is None:
                return work(self, *args, **kwargs)
            step, place = engine.clock[1], engine.groups.coordinates
            engine.mark.at(f"{doing}, step {step}")
            try:
                return work(self, *args, **kwargs)
            except Exception as error:
                error.add_note(f"rank {engine.groups.rank} (dp {place['dp']}, stage {place['pp']}, tp {place['tp']}), {doing}, step {step}")
                raise

        return call  # type: ignore[return-value]

    return wrap


def _is_ours(error_file: str) -> bool:
    return bool(error_file) and Path(error_file).parent.is_dir()


def read(directory: Path) -> dict[int, str]:
    """The lines of all ranks that a launcher's directory of logs has, by local rank."""
    found = {}
    for path in directory.rglob(NAME):
        if path.parent.name.isdigit() and (line := path.read_text().strip()):
            found[int(path.parent.name)] = line
    return found
