"""The files of a program on disk, and the manifest that vouches for each of them by its SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tpcompile.errors import InputError, TpcompileError, caller, several

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
FORMAT = 1


def versions() -> dict[str, str]:
    """What a program was written with."""
    return {"tpcompile": metadata.version("tpcompile"), "torch": torch.__version__, "python": platform.python_version()}


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A folder to write a program to; its files come to stand in `directory`, for those of an earlier program, when all are there.

    After an error everything is as it was before. The folder is inside `directory`, where files are moved and not copied. Raises
    InputError for a directory with other files than a program's.
    """
    made = not directory.exists()
    earlier, part = _earlier(directory), directory / UNFINISHED
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir(parents=True)
    try:
        yield part
        _publish(part, directory, earlier)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if made and not any(directory.iterdir()):
            directory.rmdir()


def _earlier(directory: Path) -> set[str]:
    """The files of an earlier program, and of one whose writer was killed while it moved them. Raises InputError where others stand."""
    manifests = [path for path in (directory / MANIFEST, directory / UNFINISHED / MANIFEST) if path.is_file()]
    if not manifests and directory.exists() and any(file.name != UNFINISHED for file in directory.iterdir()):
        what = f"{directory} is not empty, and no program was written there"
        raise InputError(what, at=f"compiled.emit({str(directory)!r})", source=caller(), fix="give a new folder")
    return {Path(name).name for path in manifests for name in json.loads(path.read_text(encoding="utf-8"))["files"]}


def _publish(part: Path, directory: Path, earlier: set[str]) -> None:
    """The manifest comes last: until then no file but those that it replaces is vouched for. What the new program lacks goes."""
    names = sorted((file.name for file in part.iterdir()), key=lambda name: (name == MANIFEST, name))
    for name in names:
        os.replace(part / name, directory / name)
    for name in earlier.difference(names):
        (directory / name).unlink(missing_ok=True)


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, with the hashes of all files that stand in the directory. It comes last: without it nothing is loaded."""
    named = {file.name: digest(file) for file in sorted(directory.iterdir()) if file.is_file() and file.name != MANIFEST}
    text = json.dumps({"format": FORMAT, "versions": versions(), **content, "files": named}, indent=1, ensure_ascii=False)
    (directory / f".{MANIFEST}").write_text(text + "\n", encoding="utf-8")
    os.replace(directory / f".{MANIFEST}", directory / MANIFEST)  # never half of one


def read_manifest(directory: Path, call: str) -> dict[str, Any]:
    """The manifest of a program on disk, whose files are all there and unchanged.

    Raises InputError naming the file that is missing or changed, and the version that differs: a program is run by the release of
    torch (major and minor) and of tpcompile that wrote it.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"{path} cannot be read: {error}"
        raise InputError(what, at=call, source=caller(), fix="give the folder that compiled.emit wrote") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), dict):
        raise InputError(f"{path} is no manifest of format {FORMAT}", at=call, source=caller(), fix="emit the program again")
    problems: list[TpcompileError] = []
    for name, written in content["versions"].items():
        here = versions().get(name, "")
        if _release(here) != _release(written):
            what = f"the program was written with {name} {written}, this is {here}"
            problems.append(InputError(what, at=str(path), fix=f"install {name} {written}, or emit the program again"))
    return _checked(directory, content, call, problems)


def _checked(directory: Path, content: dict[str, Any], call: str, problems: list[TpcompileError]) -> dict[str, Any]:
    for name, expected in content["files"].items():
        file = directory / name
        if Path(name).name != name:
            problems.append(InputError(f"{name} is no plain file name", at=call, fix="emit the program again"))
        elif not file.is_file():
            problems.append(InputError(f"{file} is missing", at=call, fix="copy the whole folder, or emit the program again"))
        elif digest(file) != expected:
            what = f"{file} is not the file that was written: its SHA-256 differs"
            problems.append(InputError(what, at=call, fix="emit the program again"))
    if error := several(problems):
        raise error
    return content


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
