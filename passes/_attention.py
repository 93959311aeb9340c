"""Private to attend: attention that a model writes out, from its softmax to the operands of one operation.

%t = transpose(%k, 2, 3), %s = matmul(%q, %t), %c = mul(%s, 0.125), %a = add(%c, %mask)      above a softmax
%w = softmax(%a, -1)
%y = matmul(%w, %v)                                                                          below it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpcompile.layout import TensorType
from tpcompile.operation import argument, aten_names, op_name

SOFTMAX = aten_names("_softmax.default softmax.int")
PRODUCTS = aten_names("bmm.default matmul.default")
SAME = aten_names("alias.default clone.default contiguous.default")
SCALES = aten_names("div.Scalar div.Tensor mul.Scalar mul.Tensor")
FILLS = aten_names("masked_fill.Scalar masked_fill.Tensor")
CHOICES = aten_names("where.ScalarOther where.ScalarSelf where.self")
CASTS = aten_names("_to_copy.default to.dtype")
EXACT = (torch.float32, torch.float64)
"""Types of which kernels compute in no wider one."""


class LeftWritten(Exception):
    """Why an attention stays as it is written."""


@dataclass
class Written:
    """An attention: q·kᵀ times a scale, plus what is added, with what is filled in (where, what, whether where it is not)."""

    query: fx.Node
    turned: fx.Node  # kᵀ
    value: fx.Node
    out: fx.Node
    scores: fx.Node
    scale: float
    added: list[fx.Node]
    filled: list[tuple[fx.Node, Any, bool]]


@dataclass
class _Above:
    """What has been seen on the way up from a softmax."""

    scale: float = 1.0
    added: list[fx.Node] = field(default_factory=list)
    filled: list[tuple[fx.Node, Any, bool]] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)


def written(node: fx.Node, types: Mapping[str, Any], numbers: Mapping[str, float]) -> Written | None:
    """The attention that a softmax is in; None for a softmax that is in none. Raises LeftWritten.

    `numbers` are the values that are the same number everywhere, by name.
    """
    seen = _Above()
    product, below = _above(argument(node, "self"), seen, numbers), _below(node)
    if product is None or below is None:
        return None
    out, weights = below[-1], below[-2]
    (query, turned), value = _factors(product), _factors(out)[1]
    if any(each.op == "placeholder" for each in (query, turned, value)):
        return None
    _refuse_uses(below[:-1], seen, types)
    _refuse_kinds([types[each.name] for each in (query, turned, value, out, product, weights)])
    if argument(node, "dim") not in (-1, 3):
        raise LeftWritten("its softmax is not over the keys")
    return Written(query, turned, value, out, product, seen.scale, seen.added, seen.filled)


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = product.args[:2]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return first, second


def _above(value: Any, seen: _Above, numbers: Mapping[str, float]) -> fx.Node | None:
    """The product that scores are made of; `seen` is told of what is done to them."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        name = op_name(value)
        seen.inner.append(value)
        if name in PRODUCTS:
            return value
        if name in SAME or name in CASTS:
            value = value.args[0]
        elif seen.scale != 1 and name not in SCALES and name not in PRODUCTS:
            return None  # what it adds or fills in is scaled too
        elif name in FILLS:
            seen.filled.append((argument(value, "mask"), argument(value, "value"), False))
            value = argument(value, "self")
        elif name in CHOICES:
            value = _chosen(value, seen, numbers)
        elif name in SCALES:
            value = _unscaled(value, seen, numbers)
        elif name == "aten.add.Tensor" and argument(value, "alpha") == 1:
            return _added(value, seen, numbers)
        else:
            return None
    return None


def _chosen(value: fx.Node, seen: _Above, numbers: Mapping[str, float]) -> Any:
    """What a number is put into, where a condition holds or where it does not."""
    condition, own, other = value.args[:3]
    for kept, filled, shown in ((own, other, True), (other, own, False)):
        if not isinstance(filled, fx.Node) or filled.name in numbers:
            seen.filled.append((condition, filled, shown))  # type: ignore[arg-type]
            return kept
    return None


def _unscaled(value: fx.Node, seen: _Above, numbers: Mapping[str, float]) -> Any:
    """What a scale is put to; None where it is no number, or also scales what was added before."""
    given = (argument(value, "self"), argument(value, "other"))
    known = [numbers.get(each.name) if isinstance(each, fx.Node) else each for each in given]
    if "div" in op_name(value):
        known[0] = None
        known[1] = 1 / known[1] if known[1] else None
    place = next((place for place, number in enumerate(known) if isinstance(number, (int, float))), None)
    if place is None:
        return None
    seen.scale *= float(known[place])  # type: ignore[arg-type]
    return given[1 - place]


def _added(value: fx.Node, seen: _Above, numbers: Mapping[str, float]) -> fx.Node | None:
    """The product in one of two addends; the other is a mask."""
    for own, other in (value.args[:2], value.args[1::-1]):
        tried = _Above(seen.scale, list(seen.added), list(seen.filled), list(seen.inner))
        if isinstance(other, fx.Node) and (product := _above(own, tried, numbers)) is not None:
            seen.scale, seen.added, seen.filled, seen.inner = tried.scale, [*tried.added, other], tried.filled, tried.inner
            return product
    return None


def _below(node: fx.Node) -> list[fx.Node] | None:
    """The way from a softmax to the product of its weights with values."""
    way = [node]
    while way[-1].users:
        users = [user for user in way[-1].users if user.op == "call_function"]
        for user in users:
            if op_name(user) in PRODUCTS and user.args[0] is way[-1]:
                return [*way, user]
        on = [user for user in users if op_name(user) in SAME | CASTS or "dropout" in op_name(user)]
        if not on:
            return None
        way.append(on[0])
    return None


def _refuse_uses(weights: list[fx.Node], seen: _Above, types: Mapping[str, Any]) -> None:
    """Raise LeftWritten where scores or weights are read elsewhere, are dropped, or are in another type."""
    if any("dropout" in op_name(each) for each in weights):
        raise LeftWritten("its weights are dropped at random")
    if any(len(each.users) > 1 for each in weights):
        raise LeftWritten("its weights are used elsewhere")
    if any(len(each.users) > 1 for each in seen.inner):
        raise LeftWritten("its scores are used elsewhere")
    if len({types[each.name].dtype for each in (*weights, *seen.inner)}) > 1:
        raise LeftWritten("its softmax is computed in another type")


def _refuse_kinds(kinds: list[Any]) -> None:
    """Raise LeftWritten for operands that torch's kernels do not take, or for which they compute something else."""
    query, turned, value, _, scores, weights = kinds
    if not all(isinstance(kind, TensorType) and len(kind.shape) == 4 for kind in kinds):
        raise LeftWritten("it is not in four dimensions, [batch, heads, positions, features]")
    if not all(kind.dtype == query.dtype for kind in kinds) or query.dtype not in EXACT:
        raise LeftWritten("in 16 bits, one operation rounds in other places")
    if len({kind.shape[:2] for kind in (query, turned, value, scores)}) > 1 or value.shape[-1] != query.shape[-1]:
        raise LeftWritten("its queries, keys and values are not alike in shape")
    if weights.shape != scores.shape:
        raise LeftWritten("its mask has more dimensions than its scores")
