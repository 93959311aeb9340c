"""Golden texts, and settings that hold for every test."""

from __future__ import annotations

import difflib
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers reads it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts with what the tests made")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    set_aside()


@pytest.fixture(scope="module", autouse=True)
def kept_by_others() -> Iterator[None]:
    """What the tests of a file leave is not looked through by every collection of garbage in the files that follow."""
    yield
    set_aside()


def set_aside() -> None:
    """Of 1.5 million objects, full collections took 32 of 221 seconds of 355 tests; now, 5."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a text, whole, with `golden/<test's name>.txt` beside the test; `--update-golden` rewrites the file."""

    def compare(text: str, name: str | None = None) -> None:
        stem = re.sub(r"[^\w.=,-]+", "_", name or request.node.name.removeprefix("test_")).strip("_")
        path = Path(request.path).parent / "golden" / f"{stem}.txt"
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        before = path.read_text() if path.exists() else ""
        if before != text:
            shown = difflib.unified_diff(before.splitlines(), text.splitlines(), str(path.name), "now", lineterm="")
            pytest.fail("\n".join([*shown, "", "if the change is meant: pytest --update-golden"]), pytrace=False)

    return compare
