"""What every operator hands to the process group: which call, and how many elements one rank gives to it.

The bytes of a message are its payload: the size of the tensor that one rank gives to the call. It is the same number on every rank
of the group, since pieces of unequal sizes are padded to the longest. What a rank then sends depends on the algorithm; `RING` has the
ring's, in which t ranks hand pieces round in a circle:

    all_reduce       2 (t - 1) / t payloads      a reduce-scatter, then an all-gather
    all_gather       t - 1 payloads              everybody's piece but one goes through every rank
    reduce_scatter   (t - 1) / t payloads        a rank gives the whole value, and sends all of it but its own piece
    broadcast        1 payload                   every rank but the last hands it on
    send             1 payload

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), sections 2 and 3.

A new operator is a row of `COLLECTIVES`; the bytes that `explain` prints, that the checker counts and that the process group is asked
for are compared in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy

from tpcompile.collectives.pieces import held_by, length, overlap
from tpcompile.layout import Size, product, symbol

RANKS = symbol("tp")
"""The number of ranks on the axis, in formulas."""


@dataclass(frozen=True)
class Given:
    """What an operator is given: the shape of the whole value, and for those that cut or join it a dimension and who holds what of it."""

    shape: tuple[Size, ...]
    dim: int
    bounds: tuple[int, ...]  # flat, as collectives take them; () for an operator that works on whole values
    ranks: int


@dataclass(frozen=True)
class Message:
    """One call of the process group. `elements` is how many a rank gives to it: an expression in the value's sizes and `RANKS`."""

    call: str  # a key of RING
    elements: Callable[[Given], Size]
    gradient: str = ""  # in backward, of what it serves, if that may have none: "value" or "weights"


@dataclass(frozen=True)
class Collective:
    """The calls that an operator makes, in order: in forward, and in the backward of its gradient, if it has one."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    differentiable: bool = True


def everything(given: Given) -> Size:
    """The whole value."""
    return product(given.shape)


def longest(given: Given) -> Size:
    """A piece, as long as the longest of any rank: an equal share of the whole where all are equal."""
    rest = product((*given.shape[: given.dim], *given.shape[given.dim + 1 :]))
    held = max(length(held_by(given.bounds, coordinate, given.ranks)) for coordinate in range(given.ranks))
    whole: Size = max(given.bounds)
    return rest * (whole / RANKS if held * given.ranks == whole else held)


def common(given: Given) -> Size:
    """What more than one rank holds."""
    rest = product((*given.shape[: given.dim], *given.shape[given.dim + 1 :]))
    return rest * length(overlap(given.bounds, given.ranks))


def positions(given: Given) -> Size:
    """A piece of the positions, as long as the longest of any rank."""
    rest = product((*given.shape[: given.dim], *given.shape[given.dim + 1 :]))
    held: Size = rest * sympy.ceiling(sympy.sympify(given.shape[given.dim]) / RANKS)
    return held


def padded(given: Given) -> Size:
    """All pieces of the positions, each as long as the longest."""
    held: Size = positions(given) * RANKS
    return held


COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "dropout": Collective(),
        "dropout_at": Collective(),
        "enter": Collective(backward=(Message("all_reduce", everything),)),
        "enter_linear": Collective(backward=(Message("all_reduce", everything, "value"),)),
        "enter_later": Collective(),  # once a step, by whoever runs the micro-batches
        "exp_sum": Collective(),
        "gather": Collective(forward=(Message("all_gather", longest),)),
        "kept_linear": Collective((Message("all_gather", positions),), (Message("reduce_scatter", padded, "value"),)),
        "local_slice": Collective(),
        "look_up": Collective(),
        "own_entries": Collective(),
        "own_one_hot": Collective(differentiable=False),
        "own_place": Collective(differentiable=False),
        "own_scatter": Collective(),
        "reduce": Collective(forward=(Message("all_reduce", everything),)),
        "seq_gather": Collective((Message("all_gather", positions),), (Message("reduce_scatter", padded),)),
        "seq_linear": Collective(
            (Message("all_gather", positions),),
            (Message("all_gather", positions, "weights"), Message("reduce_scatter", padded, "value")),
        ),
        "seq_scatter": Collective((Message("reduce_scatter", padded),), (Message("all_gather", positions),)),
        "seq_slice": Collective(backward=(Message("all_gather", positions),)),
        "seq_whole": Collective(forward=(Message("all_gather", positions),)),
        "reduce_max": Collective(forward=(Message("all_reduce", everything),), differentiable=False),
        "shared": Collective(backward=(Message("all_reduce", common),)),
        "uniform": Collective(),
    }
)
"""Our operators by name."""

LINEARS = ("tpcompile.enter_linear.default", "tpcompile.kept_linear.default", "tpcompile.seq_linear.default")
"""Linear layers joined with the collective of the value that they read: the first operand, before lists of weights and of biases."""

RING: Mapping[str, Callable[[Size], Size]] = MappingProxyType(
    {
        "all_gather": lambda ranks: ranks - 1,
        "all_reduce": lambda ranks: 2 - sympy.Integer(2) / ranks,
        "broadcast": lambda ranks: 1,
        "reduce_scatter": lambda ranks: 1 - sympy.Integer(1) / ranks,
        "send": lambda ranks: 1,
    }
)
"""How many payloads a rank sends in a ring of so many ranks."""
