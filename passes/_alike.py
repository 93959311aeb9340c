"""Private to divide_loss: along what a value does not change, for values that the rows' data has no part in.

What is the same in all rows can be read as rows in more than one way:

    %i = expand(arange(s), [2, b, 16, s])      alike along 2, b and 16
    %j = view(%i, [32·b·s])                    32·b times the same s numbers, so that each row may have 32·s of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from tpcompile.factors import LayoutError, divides, match_groups, quotient
from tpcompile.ir import Program
from tpcompile.layout import Size, TensorType, product
from tpcompile.rules import RESHAPES, SPLITS, Op, bind_rule, op_name, view_op

if TYPE_CHECKING:
    from collections.abc import Iterator

Part = tuple[Size, bool]
"""A factor of a dimension, and whether the value is the same for all of its indices."""

Parts = tuple[Part, ...]

EXPANDS = ("aten.expand.default", "aten.expand_as.default")
FILLED = ("aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.scalar_tensor.default")


@dataclass
class Alike:
    """The factors of every dimension of values that depend on sizes, constants and parameters alone. Found when they are asked for."""

    program: Program
    known: dict[fx.Node, tuple[Parts, ...]] = field(default_factory=dict)
    fixed: set[fx.Node] = field(default_factory=set)

    def leading(self, node: fx.Node) -> Iterator[tuple[int, Size]]:
        """For each dimension how many times its beginning is repeated as it is."""
        for dim, parts in enumerate(self.parts(node)):
            changing = next((place for place, (_, same) in enumerate(parts) if not same), len(parts))
            yield dim, product(size for size, _ in parts[:changing])

    def parts(self, node: fx.Node) -> tuple[Parts, ...]:
        if not self.fixed:
            self.find()
        if node not in self.known:
            kind = self.program.types.get(node.name)
            made = self.made(node) if node in self.fixed and node.op == "call_function" else None
            self.known[node] = made or (tuple(((size, False),) for size in kind.shape) if isinstance(kind, TensorType) else ())
        return self.known[node]

    def find(self) -> None:
        """The values that need no input with rows."""
        for node in self.program.graph.nodes:
            entry = self.program.inputs.get(node.name)
            rows = node.name == "rng_key" or (entry is not None and entry.batch_dim is not None)
            if not rows and all(operand in self.fixed for operand in node.all_input_nodes if self.is_tensor(operand)):
                self.fixed.add(node)

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.program.types.get(node.name), (TensorType, tuple))

    def made(self, node: fx.Node) -> tuple[Parts, ...] | None:
        """What an operation leaves alike; None for one that leaves nothing so, or has several outputs."""
        kind, name = self.program.types.get(node.name), op_name(node)
        if not isinstance(kind, TensorType):
            return None
        if name in FILLED:
            return tuple(((size, True),) for size in kind.shape)
        op = view_op(node, self.program.types)
        if not op.operands or name in SPLITS or "dropout" in name:
            return None
        if name in RESHAPES:
            return reshaped(self.parts(op.operands[0]), op.ins[0].shape, kind.shape)
        try:
            return self.bound(op)
        except LayoutError:
            return None

    def bound(self, op: Op) -> tuple[Parts, ...]:
        """By the operation's rule: alike along a letter where all operands are that have it."""
        bound = bind_rule(op)
        found: dict[str, Parts] = {}
        for operand, tokens, kind in zip(op.operands, bound.ins, op.ins, strict=True):
            for token, parts, size in zip(tokens, self.parts(operand), kind.shape, strict=True):
                if token.letter not in "*_" and size != 1 and size == bound.sizes[token.letter]:
                    found[token.letter] = both(found[token.letter], parts) if token.letter in found else parts
        (outs,) = bound.outs
        never = bound.never
        return tuple(
            found.get(token.letter, ((size, True),)) if token.letter not in never else ((size, False),)
            for token, size in zip(outs, op.outs[0].shape, strict=True)
        )


def both(one: Parts, other: Parts) -> Parts:
    """Alike where both are."""
    if [size for size, _ in one] == [size for size, _ in other]:
        return tuple((size, a and b) for (size, a), (_, b) in zip(one, other, strict=True))
    return ((product(size for size, _ in one), False),)


def reshaped(dims: Sequence[Parts], before: Sequence[Size], after: Sequence[Size]) -> tuple[Parts, ...] | None:
    """The factors after a view; None where they cannot be told apart."""
    made: list[Parts] = [((size, False),) for size in after]
    try:
        for ins, outs in match_groups(list(before), list(after)):
            rest = merged([part for index in ins for part in dims[index]])
            for index in outs:
                made[index], rest = taken(rest, after[index])
    except LayoutError:
        return None
    return tuple(made)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    found: list[Part] = []
    for size, same in parts:
        if found and found[-1][1] == same:
            found[-1] = (found[-1][0] * size, same)
        else:
            found.append((size, same))
    return found


def taken(parts: list[Part], size: Size) -> tuple[Parts, list[Part]]:
    """Factors from the front whose product is `size`, and the rest."""
    front: list[Part] = []
    rest = list(parts)
    while size != 1:
        if not rest:
            raise LayoutError("a view of more than there is")
        own, same = rest.pop(0)
        if divides(own, size):
            front.append((own, same))
            size = quotient(size, own)
        elif divides(size, own):
            front.append((size, same))
            rest.insert(0, (quotient(own, size), same))
            size = 1
        else:
            raise LayoutError("a view that divides a factor")
    return tuple(front) or ((1, True),), rest
