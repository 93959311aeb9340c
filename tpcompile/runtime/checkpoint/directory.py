"""A directory of checkpoints: what is there is whole, whenever a process is killed.

ckpt/
    latest                    a line: step_00000100
    step_00000100/            whole, since it got its name when all of it was on the disk
    .saving_step_00000200_…/  being written, or left by a save that was killed: the next one clears it away
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from tpcompile.errors import InputError
from tpcompile.runtime.checkpoint.files import DESCRIPTION, bad, sync, write_text

MARKER, _SAVING, _OLD = "latest", ".saving_", ".old_"


def begin(directory: Path, step: int) -> tuple[Path, Path]:
    """A new directory to write in, and the name that it gets when it is whole. Clears what killed saves left."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.iterdir():
        if left.name.startswith((_SAVING, _OLD)):
            shutil.rmtree(left, ignore_errors=True)
    base = f"step_{step:08d}"
    taken = [int(match[1] or 1) for path in directory.iterdir() if (match := re.fullmatch(rf"{base}(?:_(\d+))?", path.name))]
    name = f"{base}_{max(taken) + 1}" if taken else base
    made = directory / f"{_SAVING}{name}_{uuid.uuid4().hex[:8]}"
    made.mkdir()
    return made, directory / name


def publish(written: Path, final: Path, keep: int | None) -> None:
    """Give a written checkpoint its name, let `latest` name it, and remove all but the newest `keep`."""
    sync(written)
    os.rename(written, final)
    sync(final.parent)
    marker = final.parent / f"{_SAVING}{MARKER}"
    write_text(marker, final.name + "\n")
    os.replace(marker, final.parent / MARKER)
    sync(final.parent)
    if keep is not None:
        for path in sorted(whole_ones(final.parent), key=lambda path: path.stat().st_mtime_ns)[:-keep]:
            if path != final:
                old = path.with_name(_OLD + path.name)
                os.rename(path, old)
                shutil.rmtree(old, ignore_errors=True)


def whole_ones(directory: Path) -> list[Path]:
    """The checkpoints in a directory."""
    found = directory.iterdir() if directory.is_dir() else ()
    return [path for path in found if path.name.startswith("step_") and (path / DESCRIPTION).is_file()]


def find(directory: Path) -> Path | None:
    """The checkpoint to load: the directory itself, the one that its `latest` names, else the newest; None if there is none."""
    if (directory / DESCRIPTION).is_file():
        return directory
    found = whole_ones(directory)
    try:
        named = directory / (directory / MARKER).read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named in found:
        return named
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def missing(directory: Path) -> InputError:
    if directory.is_dir() and any(directory.glob("*.safetensors")):
        return bad(f"{directory / DESCRIPTION} is missing")
    return InputError(f"there is no checkpoint in {directory}", at="compiled.load", fix="save one first, or load with missing_ok=True")
