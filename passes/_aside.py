"""Private to detect and split: what a graph computes for the new values of buffers alone, such as the statistics of a batch norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from tpcompile.factors import LayoutError, join, reshape
from tpcompile.ir import Program, results
from tpcompile.layout import Dim, Layout, TensorType, cut_factors, same, whole_dim
from tpcompile.rules import ALONG, RESHAPES, SPLITS, Op, backward, bind_rule, has_rule, view_op


def aside(graph: fx.Graph, updates: Sequence[str]) -> dict[fx.Node, None]:
    """The operations that serve nothing but updates, in the graph's order."""
    returned, new = results(graph, updates)
    kept = set(returned)
    ends = set(new.values()) - kept
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes) if updates else ():
        inside = all(user in found or (user.op == "output" and node in ends) for user in node.users)
        if node.op == "call_function" and node.users and inside:
            found[node] = None
    return dict.fromkeys(reversed(found))


def follow(program: Program, nodes: Iterable[fx.Node], layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> dict[str, Layout]:
    """The layouts of these operations, forward from a region's cut values, as far as they can work on pieces."""
    made: dict[str, Layout] = {}
    for node in nodes:
        if node.name in layouts or not isinstance(program.types.get(node.name), TensorType):
            continue
        known = {operand: made.get(operand.name, layouts.get(operand.name)) for operand in node.all_input_nodes}
        if any(isinstance(layout, Layout) and layout.is_cut for layout in known.values()):
            try:
                made[node.name] = carried(view_op(node, program.types), known)
            except LayoutError:
                continue
    return made


def carried(op: Op, known: Mapping[fx.Node, object], *, end: bool = False) -> Layout:
    """The layout of an operation's result that keeps its operands' cuts; other operands are sliced. Raises LayoutError for none.

    With `end`, what works along a cut dimension keeps it too.
    """
    if not has_rule(op) or op.name in SPLITS:
        raise LayoutError(f"no rule for {op.name}")
    cut = {place: layout for place, o in enumerate(op.operands) if isinstance(layout := known.get(o), Layout) and layout.is_cut}
    if not cut:
        raise LayoutError("several values at once")
    if op.name in RESHAPES:
        return reshape(cut[0], op.outs[0].shape)
    bound = bind_rule(op, end and op.name in ALONG)
    dims: dict[str, Dim] = {}
    for place, layout in cut.items():
        for token, dim in zip(bound.ins[place], layout.dims, strict=True):
            if cut_factors(dim):
                dims[token.letter] = join(dims[token.letter], dim) if token.letter in dims else dim
    shape = op.outs[0].shape
    out = Layout(tuple(dims.get(token.letter) or whole_dim(size) for token, size in zip(bound.outs[0], shape, strict=True)))
    wants = backward(op, [out], end=end)
    if not out.is_cut or not all(same(wants[place], layout) for place, layout in cut.items()):
        raise LayoutError(f"{op.name} does not keep the cut")
    return out
