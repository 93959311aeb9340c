"""Every operation makes, of its rank's pieces, a piece of the shape that its layout says.

Who says what an operation makes is torch itself, on tensors that have shapes and no values. Coordinates whose pieces have equal sizes
are alike: one of them is looked at, so that the work does not grow with the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tpcompile import collectives
from tpcompile.ir import Local, PerRank
from tpcompile.laws.places import broken
from tpcompile.layout import Dim, Size, TensorType, cut_factors, local_size
from tpcompile.operation import op_name

META = torch.device("meta")


class Sizes:
    """The values of sizes, and of the pieces that coordinates hold, each computed once. None: known only when the program runs."""

    def __init__(self, symbols: Mapping[sympy.Symbol, int]) -> None:
        self._symbols = symbols
        self._values: dict[Size, int | None] = {}
        self._pieces: dict[tuple[Dim, int], int | None] = {}

    def value(self, size: Size) -> int | None:
        if isinstance(size, int):
            return size
        if size not in self._values:
            found = size.subs(self._symbols)  # type: ignore[arg-type]
            self._values[size] = int(found) if found.is_number else None
        return self._values[size]

    def piece(self, dim: Dim, coordinate: int) -> int | None:
        if (dim, coordinate) not in self._pieces:
            self._pieces[dim, coordinate] = self.value(local_size(dim, coordinate))
        return self._pieces[dim, coordinate]


@dataclass(frozen=True)
class Shape:
    """An element type and sizes; None where a size is not known."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]

    def fits(self, value: Tensor) -> bool:
        alike = len(value.shape) == len(self.sizes) and all(b in (None, a) for a, b in zip(value.shape, self.sizes, strict=True))
        return alike and value.dtype == self.dtype

    def empty(self) -> Tensor | None:
        """A tensor of this shape without values."""
        known = [size for size in self.sizes if size is not None]
        return torch.empty(known, dtype=self.dtype, device=META) if len(known) == len(self.sizes) else None


def check_shapes(local: Local, symbols: Mapping[sympy.Symbol, int]) -> None:
    """Raise VerifyError for a value whose local shape is not its layout's. `symbols` have the values of an example."""
    known, sizes = dict[object, Any](), Sizes(symbols)
    with torch.no_grad():
        for coordinate in unlike(local, sizes):
            _Run(local, sizes, coordinate, known).check()


def unlike(local: Local, sizes: Sizes) -> list[int]:
    """One coordinate of each kind: those whose pieces, and whose numbers in the graph, are equal are of one kind."""
    dims: set[Dim] = set()
    numbers: list[PerRank] = []
    lengths: list[fx.Node] = []
    for node in local.graph.nodes:
        layout = local.layouts.get(node.name)
        for part in layout if isinstance(layout, tuple) else (layout,):
            dims.update(dim for dim in part.dims if cut_factors(dim)) if part is not None else None
        if _is_length(node):
            lengths.append(node)
        elif node.op == "call_function" and not op_name(node).startswith("tpcompile."):
            fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: numbers.append(leaf) if isinstance(leaf, PerRank) else None)
    ordered = list(dims)
    read = [node for node in lengths if any(not _is_length(user) and not op_name(user).startswith("tpcompile.") for user in node.users)]
    kinds: dict[str, int] = {}
    for coordinate in range(local.parts):
        held = [local_size(dim, coordinate) if (size := sizes.piece(dim, coordinate)) is None else size for dim in ordered]
        found = _lengths(local, lengths, sizes, coordinate)
        kind = str([held, [number.values[coordinate] for number in numbers], [found.get(node, coordinate) for node in read]])
        kinds.setdefault(kind, coordinate)
    return list(kinds.values())


def _is_length(node: fx.Node) -> bool:
    """Whether a node computes a number from sizes."""
    arithmetic = getattr(node.target, "__module__", "") == "_operator" or node.target in (torch.sym_min, torch.sym_max)
    return node.op == "call_function" and (op_name(node) == "aten.sym_size.int" or (arithmetic and op_name(node) != "getitem"))


