"""Bytes of training state: the formulas, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tpcompile.memory import Held, Memory, memory

ROOT, FIRST, SECOND = Held((5, 3), torch.float32), Held((4,), torch.float32, unit="a"), Held((6, 1), torch.float32, unit="b")
SCALAR, FROZEN = Held((), torch.float32), Held((3, 2), torch.bfloat16, trained=False, unit="b")
ALL = (ROOT, FIRST, SECOND, SCALAR, FROZEN)  # 60 + 16 + 24 + 4 + 12 bytes

MEMORY = [
    ("ddp", 0, Memory(116, 104, 208, 0, 0)),
    ("zero1", 0, Memory(116, 104, 2 * (36 + 8 + 12 + 4), 0, 0)),
    ("zero1", 1, Memory(116, 104, 2 * (24 + 8 + 12 + 4), 0, 0)),
    ("zero2", 0, Memory(36 + 8 + 12 + 4 + 8, 60, 120, 116, 64 + 24)),
    ("zero3", 1, Memory(24 + 8 + 12 + 4 + 4, 48, 96, 64 + 16 + 36, 64 + 24)),
]


@pytest.mark.parametrize(("mode", "replica", "expected"), MEMORY)
def test_two_replicas(mode: str, replica: int, expected: Memory) -> None:
    assert memory(ALL, mode, 2, replica) == expected


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_a_pipeline_holds_whole_parameters_and_gradients_until_its_end(mode: str) -> None:
    found = memory(ALL, mode, 2, pipeline=True)
    assert (found.gathered, found.unreduced) == (116, 104)
    assert memory(ALL, mode, 2, microbatches=2).unreduced == (104 if mode in ("zero2", "zero3") else 0)
    assert memory(ALL, mode, 1) == Memory(116, 104, 208, 0, 0)


def test_what_two_stages_of_a_rank_use() -> None:
    """Both hold the parameter and a gradient; the first one's is stepped."""
    both = (ROOT, replace(ROOT, twin=True))
    assert memory(both, "ddp", 2, pipeline=True) == Memory(120, 120, 120, 120, 120)
    assert memory(both, "zero3", 2, pipeline=True) == Memory(72, 72, 72, 120, 120)


def test_the_textbook() -> None:
    """7.5 billion parameters in 16 bits on 64 replicas, with 12 bytes of optimizer state for each: the paper's figure 1, in GB."""
    held = [Held((64 * 1875, 62500), torch.bfloat16)]
    found = {mode: memory(held, mode, replicas, moments=6) for mode, replicas in (("ddp", 1), ("zero1", 64), ("zero3", 64))}
    assert {mode: round(one.between / 1e9, 1) for mode, one in found.items()} == {"ddp": 120.0, "zero1": 31.4, "zero3": 1.9}


def test_more_replicas_than_rows() -> None:
    shares = [Held((3, 2), torch.float32).share(4, replica) for replica in range(4)]
    assert shares == [8, 8, 8, 0]
