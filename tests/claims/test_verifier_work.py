"""The verifier is a small part of a compile, and does not grow with the mesh: counted in calls of Python functions, not in seconds.

`benchmarks/verifier.py` prints its share of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from parity_models import compiled, made

import tpcompile
from tpcompile import driver


@dataclass
class Calls:
    """Calls of Python functions, all and within the verifier."""

    all: int = 0
    inside: int = 0
    depth: int = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.all += event == "call"
        self.inside += event == "call" and self.depth > 0


def counted(work: Callable[[], object]) -> Calls:
    calls, verify = Calls(), driver.verify

    def watched(value: Any, known: Any = None) -> Any:
        calls.depth += 1
        try:
            return verify(value, known)
        finally:
            calls.depth -= 1

    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "verify", watched)
        sys.setprofile(calls)
        try:
            work()
        finally:
            sys.setprofile(before)
    return calls


def test_a_tenth_of_a_compile_at_most() -> None:
    model, batch, loss = made("llama")
    calls = counted(lambda: tpcompile.compile(model, "pp=2,tp=4", batch, loss=loss))
    assert 0.01 < calls.inside / calls.all <= 0.1, calls


def test_replicas_add_nothing_and_ranks_little() -> None:
    """Over eight replicas as over one; on 16 tensor ranks there are three kinds of pieces, for one kind on 2."""
    compiled("llama", "tp=2")
    one, replicas, ranks = (counted(partial(compiled, "llama", mesh)).inside for mesh in ("tp=2", "dp=8,tp=2", "tp=16"))
    assert replicas <= 1.05 * one and ranks <= 3 * one, (one, replicas, ranks)
