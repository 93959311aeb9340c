"""Private to attend: what masks are, as far as it follows from indices and sizes alone, by running the program on conditions.

%q = unsqueeze(arange(s), 1) : i64[s, 1]          i0
%k = unsqueeze(arange(s), 0) : i64[1, s]          i1
%m = le(%k, %q) : bool[s, s]                      True where i0 - i1 >= 0, else False
%a = where(%m, 0.0, -inf) : f32[s, s]             0.0 where i0 - i1 >= 0, else -inf

A value is a line (a whole number that is a sum of multiples of the element's indices), or one of a few numbers, each under a condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import fx

from tpcompile.ir import Program
from tpcompile.layout import Size, TensorType
from tpcompile.operation import argument, aten_names, op_name
from tpcompile.passes._indices import ALWAYS, NEVER, ZERO, Condition, Line, TooMuch, at_least_zero, both, either, index, negated, placed
from tpcompile.passes._moves import MOVES, WHOLE, moved

Number = bool | int | float
Cases = tuple[tuple[Number, Condition], ...]
"""Numbers, and where each of them is: exactly one holds at every place."""

Value = Line | Cases

KEPT = aten_names("alias.default clone.default contiguous.default detach.default lift_fresh_copy.default")
CASTS = aten_names("_to_copy.default to.device to.dtype to.dtype_layout to.other type_as.default")
FILLS: Mapping[str, Number] = {
    **dict.fromkeys(aten_names("new_ones.default ones.default ones_like.default"), 1),
    **dict.fromkeys(aten_names("new_zeros.default zeros.default zeros_like.default"), 0),
}
FULL = {
    "aten.full.default": "fill_value",
    "aten.full_like.default": "fill_value",
    "aten.new_full.default": "fill_value",
    "aten.scalar_tensor.default": "s",
}
ASKED: Mapping[str, int] = {**dict.fromkeys((*FILLS, *FULL), 0), "aten.expand_as.default": 1}
"""How many operands are read by operations that ask others for their shape alone."""

COUNTS = aten_names("arange.default arange.start arange.start_step")
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")
POINTWISE = aten_names(
    "__and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor abs.default add.Scalar add.Tensor bitwise_and.Scalar bitwise_and.Tensor "
    "bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Tensor clamp.default clamp_max.default clamp_min.default "
    "div.Scalar div.Tensor eq.Scalar eq.Tensor exp.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor isinf.default le.Scalar le.Tensor "
    "log.default logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor masked_fill.Scalar "
    "masked_fill.Tensor maximum.default minimum.default mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg.default negative.default "
    "rsub.Scalar rsub.Tensor sqrt.default sub.Scalar sub.Tensor where.Scalar where.ScalarOther where.ScalarSelf where.self"
)
"""Operations of elements, which are run on the numbers themselves."""


@dataclass(frozen=True)
class Masks:
    """What is known of a program's values, by name; of the others, why it is not."""

    values: Mapping[str, Value]
    why: Mapping[str, str]


def masks_of(program: Program) -> Masks:
    """Follow all values that indices and sizes decide."""
    values: dict[str, Value] = {}
    why: dict[str, str] = {}
    for node in program.graph.nodes:
        kind, found = program.types.get(node.name), None
        if not isinstance(kind, TensorType):
            continue
        read = node.all_input_nodes[: ASKED.get(op_name(node)) if node.op == "call_function" else 0]
        unknown = next((operand for operand in read if operand.name in why), None)
        reason = why[unknown.name] if unknown is not None else f"{op_name(node)} is not followed"
        try:
            if node.op == "placeholder":
                found, reason = _held(program, node)
            elif unknown is None:
                found = _Known(program.types, values).value(node, kind)
        except TooMuch:
            reason = "its conditions get too long"
        except RuntimeError:
            reason = "its numbers do not fit into their type"  # as torch says when the operation runs
        if found is None:
            why[node.name] = reason
        else:
            values[node.name] = found.fixed(kind.shape) if isinstance(found, Line) else found
    return Masks(values, why)


def _held(program: Program, node: fx.Node) -> tuple[Value | None, str]:
    """A single number that the program itself has; what a user may change is not known."""
    if (constant := program.constants.get(node.name)) is not None and constant.numel() == 1 and not constant.is_meta:
        return one(constant.item()), ""
    if node.name in program.parameters:
        return None, "it is learned"
    held = program.buffers.get(node.name)
    if held is not None:
        return None, f"it reads the buffer {held}, which may change"
    return None, f"it depends on {program.inputs[node.name].path}" if node.name in program.inputs else f"it depends on {node.name}"


