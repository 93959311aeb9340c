"""Which products with weights are whole by law: those that choose along the dimension that they make, and those that are normed along it.

The dimension is followed from the product onwards, by the same rules that cut dimensions: a view that takes it apart into heads and
channels leaves another one to norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Factor, Layout, Open, TensorType, whole, whole_dim
from tpcompile.rules import PARTED, SPLITS, Op, bind_rule, forward, op_name, opened, view_op

ROUTER, NORMED = "a router", "its output meets a norm over the same dimension"

CHOICES = frozenset(["argmax", "argsort", "sort", "topk"])
NORMS = frozenset(["layer_norm", "rms_norm", "linalg_vector_norm", "var"])
KEEPS = frozenset(["softmax", "log_softmax", "_safe_softmax"])
"""Operations that need a dimension whole and make one of the same meaning."""


@dataclass(frozen=True)
class Followed:
    """A value with the dimension in it that is followed; squared on the way; and whether it is still the product's value alone."""

    node: fx.Node
    layout: Layout
    squared: bool = False
    alone: bool = True


def law(program: Program, product: fx.Node, constant: Collection[fx.Node]) -> str:
    """Why a product with a weight is whole by law; "" if it is not."""
    todo, seen = list(made_by(program, product, constant)), {product}
    reasons: set[str] = set()
    while todo:
        value = todo.pop()
        for user in value.node.users:
            if user.op == "call_function" and op_name(user) != "getitem" and user not in constant:
                found = list(next_values(program, value, user, constant, seen))
                reasons.update(step for step in found if isinstance(step, str))
                todo += [step for step in found if isinstance(step, Followed) and step.node not in seen]
                seen.update(step.node for step in found if isinstance(step, Followed))
    return next((reason for reason in (ROUTER, NORMED) if reason in reasons), "")


def made_by(program: Program, product: fx.Node, constant: Collection[fx.Node]) -> Iterator[Followed]:
    """The product's value, once for each dimension that its weight brings."""
    op, kind = opened(view_op(product, program.types)), program.types[product.name]
    if op.outs != (kind,):
        return
    bound = bind_rule(op)
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for operand, tokens in zip(op.operands, bound.ins, strict=True):
        sides[operand in constant] |= {token.letter for token in tokens}
    for dim, token in enumerate(bound.outs[0]):
        if token.letter in sides[True] - sides[False] and kind.shape[dim] != 1:
            yield Followed(product, marked(kind, dim))


def marked(kind: TensorType, at: int) -> Layout:
    return Layout(tuple(((Factor(size, Open(0) if dim == at else None),),) for dim, size in enumerate(kind.shape)))


def next_values(
    program: Program, value: Followed, user: fx.Node, constant: Collection[fx.Node], seen: Collection[fx.Node]
) -> Iterator[Followed | str]:
    """What a use of a value makes of it, as far as the dimension is in that; or the law that it meets there."""
    op = view_op(user, program.types)
    word = op.name.split(".")[1]
    own = [operand is value.node for operand in op.operands]
    others = [operand for operand in op.operands if operand is not value.node and operand not in constant and operand not in seen]
    squared = value.squared or word in ("pow", "square") or (word == "mul" and all(own))
    alone = value.alone and not others
    try:
        made = forward(op, operands(op, own, value.layout))
    except LayoutError:
        if word in CHOICES or (word == "max" and any(item.args[1:] == (1,) for item in user.users)):
            yield ROUTER
        elif alone and (word in NORMS or (word == "mean" and squared)):
            yield NORMED
        made = split_anew(op, value.layout) if op.name in SPLITS else [value.layout] if word in KEEPS else []
    if word == "sum" and squared and alone and made and not made[0].is_cut:
        yield NORMED
    items = {item.args[1]: item for item in user.users if op_name(item) == "getitem"}
    for index, layout in enumerate(made):
        node = items.get(index) if isinstance(program.types[user.name], tuple) else user
        if node is not None and layout.is_cut and op.outs[index].dtype.is_floating_point:
            yield Followed(node, layout, squared, alone)


def operands(op: Op, own: Collection[bool], layout: Layout) -> list[Layout]:
    """A value as an operand, and the others as they have to be beside it."""
    if op.name in PARTED or opened(op) is not op:
        return [layout if mine else whole(*kind.shape) for mine, kind in zip(own, op.ins, strict=True)]
    bound = bind_rule(op)
    mine = next(tokens for tokens, is_own in zip(bound.ins, own, strict=True) if is_own)
    dims = {token.letter: dim for token, dim in zip(mine, layout.dims, strict=True)}
    return [
        layout
        if is_own
        else Layout(
            tuple(
                dims[token.letter] if token.letter in dims and size == bound.sizes[token.letter] else whole_dim(size)
                for token, size in zip(tokens, kind.shape, strict=True)
            )
        )
        for tokens, kind, is_own in zip(bound.ins, op.ins, own, strict=True)
    ]


def split_anew(op: Op, layout: Layout) -> list[Layout]:
    """Parts of the dimension that is followed: each is one by itself."""
    at = op.dims("dim")[0]
    return [marked(kind, at) for kind in op.outs] if layout.dims[at] and Layout((layout.dims[at],)).is_cut else []
