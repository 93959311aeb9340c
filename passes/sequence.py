"""sequence: between regions, every rank keeps its own positions of the residual stream."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch import fx

from tpcompile.factors import LayoutError, join, reshape
from tpcompile.ir import Left, Program, Sharded
from tpcompile.layout import Dim, Even, Factor, Layout, TensorType, cut_factors, fits, same, size_of
from tpcompile.passes._entering import along_positions, differentiable, entering
from tpcompile.rules import RESHAPES, Op, addend, backward, bind_rule, forward, has_rule, op_name, view_op, wants_of

DEAREST = 3
"""A stretch is cut where the collectives that this adds are at most a third of those that it has anyway."""

CHEAP = frozenset([*RESHAPES, "aten.to.dtype", "aten.to.dtype_layout", "aten.transpose.int", "aten.permute.default"])
"""What costs nothing where it is done whole: not worth a cut for its own sake."""


def sequence(sharded: Sharded) -> Sharded:
    """Cut what stands between regions (norms, dropout, residual sums) along its positions.

    before  %y = linear(…) : f32[b, s, 64], row-cut;  %x1 = add(%x, %y);  %n = rms_norm(%x1) : f32[b, s, 64] grad +tp
    after   %y : f32[b, s@tp, 64], reduce-scattered;  %x1, %n : f32[b, s@tp, 64];  what uses %n in a region gathers it
    """
    if sharded.parts == 1:
        return sharded
    stream = _Stream(sharded)
    stream.prune()
    stream.weigh()
    if not stream.cut:
        return replace(sharded, stretches=tuple(stream.reasons.values()))
    layouts = {**sharded.layouts, **stream.cut}
    return replace(
        sharded,
        layouts=layouts,
        entering=entering(sharded.program, layouts, sharded.rows, stream.flowing),
        gathering=frozenset(name for name in stream.cut if stream.users(name)[2]),
        stretches=tuple(stream.reasons.values()),
    )


class _Stream:
    """The values that are cut along their positions: from every reduction on, as far as operations keep positions apart."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.program = sharded, sharded.program
        self.nodes = sharded.program.nodes()
        self.flowing = differentiable(sharded.program)
        self.scores = {row for r in sharded.plan.regions if r.kind == "vocabulary" for row in r.rows}
        self.scores -= {name for name in self.scores if op_name(self.nodes[name]) == "aten.embedding.default"}
        self.rows_of_batch = batch_symbols(sharded.program)
        self.cut: dict[str, Layout] = {}
        self.reasons: dict[str, Left] = {}
        self.refused: dict[str, str] = {}
        for node in sharded.program.graph.nodes:
            layout = self.start(node) if node.name in sharded.rows else self.follow(node)
            if layout is not None:
                self.cut[node.name] = layout
        self.readers = {name: self._readers(name) for name in self.cut}

    # --- how far positions can be kept apart

    def start(self, node: fx.Node) -> Layout | None:
        """A reduction's result, cut along its positions."""
        if node.name in self.scores:
            return None
        kind, layout, added = self.program.types[node.name], self.sharded.layouts[node.name], addend(node)
        if not isinstance(kind, TensorType) or not isinstance(layout, Layout) or not layout.is_whole or node.name not in self.flowing:
            return None
        added_kind = self.program.types[added.name] if added is not None else None
        if isinstance(added_kind, TensorType) and len(added_kind.shape) > 1:
            return None
        at = self.positions(node, kind)
        return None if at is None else self.placed(kind, at)

    def positions(self, node: fx.Node, kind: TensorType) -> int | None:
        """The dimension that counts positions: neither features nor rows of the batch; one of unknown length before others."""
        if op_name(node).startswith("aten.conv"):
            return None
        free = [d for d, size in enumerate(kind.shape[:-1]) if size != 1 and not self.is_batch(size)]
        unknown = [d for d in free if isinstance(kind.shape[d], sympy.Symbol)]
        known = [d for d in free if d and isinstance(kind.shape[d], int) and kind.shape[d] >= self.sharded.parts]
        return unknown[0] if unknown else known[0] if known else None

    def is_batch(self, size: object) -> bool:
        return isinstance(size, sympy.Basic) and bool(size.free_symbols & self.rows_of_batch)

    def placed(self, kind: TensorType, at: int) -> Layout:
        cut = Even(self.sharded.axis, self.sharded.parts)
        return Layout(tuple(((Factor(size, cut if d == at else None),),) for d, size in enumerate(kind.shape)))

    def follow(self, node: fx.Node) -> Layout | None:
        """The layout of what is computed from cut values, position by position; None where it is not."""
        kind, layout = self.program.types.get(node.name), self.sharded.layouts.get(node.name)
        if node.op != "call_function" or not isinstance(kind, TensorType) or not isinstance(layout, Layout):
            return None
        if not layout.is_whole or node.name not in self.flowing or not any(o.name in self.cut for o in node.all_input_nodes):
            return None
        op = view_op(node, self.program.types)
        try:
            return self.carried(op)
        except LayoutError as error:
            self.refused[node.name] = str(error)
            return None

    def carried(self, op: Op) -> Layout:
        """Raises LayoutError where positions do not stay apart, or where that would cost more than it saves."""
        if not has_rule(op):
            raise LayoutError(f"no rule for {op.name}")
        have = [self.cut.get(operand.name) for operand in op.operands]
        out = made_of(op, have)
        found = [dim for dim in out.dims if cut_factors(dim)]
        if len(found) != 1 or len(found[0]) != 1 or len(found[0][0]) != 1:
            raise LayoutError(f"{op.name} needs all positions")
        wants = backward(op, [out])
        for operand, own, want in zip(op.operands, have, wants, strict=True):
            layout = self.sharded.layouts.get(operand.name)
            if own is not None and not same(own, want):
                raise LayoutError(f"{op.name} needs all positions")
            if own is None and not (isinstance(layout, Layout) and layout.is_whole):
                raise LayoutError("it reads a value of a region")
            if own is None and not want.is_cut and operand.name in self.flowing and self.is_large(operand):
                raise LayoutError("it has a weight of its own, which stays whole")
        if not all(fits(a, b) for a, b in zip(forward(op, wants, [out]), [out], strict=True)):
            raise LayoutError(f"{op.name} needs all positions")
        return out

    def is_large(self, operand: fx.Node) -> bool:
        """Whether the gradient of what is used at every position would be a sum over ranks of more than a vector."""
        kind = self.program.types[operand.name]
        return not isinstance(kind, TensorType) or sum(size != 1 for size in kind.shape) > 1

    # --- what it costs

    def _readers(self, name: str) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Who reads a cut value: by its positions; whole and in a region; whole and elsewhere."""
        along: list[fx.Node] = []
        inside: list[fx.Node] = []
        outside: list[fx.Node] = []
        for user in self.nodes[name].users:
            if op_name(user) == "aten.sym_size.int":
                continue
            on_pieces = bool(wants_of(user, self.program.types, self.sharded.layouts, self.sharded.rows))
            (inside if on_pieces else along if user.name in self.cut else outside).append(user)
        return along, inside, outside

    def users(self, name: str) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """`readers`, as things are now."""
        along, inside, outside = self.readers[name]
        return [u for u in along if u.name in self.cut], inside, [*outside, *(u for u in along if u.name not in self.cut)]

    def prune(self) -> None:
        """Take out what nothing reads by its positions, where a cut gains nothing; and what is left without a cut operand."""
        changed = True
        while changed:
            changed = False
            for name in reversed(list(self.cut)):
                along = self.users(name)[0]
                row = name in self.sharded.rows
                orphan = not row and not any(o.name in self.cut for o in self.nodes[name].all_input_nodes)
                if orphan or (not along and (row or op_name(self.nodes[name]) in CHEAP)):
                    del self.cut[name]
                    changed = True

    def weigh(self) -> None:
        """Leave stretches whole that would need many collectives more. A reduction and an entry are two each, either way."""
        for stretch in self.stretches():
            base = added = 0
            for name in stretch:
                _, inside, outside = self.users(name)
                base += 2 * (name in self.sharded.rows) + 2 * bool(inside)
                added += bool(outside) * (1 + bool(inside)) + len(self.sliced(name))
            for name in stretch:
                for user in self.users(name)[2]:
                    self.note(user, self.refused.get(user.name, "it needs all positions"))
            if added * DEAREST > base:
                for name in stretch:
                    del self.cut[name]

    def sliced(self, name: str) -> list[fx.Node]:
        """Whole operands, with a gradient, of which an operation on positions takes its own."""
        if name in self.sharded.rows:
            return []
        wants = backward(view_op(self.nodes[name], self.program.types), [self.cut[name]])
        operands = view_op(self.nodes[name], self.program.types).operands
        return [
            o
            for o, want in zip(operands, wants, strict=True)
            if o.name not in self.cut and along_positions(want) and o.name in self.flowing
        ]

    def stretches(self) -> list[list[str]]:
        """Cut values that are computed from one another."""
        group: dict[str, list[str]] = {}
        for name in self.cut:
            group[name] = [name]
            for operand in () if name in self.sharded.rows else self.nodes[name].all_input_nodes:
                ours, theirs = group[name], group.get(operand.name)
                if theirs is not None and theirs is not ours:
                    small, large = sorted((ours, theirs), key=len)
                    large.extend(small)
                    group.update(dict.fromkeys(small, large))
        return list({id(members): members for members in group.values()}.values())

    def note(self, node: fx.Node, reason: str) -> None:
        if node.op == "call_function":
            source = self.program.sources.get(node.name)
            self.reasons.setdefault(node.name, Left(source.path if source else node.name, node.name, reason, source))


def made_of(op: Op, have: list[Layout | None]) -> Layout:
    """The output's layout where some operands are cut as they have it, and the others fit."""
    if op.name in RESHAPES:
        if have[0] is None:
            raise LayoutError(f"{op.name} needs all positions")
        return reshape(have[0], op.outs[0].shape)
    bound = bind_rule(op)
    dims: dict[str, Dim] = {}
    for tokens, layout, kind in zip(bound.ins, have, op.ins, strict=True):
        for token, dim, size in zip(tokens, layout.dims, kind.shape, strict=True) if layout else ():
            if cut_factors(dim) and size == bound.sizes[token.letter]:
                dims[token.letter] = join(dims[token.letter], dim) if token.letter in dims else dim
    (tokens,), (kind,) = bound.outs, op.outs
    return Layout(tuple(_sized(dims.get(token.letter), size) for token, size in zip(tokens, kind.shape, strict=True)))


def _sized(dim: Dim | None, size: object) -> Dim:
    return dim if dim is not None and size_of(dim) == size else ((Factor(size),),)  # type: ignore[arg-type]


def batch_symbols(program: Program) -> frozenset[sympy.Basic]:
    """The symbols that count rows of the batch."""
    found: set[sympy.Basic] = set()
    for name, entry in program.inputs.items():
        kind = program.types[name]
        if entry.batch_dim is not None and isinstance(kind, TensorType):
            found |= sympy.sympify(kind.shape[entry.batch_dim]).free_symbols
    return frozenset(found)
