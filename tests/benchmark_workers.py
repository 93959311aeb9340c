"""What the tests of benchmarks run in real processes: their measurements, and the same beside formulas that are wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import memory_workers
import traffic_workers

from tpcompile import timeline
from tpcompile.inspect import memory as inspected
from tpcompile.memory import memory

Measured = tuple[list[Any], list[Any]]


def measured(bytes: tuple[traffic_workers.Case, ...], memory: tuple[memory_workers.Case, ...]) -> dict[str, Measured]:
    """By benchmark: with the formulas as they are; and where an agreement is of one number more, and an optimizer has a moment more."""
    found = {"bytes": [traffic_workers.steps(bytes)], "memory": [memory_workers.jobs(memory)]}
    with mock.patch.object(timeline, "AGREEMENT", timeline.AGREEMENT + 1):
        found["bytes"].append(traffic_workers.steps(bytes))
    with mock.patch.object(inspected, "memory", more):
        found["memory"].append(memory_workers.jobs(memory[:1]))
    return {name: (right, wrong) for name, (right, wrong) in found.items()}


def more(*args: Any, **settings: Any) -> Any:
    return memory(*args, **{**settings, "moments": 3})
