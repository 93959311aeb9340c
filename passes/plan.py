"""plan: choose which regions are cut, and where."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import fx

from tpcompile.errors import InputError
from tpcompile.factors import LayoutError, quotient
from tpcompile.ir import Cone, Kind, Left, Plan, Program, Region
from tpcompile.layout import (
    Cut,
    Factor,
    Layout,
    Open,
    Range,
    TensorType,
    canonical,
    cut_factors,
    fits,
    product,
    same,
    same_dim,
    size_of,
)
from tpcompile.passes import _vocabulary
from tpcompile.passes._held import held_regions
from tpcompile.passes._lone import Lone, Way, cut_alone
from tpcompile.passes._reasons import user_line
from tpcompile.passes._trim import reads, trimmed
from tpcompile.rules import ALONG, ENDS, forward, has_rule, op_name, view_op, wants_of

RANK: Mapping[Kind, int] = {"attention": 0, "vocabulary": 1, "mlp": 2, "linear": 3, "sum": 4, "column": 5, "row": 5}
"""Which region wins where two want the same linear: attention, a vocabulary, then MLP, a bare chain of linears, what ends in a sum."""

CONFLICT = 2
"""What another region has, or would have to share, is the last reason to give; that of a region's row goes before that of its columns."""


def plan(
    program: Program,
    cones: Sequence[Cone],
    axis: str,
    parts: int,
    overrides: Mapping[str, str],
    *,
    vocab_parallel: bool = True,
    held: Mapping[str, Layout] | None = None,
) -> Plan:
    """Choose regions that do not contradict each other and fix their cuts; say why every other linear stays whole.

    Without `vocab_parallel`, tables of embeddings, heads and losses are not cut. `held` says how an earlier capture of the model cut its
    parameters, by their qualified names: they stay so.

    before  attention: row %o, columns %q %k %v; heads 14@?3, key/value heads 2@?3~
    after   attention: heads 14@tp{0:4, 4:7, 7:11, 11:14}, key/value heads 2@tp{0:1, 0:1, 1:2, 1:2}
    """
    chooser = _Chooser(program, axis, parts, overrides, vocab_parallel, held)
    if parts > 1:
        unions = unite([cone for cone in cones if cone.columns or (cone.kind == "vocabulary" and cone.layouts.keys() & program.parameters)])
        for union in sorted(unions, key=lambda u: (RANK[u.kind], -u.weight(program), chooser.order[u.rows[0]])):
            chooser.consider(union)
        chooser.consider_trimmed()
        chooser.force()
        chooser.cut_lone()
        chooser.check_overrides()
        chooser.keep()
    regions = sorted(chooser.regions, key=lambda region: chooser.order[next(iter((*region.rows, *region.columns, *region.layouts)))])
    return Plan(tuple(regions), tuple(left(program, cones, regions, chooser)))


@dataclass(frozen=True)
class Union:
    """Cones that share cut values, as one."""

    kind: Kind
    wants: Mapping[str, tuple[Layout, ...]]
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    columns: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(self.wants)

    def weight(self, program: Program) -> int:
        """Elements of the weights that are cut."""
        kinds = [program.types[name] for name in self.layouts if name in program.parameters]
        return int(sum(product(kind.shape) for kind in kinds if isinstance(kind, TensorType)))


