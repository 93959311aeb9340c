"""Private to detect: where the scores of a head end: losses written by hand, and what else is computed from them.

A head is a product with a weight whose result leads to no other product with one. Its classes are a vocabulary if something sees them as
one: a softmax, a logarithm of their sum, the largest of them, entries at labels. Sums and means over them are then ends as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Cone, Program
from tpcompile.layout import Factor, Layout, Open, TensorType, whole
from tpcompile.passes._aside import carried
from tpcompile.rules import ALONG, ENDS, PARTED, Bound, Op, bind_rule, has_rule, op_name, opened, view_op

ALWAYS = ("aten.cross_entropy_loss.default", "aten.embedding.default")
"""Ends that are looked for everywhere."""

PLAIN = ("aten.kl_div.default", "aten.mean.default", "aten.mean.dim", "aten.mse_loss.default", "aten.scatter.value")
"""Operations along a dimension that do not make it a vocabulary."""


def heads(program: Program, weights: Collection[fx.Node]) -> frozenset[str]:
    """The products with a weight that lead to no other."""
    found: set[str] = set()
    leading: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op != "call_function":
            continue
        product = _is_product(program, node, weights)
        if any(user in leading for user in node.users):
            leading.add(node)
        elif product:
            found.add(node.name)
        if product:
            leading.add(node)
    return frozenset(found)


def _is_product(program: Program, node: fx.Node, weights: Collection[fx.Node]) -> bool:
    if node in weights or not isinstance(program.types.get(node.name), TensorType) or op_name(node) in PARTED:
        return False
    op = opened(view_op(node, program.types))
    if len(op.operands) < 2 or not any(operand in weights for operand in op.operands) or not has_rule(op):
        return False
    return bool(_contracted(op))


def _contracted(op: Op, end: bool = False) -> tuple[Bound | None, list[str]] | None:
    """The letters of known size that an operation contracts, with its rule; None for none."""
    try:
        bound = bind_rule(op, end)
    except LayoutError:
        return None
    kept = {token.letter for tokens in bound.outs for token in tokens}
    letters = [n for n in bound.sizes if n not in kept and n not in bound.never and n not in "*_" and bound.sizes[n] != 1]
    return (bound, letters) if letters else None


def score_ends(program: Program, names: Collection[str]) -> Iterator[tuple[Op, str, Bound]]:
    """What follows heads: sums over a factor, and operations that a cut of it can end in."""
    nodes = program.nodes()
    stack = [user for name in names for user in nodes[name].users]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        stack += node.users
        if op_name(node) in PARTED or op_name(node) in ALWAYS or op_name(node) == "getitem":
            continue
        op = view_op(node, program.types)
        if not op.operands or opened(op) is not op or not has_rule(op):
            continue
        found = _contracted(op, end=op_name(node) in ENDS)
        for letter in sorted(found[1]) if found else ():
            if isinstance(found[0].sizes[letter], int):  # type: ignore[index,union-attr]
                yield op, letter, found[0]  # type: ignore[index,misc]


def of_vocabularies(program: Program, found: Sequence[Cone], names: Collection[str], known: Iterable[Cone]) -> list[Cone]:
    """The cones of `score_ends` whose columns are heads, one of them a vocabulary's; and why other heads have none."""
    nodes, known = program.nodes(), [cone for cone in known if cone.kind == "vocabulary"]
    cones = [cone for cone in found if cone.columns and set(cone.columns) <= set(names)]
    words = {column for cone in known for column in cone.columns}
    words |= {column for cone in cones if _sees_words(cone, nodes) for column in cone.columns}
    kept = [cone for cone in cones if words.intersection(cone.columns)]
    left = set(names).difference(*(cone.columns for cone in (*kept, *known)))
    return kept + [cone for name in sorted(left) if (cone := _stopped(program, nodes[name])) is not None]


def _stopped(program: Program, head: fx.Node) -> Cone | None:
    """For a head that no walk came to, with more classes than what it reads has features: what first needs its result whole."""
    rows, features = (program.types[node.name].shape[-1] for node in (head, head.all_input_nodes[0]))  # type: ignore[union-attr]
    if not isinstance(rows, int) or not isinstance(features, int) or rows < features:
        return None
    last = ((Factor(rows, Open(0)),),)
    known: dict[fx.Node, object] = {head: Layout((*whole(*program.types[head.name].shape).dims[:-1], last))}  # type: ignore[union-attr]
    for node in _after(head):
        op = view_op(node, program.types) if node.op == "call_function" and node.name in program.types else None
        if op is None or not any(operand in known for operand in op.operands) or op.name in ENDS or op.name == "getitem":
            continue
        try:
            known[node] = carried(op, known, end=True)
        except LayoutError as error:
            if _contracted(opened(op)) is None:
                return Cone(head.name, "vocabulary", (), {}, (), node.name, str(error))
    return None


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """What is computed from a value, in the graph's order."""
    found = {node}
    while node.next.op != "root":
        node = node.next
        if any(operand in found for operand in node.all_input_nodes):
            found.add(node)
            yield node


def _sees_words(cone: Cone, nodes: Mapping[str, fx.Node]) -> bool:
    """Whether something on a walk takes its dimension for classes."""
    crossed = [op_name(nodes[name]) for name in (cone.seed, *cone.layouts)]
    return any(name not in PLAIN and (name in ALONG or name in ENDS) for name in crossed)