def one(number: Number) -> Value:
    """The same number everywhere."""
    return Line.of({}, number) if isinstance(number, int) and not isinstance(number, bool) else ((number, ALWAYS),)


def cases_of(value: Value | None) -> Cases | None:
    """A value as numbers under conditions; None for one that counts."""
    if isinstance(value, Line):
        return None if value.plain is None else ((value.plain, ALWAYS),)
    return value


def line_of(value: Value | None) -> Line | None:
    if isinstance(value, Line) or value is None:
        return value
    number = value[0][0] if len(value) == 1 else None
    return Line.of({}, int(number)) if isinstance(number, int) else None


@dataclass(frozen=True)
class _Known:
    """One operation all of whose tensors are known."""

    types: Mapping[str, Any]
    values: Mapping[str, Value]

    def value(self, node: fx.Node, kind: TensorType) -> Value | None:
        name = op_name(node)
        if name in KEPT:
            return self.values[node.all_input_nodes[0].name]
        if name in CASTS:
            return self.cast(node, kind)
        if name in FILLS or name in FULL:
            number = FILLS[name] if name in FILLS else argument(node, FULL[name])
            return None if isinstance(number, fx.Node) else one(torch.tensor(number).to(kind.dtype).item())
        if name in COUNTS:
            return self.counted(node, kind)
        if name in ("aten.tril.default", "aten.triu.default"):
            return self.triangle(node, kind)
        if name == "aten.cumsum.default":
            return self.summed(node, kind)
        if name == "aten.diff.default":
            return self.steps(node, kind)
        if name in POINTWISE:
            found = self.arithmetic(node, kind) or self.compared(node, kind)
            return found if found is not None else self.elements(node, kind)
        return self.moved(node, kind)

    # --- numbers that count

    def size(self, value: Any) -> Size | None:
        """A number that a call is given: as it is, or a size."""
        found = self.types.get(value.name) if isinstance(value, fx.Node) else value
        return None if isinstance(found, (TensorType, tuple, float, bool)) else found

    def counted(self, node: fx.Node, kind: TensorType) -> Value | None:
        default = op_name(node) == "aten.arange.default"
        start = 0 if default else self.size(argument(node, "start"))
        step = self.size(argument(node, "step")) if op_name(node) == "aten.arange.start_step" else 1
        return Line.of({0: step}, start) if kind.dtype in WHOLE and isinstance(step, int) and start is not None else None

    def line(self, given: Any, kind: TensorType) -> Line | None:
        """An operand as a line, its dimensions numbered as those of the result."""
        if not isinstance(given, fx.Node) or not isinstance(self.types[given.name], TensorType):
            size = self.size(given)
            return None if size is None else Line.of({}, size)
        own = self.types[given.name]
        found = line_of(self.values.get(given.name))
        more = len(kind.shape) - len(own.shape)
        return found.placed({dim: index(dim + more) for dim, _ in found.terms}) if found and own.dtype in (*WHOLE, torch.bool) else None

    def arithmetic(self, node: fx.Node, kind: TensorType) -> Value | None:
        """Sums of lines, and products with a number."""
        name = op_name(node).split(".")[1]
        if name not in ("add", "mul", "neg", "negative", "rsub", "sub") or kind.dtype not in WHOLE:
            return None
        a = self.line(argument(node, "self"), kind)
        b = self.line(argument(node, "other"), kind) if "neg" not in name else ZERO
        alpha = argument(node, "alpha", 1)
        if a is None or b is None or not isinstance(alpha, int):
            return None
        match name:
            case "add":
                return a.plus(b, alpha)
            case "sub":
                return a.plus(b, -alpha)
            case "rsub":
                return b.plus(a, -alpha)
            case "neg" | "negative":
                return a.times(-1)
        number, other = (a.plain, b) if a.plain is not None else (b.plain, a)
        return None if number is None else other.times(number)

    def compared(self, node: fx.Node, kind: TensorType) -> Value | None:
        name = op_name(node).split(".")[1]
        if name not in COMPARED:
            return None
        a, b = (self.line(argument(node, operand), kind) for operand in ("self", "other"))
        if a is None or b is None:
            return None
        more, less = at_least_zero(a.plus(b, -1), kind.shape), at_least_zero(b.plus(a, -1), kind.shape)
        ways = {"ge": more, "gt": negated(less), "le": less, "lt": negated(more), "eq": both(more, less), "ne": negated(both(more, less))}
        return joined([(True, ways[name]), (False, negated(ways[name]))])

    def summed(self, node: fx.Node, kind: TensorType) -> Value | None:
        """The running sum of one number."""
        each = line_of(self.values[node.all_input_nodes[0].name])
        if each is None or each.plain is None or kind.dtype not in WHOLE or not kind.shape:
            return None
        return Line.of({argument(node, "dim") % len(kind.shape): each.plain}, each.plain)

    def steps(self, node: fx.Node, kind: TensorType) -> Value | None:
        """From each element to the next, where all steps are equal; before the first one stands what is prepended."""
        source, before = argument(node, "self"), argument(node, "prepend")
        line, shape = line_of(self.values[source.name]), self.types[source.name].shape
        if line is None or argument(node, "n") != 1 or argument(node, "append") is not None or kind.dtype not in WHOLE:
            return None
        dim = argument(node, "dim") % len(shape)
        step = dict(line.terms).get(dim, 0)
        if before is None:
            return Line.of({}, step)
        ahead = line_of(self.values[before.name])
        if ahead is None or self.types[before.name].shape[dim] != 1:
            return None
        first = line.plus(index(dim), -step).plus(ahead, -1)
        return Line.of({}, step) if first == Line.of({}, step) else None

    # --- numbers under conditions

    def cast(self, node: fx.Node, kind: TensorType) -> Value | None:
        found = self.values[node.all_input_nodes[0].name]
        if isinstance(found, Line) and kind.dtype in WHOLE:
            return found
        before, cases = self.types[node.all_input_nodes[0].name].dtype, cases_of(found)
        return cases and joined([(torch.tensor(number, dtype=before).to(kind.dtype).item(), where) for number, where in cases])

    def triangle(self, node: fx.Node, kind: TensorType) -> Value | None:
        """Zeros above a diagonal, or below it."""
        cases, diagonal = cases_of(self.values[node.all_input_nodes[0].name]), self.size(argument(node, "diagonal"))
        if cases is None or diagonal is None:
            return None
        row, column = (index(len(kind.shape) - back) for back in (2, 1))
        over = column.plus(row, -1).plus(Line.of({}, diagonal), -1)  # column - row - diagonal
        where = at_least_zero(over if op_name(node) == "aten.triu.default" else over.times(-1), kind.shape)
        zero = torch.zeros((), dtype=kind.dtype).item()
        return joined([*((number, both(held, where)) for number, held in cases), (zero, negated(where))])

    def elements(self, node: fx.Node, kind: TensorType) -> Value | None:
        """What an operation makes of each choice of its operands' numbers, computed by itself."""
        operands = [o for o in node.all_input_nodes if isinstance(self.types.get(o.name), TensorType)]
        known = [cases_of(self.values[operand.name]) for operand in operands]
        if len(operands) != len(node.all_input_nodes) or not all(known):
            return None
        made: list[tuple[Number, Condition]] = []
        for chosen in product(*known):  # type: ignore[arg-type]
            where, tensors = ALWAYS, dict[fx.Node, torch.Tensor]()
            for operand, (number, condition) in zip(operands, chosen, strict=True):
                own = self.types[operand.name]
                more = len(kind.shape) - len(own.shape)
                where = both(where, placed(condition, {dim: index(dim + more) for dim in range(len(own.shape))}, kind.shape))
                tensors[operand] = torch.full([1] * len(own.shape), number, dtype=own.dtype)
            if where != NEVER:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), tensors.__getitem__)
                result = node.target(*args, **kwargs)  # type: ignore[operator]
                if result.dtype != kind.dtype or bool(result.isnan().any()):
                    return None
                made.append((result.item(), where))
        return joined(made)

    def moved(self, node: fx.Node, kind: TensorType) -> Value | None:
        if op_name(node) not in MOVES:
            return None
        source = node.all_input_nodes[0]
        shape, found = self.types[source.name].shape, self.values[source.name]
        if (found.terms == ()) if isinstance(found, Line) else len(found) == 1:
            return found
        places = moved(node, shape, kind.shape, self.size, lambda each: self.line(each, self.types[each.name]), self.types)
        if places is None:
            return None
        if isinstance(found, Line):
            return found.placed(places).fixed(kind.shape)
        return joined([(number, placed(where, places, kind.shape)) for number, where in found])


def joined(cases: list[tuple[Number, Condition]]) -> Value:
    """Each number once, and those that are anywhere."""
    made: dict[Number, Condition] = {}
    for number, where in cases:
        made[number] = either(made.get(number, NEVER), where)
    held = tuple((number, where) for number, where in made.items() if where != NEVER)
    return one(held[0][0]) if len(held) == 1 else held