def unite(cones: Sequence[Cone]) -> list[Union]:
    """Join cones that cut the same value in the same way: one activation that feeds two row-cut linears."""
    unions: dict[int, Union] = {}
    having: dict[str, set[int]] = {}  # value → the unions that cut it, by the numbers that they had then
    ending: dict[str, int] = {}  # row → the union that it ends
    joined: dict[int, int] = {}

    def now(number: int) -> int:
        while number in joined:
            number = joined[number]
        return number

    for count, cone in enumerate(cones):
        union, number = Union(cone.kind, {cone.seed: cone.wants}, cone.layouts, cone.columns), count
        above = {now(ending[name]) for name in cone.layouts.keys() & ending.keys()}  # their rows are in it, all along the residual stream
        near = {now(place) for place in set().union(*[having[name] for name in cone.layouts if name in having])} - above
        for place in [place for place in sorted(near) if _joins(unions[place], union)]:
            other = unions.pop(place)
            kind: Kind = min(other.kind, union.kind, key=RANK.__getitem__)
            columns = tuple(dict.fromkeys(other.columns + union.columns))
            union = Union(kind, {**other.wants, **union.wants}, {**other.layouts, **union.layouts}, columns)
            if number == count:
                number = place  # the oldest: values that are its own already need no other number
            else:
                joined[place] = number
        unions[number] = union
        ending[cone.seed] = number
        for name in cone.layouts:
            if name in having:
                having[name].add(number)
            else:
                having[name] = {number}
    return list(unions.values())


def _joins(a: Union, b: Union) -> bool:
    if not a.wants.keys().isdisjoint(b.wants) or not a.wants.keys().isdisjoint(b.layouts) or not b.wants.keys().isdisjoint(a.layouts):
        return False
    shared = a.layouts.keys() & b.layouts.keys()
    return bool(shared) and all(_alike(a.layouts[name], b.layouts[name]) for name in shared)


def _alike(a: Layout | tuple[Layout, ...], b: Layout | tuple[Layout, ...]) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) or isinstance(b, tuple):
        return isinstance(a, tuple) and isinstance(b, tuple) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    return all(same_dim(x, y) for x, y in zip(a.dims, b.dims, strict=True))


