"""The compiler is replaced by hand-made stages, for the time of one test."""

from __future__ import annotations

import handmade
import pytest

from tpcompile.runtime import compiled


@pytest.fixture(autouse=True)
def _handmade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "lower", handmade.lower)
    monkeypatch.setattr(compiled, "matches", handmade.matches)