def _lengths(local: Local, nodes: Iterable[fx.Node], sizes: Sizes, coordinate: int) -> dict[fx.Node, int]:
    """The numbers that a coordinate computes, as far as they follow from the sizes that are known."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        if op_name(node) == "aten.sym_size.int":
            kind = local.program.types.get(local.origins.get(node.name, node.name))
            value = sizes.value(kind) if isinstance(kind, (int, sympy.Basic)) else None
            if value is not None:
                found[node] = value
        elif all(operand in found for operand in node.all_input_nodes):
            args = fx.node.map_aggregate(fx.map_arg(node.args, found.__getitem__), lambda leaf: _own(leaf, coordinate))
            assert callable(node.target) and isinstance(args, tuple)
            found[node] = node.target(*args)
    return found


def _own(leaf: Any, coordinate: int) -> Any:
    return leaf.values[coordinate] if isinstance(leaf, PerRank) else leaf


class _Run:
    """The graph of one coordinate on tensors without values. What torch cannot tell has the shape that its layout says.

    `known` keeps what calls make, by their arguments' shapes: equal layers are looked at once.
    """

    def __init__(self, local: Local, sizes: Sizes, coordinate: int, known: dict[object, Any]) -> None:
        self.local, self.sizes, self.coordinate, self.known = local, sizes, coordinate, known
        self.axis = collectives.unbound(local.axis, coordinate, local.parts)
        self.values: dict[fx.Node, Any] = {}
        self.whole = local.program.nodes()

    def check(self) -> None:
        for node in self.local.graph.nodes:
            match node.op:
                case "placeholder":
                    self.values[node] = self.declared(node)
                case "call_function":
                    self.values[node] = self.made(node)

    # --- what layouts say

    def shapes(self, node: fx.Node) -> list[Shape]:
        """The local shapes of a node's tensors, as its layout says."""
        kind, layout = self.local.program.types.get(self.local.origins.get(node.name, node.name)), self.local.layouts.get(node.name)
        if node.op == "placeholder" and node.name == "rng_key":
            return [Shape(torch.int64, (3,))]
        if kind is None:  # several values of the whole program at once: each is an item of its own
            return []
        kinds = kind if isinstance(kind, tuple) else (kind,)
        layouts = layout if isinstance(layout, tuple) else (layout,) * len(kinds)
        return [
            Shape(own.dtype, tuple(self.sizes.piece(dim, self.coordinate) for dim in part.dims))
            if part is not None
            else self.global_shape(own)
            for own, part in zip(kinds, layouts, strict=True)
            if isinstance(own, TensorType)
        ]

    def global_shape(self, kind: TensorType) -> Shape:
        return Shape(kind.dtype, tuple(map(self.sizes.value, kind.shape)))

    def declared(self, node: fx.Node) -> Any:
        """A tensor, or several, of the shape that the layout says; None where sizes are not known."""
        made = [shape.empty() for shape in self.shapes(node)]
        if isinstance(self.local.program.types.get(self.local.origins.get(node.name, node.name)), tuple):
            return tuple(made)
        return made[0] if made else None

    # --- what operations make

    def made(self, node: fx.Node) -> Any:
        args, kwargs = self.given(node.args), self.given(node.kwargs)
        if any(self.values.get(operand) is None for operand in node.all_input_nodes):
            return self.declared(node)
        key = _key((node.target, args, kwargs)), self.coordinate if op_name(node).startswith("tpcompile.") else None
        try:
            if key not in self.known:
                self.known[key] = _call(node, args, kwargs, self.axis)
        except Exception as error:
            if isinstance(error, NotImplementedError) or not self.told(node):
                return self.declared(node)
            raise broken(self.local, node, f"cannot work on the pieces of rank {self.coordinate}: {_first_line(error)}") from None
        if node.name in self.local.layouts and (difference := self.difference(node, self.known[key])):
            if self.told(node):
                raise broken(self.local, node, difference)
            return self.declared(node)
        return self.known[key]

    def given(self, argument: Any) -> Any:
        """An argument as this coordinate has it."""

        def leaf(value: Any) -> Any:
            return value.values[self.coordinate] if isinstance(value, PerRank) else META if isinstance(value, torch.device) else value

        return fx.node.map_aggregate(fx.map_arg(argument, self.values.get), leaf)

    def difference(self, node: fx.Node, value: Any) -> str:
        """Where a value is not what its layout and its type say, in words."""
        for one, shape in zip(value if isinstance(value, (tuple, list)) else (value,), self.shapes(node), strict=False):
            if isinstance(one, Tensor) and not shape.fits(one):
                if one.dtype != shape.dtype:
                    return f"is {one.dtype} on rank {self.coordinate}, and {shape.dtype} in the program"
                layout, says = self.local.layouts[node.name], list(shape.sizes)
                return f"has shape {list(one.shape)} on rank {self.coordinate}, and its layout {layout} says {says}"
        return ""

    def told(self, node: fx.Node) -> bool:
        """Whether torch says without values what the operation makes of whole operands: then it also can of pieces."""
        origin = self.whole.get(node.name)
        if origin is None or origin.op != "call_function":
            return True
        args, kwargs = fx.node.map_aggregate(fx.map_arg((origin.args, origin.kwargs), self._whole), _on_meta)
        kind = self.local.program.types.get(origin.name)
        try:
            value = _call(origin, args, kwargs, "")
        except Exception:
            return False
        kinds = kind if isinstance(kind, tuple) else (kind,)
        pairs = zip(value if isinstance(value, (tuple, list)) else (value,), kinds, strict=False)
        return all(not isinstance(one, Tensor) or not isinstance(own, TensorType) or self.global_shape(own).fits(one) for one, own in pairs)

    def _whole(self, node: fx.Node) -> Any:
        """A value of the whole program; a size as a number."""
        match self.local.program.types.get(node.name):
            case TensorType() as kind:
                return self.global_shape(kind).empty()
            case tuple(kinds):
                return tuple(self.global_shape(kind).empty() for kind in kinds)
            case None:
                return self.declared(node)
            case size:
                return self.sizes.value(size)


def _on_meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) else value


def _key(value: Any) -> object:
    """What a call's result depends on: its target, shapes and strides of tensors, all other arguments."""
    match value:
        case Tensor():
            return "tensor", value.shape, value.stride(), value.dtype
        case tuple() | list():
            return tuple(map(_key, value))
        case dict():
            return tuple((name, _key(item)) for name, item in value.items())
        case slice():
            return "slice", _key((value.start, value.stop, value.step))
        case bool() | int() | float():
            return type(value), value  # 1, 1.0 and True are equal to Python, and make other types
    return value


def _call(node: fx.Node, args: Any, kwargs: Any, axis: str) -> Any:
    """Call a node's target: collectives as of one coordinate, and what makes a tensor makes one without values."""
    assert callable(node.target)
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target(*args, **kwargs)
    declared = [argument.name for argument in node.target._schema.arguments]
    if "device" in declared[len(args) :]:
        kwargs = {**kwargs, "device": META}
    if axis and op_name(node).startswith("tpcompile.") and "axis" in declared:
        args = tuple(axis if name == "axis" else value for name, value in zip(declared, args, strict=False))
    return node.target(*args, **kwargs)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