class _Chooser:
    """The regions chosen so far, and why others were not."""

    def __init__(
        self,
        program: Program,
        axis: str,
        parts: int,
        overrides: Mapping[str, str],
        vocab_parallel: bool,
        held: Mapping[str, Layout] | None,
    ) -> None:
        self.program, self.axis, self.parts, self.overrides = program, axis, parts, overrides
        self.vocab_parallel, self.held = vocab_parallel, held
        self.nodes = program.nodes()
        self.order = {name: position for position, name in enumerate(self.nodes)}
        self.regions: list[Region] = []
        self.reasons: dict[str, tuple[int, str]] = {}  # linear → the weight of a reason, lowest first, and the reason
        self.taken: dict[str, Layout | tuple[Layout, ...]] = {}
        self.rows: set[str] = set()
        self.late: list[Union] = []
        self.matched: set[str] = set()
        self.kept: set[str] = set()  # linears of regions that stay whole entirely

    def consider(self, union: Union) -> None:
        name = self.name(union)
        wish = self.wish(name, *(self.paths(union) if union.kind == "vocabulary" else ()))
        conflict = self.conflict(union)
        unwanted = wish == "whole" or (wish == "row" and union.kind == "vocabulary")
        reason = f'overrides say "{wish}"' if unwanted else conflict or self.objection(union, wish)
        if not reason:
            try:
                self.accept(name, union)
            except LayoutError as error:
                reason, unwanted = str(error), True
        self.kept.update((*union.rows, *union.columns) if unwanted else ())
        for weight, nodes in enumerate((union.rows, union.columns)) if reason else ():
            for node in nodes:
                found = (weight + CONFLICT * bool(conflict), reason)
                self.reasons[node] = min(self.reasons.get(node, found), found, key=lambda reason: reason[0])

    def name(self, union: Union) -> str:
        """The module path that the region's linears share, with its kind where that is ambiguous."""
        paths = [path.split(".") for path in self.paths(union)]
        shared = [words[0] for words in zip(*paths, strict=False) if len(set(words)) == 1]
        name = ".".join(shared) or union.kind
        return f"{name}.{union.kind}" if any(region.name == name for region in self.regions) else name

    def paths(self, union: Union) -> list[str]:
        """The modules that the region's linears and look-ups are in; a loss has none of its own."""
        found = [self.program.sources[n].path for n in (*union.columns, *union.rows) if n in self.program.sources]
        return [path for path in found if path] if union.kind == "vocabulary" else found

    def wish(self, *names: str) -> str:
        for pattern, wish in self.overrides.items():
            if any(fnmatchcase(name, pattern) for name in names):
                self.matched.add(pattern)
                return wish
        return ""

    def conflict(self, union: Union) -> str:
        """Why this union cannot stand beside the regions chosen before."""
        for name, layout in union.layouts.items():
            if name in self.rows:
                return f"its input comes from {self.path(name)}, which is row-cut: the value between them is whole"
            if name in self.taken and (name not in self.program.parameters or not _equal(self.taken[name], layout)):
                return f"{self.path(name)} is cut in another region"
        for row in union.rows:
            if row in self.rows:
                return "it is cut in another way"
            if row in self.taken:
                return f"{self.path(row)} is column-cut in another region"
        return ""

    def objection(self, union: Union, wish: str) -> str:
        """Why this union is not worth cutting by itself."""
        if union.kind == "vocabulary":
            if not self.vocab_parallel:
                return "vocab_parallel=False"
            if wish not in ("cut", "column") and (reason := _vocabulary.objection(self.program, self.nodes, union.rows, union.layouts)):
                return reason
        for name, user in self.outside(union):
            if not can_gather(union.layouts[name]):
                return f"its value {name} is also used whole, and cannot be gathered: the batch is part of the dimension that is cut"
            if name in self.program.parameters and union.kind == "vocabulary":
                return f"{self.program.parameters[name]} is also used whole, by {user.name}{self.at(user.name)}"
            if union.kind != "attention" and name not in self.program.parameters and reads(user):
                self.late.append(union)
                return f"its value {name} is also used whole, by {user.name}{self.at(user.name)}"
        if union.kind == "linear" and any(
            operand.name in self.taken for row in union.columns for operand in self.nodes[row].all_input_nodes
        ):
            return "a chain of linears inside another region"
        return ""

    def outside(self, union: Union) -> list[tuple[str, fx.Node]]:
        """The cut values of a union that something else uses, with that."""
        cut = {*union.layouts, *union.rows}
        uses = ((name, user) for name in union.layouts for user in self.nodes[name].users)
        return [
            (name, user)
            for name, user in uses
            if user.name not in cut and (user.op == "output" or reads(user)) and op_name(user) != "getitem"
        ]

    def consider_trimmed(self) -> None:
        """Unions whose values are also used whole, once more without these values: rows take pieces of them."""
        for union in tuple(self.late):
            used = {name for name, user in self.outside(union) if reads(user) and name not in self.program.parameters}
            if all(can_gather(union.layouts[name]) for name in used):
                layouts = trimmed(union.layouts, union.rows, union.columns, self.nodes, used)
                if layouts:
                    self.consider(replace(union, layouts=layouts, columns=tuple(name for name in union.columns if name in layouts)))

    def at(self, name: str) -> str:
        source = self.program.sources.get(name)
        return f" at {source}" if source else ""

    def path(self, name: str) -> str:
        """A value by the module that made it, or the parameter's name."""
        source = self.program.sources.get(name)
        return self.program.parameters.get(name) or (source.path if source and source.path else name)

    def accept(self, name: str, union: Union) -> None:
        ranges = choose(union.layouts, union.wants, self.parts)

        def close(layout: Layout | tuple[Layout, ...]) -> Layout | tuple[Layout, ...]:
            if isinstance(layout, tuple):
                return tuple(resolve(part, self.axis, ranges) for part in layout)
            return resolve(layout, self.axis, ranges)

        layouts = {value: close(layout) for value, layout in union.layouts.items()}
        rows = {row: tuple(resolve(layout, self.axis, ranges) for layout in wants) for row, wants in union.wants.items()}
        self.try_out(layouts)
        for placeholder in sorted(layouts.keys() & self.program.parameters):
            path = self.program.parameters[placeholder]
            if self.held is not None and (path not in self.held or not _equal(layouts[placeholder], self.held[path])):
                raise LayoutError(f"an earlier capture of the model holds {path} in another way")
        if any(op_name(self.nodes[row]) in ENDS and not _vocabulary.in_one_piece(wants[0], self.parts) for row, wants in rows.items()):
            raise LayoutError("what a rank would hold of it is not in one piece")
        self.add(Region(name, union.kind, self.axis, rows, union.columns, layouts, self.weights(layouts)))

    def try_out(self, layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> None:
        """Run the rules forward over a region, with its ranges fixed. Raises LayoutError where they do not lead to the same layouts."""
        for name, layout in layouts.items():
            node = self.nodes[name]
            wants = wants_of(node, self.program.types, layouts, {})
            for operand, want in wants:
                if operand.name not in layouts and any(not isinstance(size_of(dim), int) for dim in want.dims if cut_factors(dim)):
                    raise LayoutError(
                        f"{op_name(node)}{self.at(name)} needs a piece of a whole value, {operand.name}, whose size is not known"
                    )
            if wants:
                outs = layout if isinstance(layout, tuple) else (layout,)
                made = forward(view_op(node, self.program.types), [want for _, want in wants], outs, end=op_name(node) in ALONG)
                if not all(fits(a, b) for a, b in zip(made, outs, strict=True)):
                    raise LayoutError(f"{op_name(node)}{self.at(name)} does not keep the cut: {made[0]} and {outs[0]}")

    def add(self, region: Region) -> None:
        self.regions.append(region)
        self.taken.update(region.layouts)
        self.rows.update(region.rows)

    def weights(self, layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> dict[str, str]:
        return {self.program.parameters[n]: str(layout) for n, layout in layouts.items() if n in self.program.parameters}

    def force(self) -> None:
        """Lone linears that overrides want column- or row-cut."""
        for name, node in self.nodes.items():
            if node.op != "call_function" or name in self.taken or name in self.rows or name not in self.program.sources:
                continue
            wish = self.wish(self.program.sources[name].path)
            if wish in ("column", "row") and op_name(node) == "aten.linear.default":
                try:
                    self.cut_alone(node, "row" if wish == "row" else "column")
                except LayoutError as error:
                    raise InputError(str(error), at=f"overrides: {name}{self.at(name)}", fix="leave it whole") from None

    def check_overrides(self) -> None:
        for pattern, wish in self.overrides.items():
            if wish not in ("whole", "cut", "column", "row"):
                fix = 'use "whole", "cut", "column", "row" or "per micro-batch"'
                raise InputError(f"overrides[{pattern!r}] is {wish!r}", at="compile(overrides=…)", source=user_line(), fix=fix)
            if pattern not in self.matched:
                known = ", ".join(sorted({region.name for region in self.regions})) or "none"
                what, fix = f"overrides name no region: {pattern!r}", f"the regions are {known}"
                raise InputError(what, at="compile(overrides=…)", source=user_line(), fix=fix)

    def keep(self) -> None:
        """What an earlier capture cut and no region here does stays cut."""
        held = self.held or {}
        missing = {name: held[path] for name, path in self.program.parameters.items() if name not in self.taken and path in held}
        missing = {name: layout for name, layout in missing.items() if layout.is_cut}
        for region in held_regions(self.program, self.axis, missing, frozenset(self.taken) | self.rows):
            self.add(region)

    def cut_lone(self) -> None:
        """Products in repeated layers that no region wants; an earlier capture has decided that for a later one."""
        found = Lone(self.program, self.taken.keys(), self.rows) if self.held is None else None
        for node in found.products() if found else ():
            wish = self.wish(self.program.sources[node.name].path)
            if wish == "whole":
                self.reasons[node.name] = (0, 'overrides say "whole"')
            for way in found.ways(node) if found and wish != "whole" and node.name not in self.kept else ():
                try:
                    self.cut_alone(node, way)
                    break
                except LayoutError:
                    continue

    def cut_alone(self, node: fx.Node, way: Way) -> None:
        def ranges(size: int) -> tuple[Range, ...]:
            if size < self.parts:
                raise LayoutError(f"{size} cannot be cut in {self.parts}")
            return tuple(even(size, self.parts))

        rows, layouts = cut_alone(self.program, node, way, self.axis, ranges)
        if not self.taken.keys().isdisjoint(layouts):
            raise LayoutError("its weight is cut in another region")
        if way == "column":
            self.try_out(layouts)
        columns = (node.name,) if way == "column" else ()
        path = self.program.sources[node.name].path
        name = f"{path}.{node.name}" if any(region.name == path for region in self.regions) else path
        self.add(Region(name, way, self.axis, rows, columns, layouts, self.weights(layouts)))


def _equal(a: Layout | tuple[Layout, ...], b: Layout | tuple[Layout, ...]) -> bool:
    return isinstance(a, Layout) and isinstance(b, Layout) and same(a, b)


def can_gather(layout: Layout | tuple[Layout, ...]) -> bool:
    """Whether a cut value can be put together again: along one dimension, of a size that is known."""
    cut = [dim for part in (layout if isinstance(layout, tuple) else (layout,)) for dim in part.dims if cut_factors(dim)]
    return len(cut) == 1 and isinstance(size_of(cut[0]), int)


# --- where to cut ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """The ranges of a region's cut: over its atoms, and over the key/value heads that each rank's atoms need."""

    atoms: int
    ranges: tuple[Range, ...]
    shared_atoms: int
    shared: tuple[Range, ...]


def choose(layouts: Mapping[str, Layout | tuple[Layout, ...]], wants: Mapping[str, tuple[Layout, ...]], parts: int) -> Bounds:
    """Cut where no atom is broken: an atom is the smallest piece that every dimension of the region can be cut at."""
    every = [part for layout in layouts.values() for part in ((layout,) if isinstance(layout, Layout) else layout)]
    every += [layout for operands in wants.values() for layout in operands]
    factors = [factor for layout in every for dim in layout.dims for segment in dim for factor in segment if isinstance(factor.cut, Open)]
    if any(not isinstance(factor.size, int) for factor in factors):
        raise LayoutError("its size is not known before it runs")
    atoms = math.gcd(*(int(f.size) for f in factors if isinstance(f.cut, Open) and not f.cut.shared))
    sizes = [int(f.size) for f in factors if isinstance(f.cut, Open) and f.cut.shared]
    groups = math.gcd(*sizes) if sizes else atoms
    if atoms < parts:
        raise LayoutError(f"{atoms} piece{'s' * (atoms != 1)} cannot be shared by {parts} ranks")
    if atoms % groups:
        raise LayoutError(f"{groups} key/value heads do not divide {atoms} query heads")
    ranges = tuple(share(atoms, groups, parts))
    step = atoms // groups
    return Bounds(atoms, ranges, groups, tuple((start // step, -(-stop // step)) for start, stop in ranges))


def share(heads: int, groups: int, parts: int) -> list[Range]:
    """Ranges of query heads, so that ranks need few key/value heads (`groups`) twice and none has much more than its share.

    >>> share(14, 2, 4)
    [(0, 4), (4, 7), (7, 11), (11, 14)]
    """
    step = heads // groups
    if groups >= parts:
        return [(start * step, stop * step) for start, stop in even(groups, parts)]
    ranges: list[Range] = []
    for group, (first, last) in enumerate(even(parts, groups)):
        ranges += [(group * step + start, group * step + stop) for start, stop in even(step, last - first)]
    balanced = -(-heads // parts)
    if any(stop == start for start, stop in ranges) or max(stop - start for start, stop in ranges) > 1.25 * balanced:
        return even(heads, parts)
    return ranges


def even(size: int, parts: int) -> list[Range]:
    """Consecutive ranges whose lengths differ by one at most, the longer first."""
    length, longer = divmod(size, parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return list(zip(starts, starts[1:], strict=False))


def resolve(layout: Layout, axis: str, bounds: Bounds) -> Layout:
    """A layout with its open cuts closed: `896@?` over 14 atoms becomes `14@tp·64`."""
    return Layout(tuple(tuple(tuple(_close(canonical((segment,))[0], axis, bounds)) for segment in dim) for dim in layout.dims))


def _close(segment: Sequence[Factor], axis: str, bounds: Bounds) -> Iterable[Factor]:
    for factor in segment:
        if not isinstance(factor.cut, Open):
            yield factor
            continue
        atoms, ranges = (bounds.shared_atoms, bounds.shared) if factor.cut.shared else (bounds.atoms, bounds.ranges)
        yield Factor(atoms, Cut(axis, ranges))
        if (step := quotient(factor.size, atoms)) != 1:
            yield Factor(step)


# --- what stays whole ------------------------------------------------------------------------------------------------


def left(program: Program, cones: Sequence[Cone], regions: Sequence[Region], chooser: _Chooser) -> Iterable[Left]:
    """Every contraction with a weight that no region cuts, with the reason; a loss's reason is that of its head, where there is one."""
    cut = {node for region in regions for node in (*region.rows, *region.columns, *region.layouts)}
    seen: set[str] = set()
    limited = dict(_limited(cones, cut, chooser))
    stopped = {cone.seed: cone for cone in cones if cone.kind == "vocabulary" and not cone.wants}
    for cone in (stopped.get(cone.seed, cone) for cone in cones):
        told = cone.stop in {other.stop for other in stopped.values()} and cone.seed not in stopped
        if cone.kind == "vocabulary" and not _looks_up(chooser.nodes[cone.seed], program):
            told |= bool(cone.columns) or not cone.reason
        if cone.kind == "sum" or cone.seed in cut or cone.seed in seen or told:
            continue
        seen.add(cone.seed)
        source = program.sources.get(cone.seed)
        yield Left(source.path if source else cone.seed, cone.seed, limited.get(cone.seed) or why_whole(cone, chooser), source)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.name not in cut and node.name not in seen and _looks_up(node, program):
            source = program.sources.get(node.name)
            yield Left(source.path if source else node.name, node.name, "a look-up table", source)


def _limited(cones: Sequence[Cone], cut: Collection[str], chooser: _Chooser) -> Iterable[tuple[str, str]]:
    """What would be cut in a region but for an operation between them, which works on some pieces only."""
    products = {cone.seed for cone in cones if cone.columns or cone.kind != "vocabulary"}
    for cone in cones:
        for stop, reason in cone.limits if cone.seed in cut else ():
            node = chooser.nodes[stop]
            while node.name not in products and len(node.all_input_nodes) and node.op == "call_function":
                node = node.all_input_nodes[0]
            yield node.name, f"{reason}: {stop}{chooser.at(stop)}"


def why_whole(cone: Cone, chooser: _Chooser) -> str:
    """The reason in the user's terms: what the walk met first, unless the region was found and then turned down by itself."""
    if chooser.parts == 1:
        return f"there is one rank on {chooser.axis}"
    weight, reason = chooser.reasons.get(cone.seed, (2 * CONFLICT, "no linear before it to cut with it"))
    if cone.reason and weight >= CONFLICT:
        return f"{cone.reason}: {cone.stop}{chooser.at(cone.stop)}"
    return reason


def _looks_up(node: fx.Node, program: Program) -> bool:
    if not isinstance(program.types.get(node.name), TensorType) or not has_rule(view_op(node, program.types)):
        return False
    return op_name(node) == "aten.embedding.default"
