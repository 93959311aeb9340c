"""The communication that a rank's program contains, as torch operators with gradients.

Every operator names its group by a string: the name of a torch process group, so that it survives torch.compile and torch.export.

    name          forward                       backward                        stands where
    enter         identity                      all-reduce                      a whole value goes into cut uses
    enter_linear  identity                      all-reduce                      linears over a whole value
    enter_later   identity                      all-reduce, unless postponed    a whole parameter that has cut uses alone
    reduce        all-reduce                    identity                        a partial sum becomes whole
    reduce_max    all-reduce of the largest     none                            a partial maximum becomes whole
    gather        all-gather                    own pieces                      a cut value becomes whole
    local_slice   own pieces                    zeros around the own pieces     after `enter`, a whole value becomes cut
    shared        identity                      all-reduce of what overlaps     a parameter of which coordinates share pieces
    dropout       a mask drawn from its key     the same mask                   any dropout
    dropout_at    a mask of elements' places    the same mask                   dropout as on one device
    seq_scatter   reduce-scatter                all-gather                      a partial sum becomes cut along its positions
    seq_gather    all-gather                    reduce-scatter                  a value cut along its positions goes into cut uses
    seq_whole     all-gather                    own positions                   a value cut along its positions becomes whole
    kept_linear   all-gather                    reduce-scatter                  linears over a gathered value
    seq_linear    all-gather                    all-gather, reduce-scatter      linears over a gathered value that is not kept
    seq_slice     own positions                 all-gather                      a whole value becomes cut along its positions
    exp_sum       own part of Σ exp(x - max)    of the own part                 a loss of cut scores
    look_up       own rows, zeros for others'   of the own rows                 a table whose rows are cut
    own_entries   own entries, zeros for others'  of the own entries            a loss of cut scores
    own_one_hot   own columns of a one-hot      nothing                         labels beside cut scores
    own_place     own place of the largest      none                            the place of the largest of cut scores
    own_scatter   a number at own places        of what is left                 labels beside cut scores
    uniform       numbers by elements' places   nothing                         random numbers of the model

What each hands to the process group, and how many bytes, is a row of `COLLECTIVES` (`tpcompile.collectives.table`).

`bounds` says who holds what along a dimension: a flat list of shape [coordinates, n, 2], for each coordinate n index ranges
[start, stop) of the whole dimension, in the order in which they lie in its local piece; empty ranges fill up. Pieces may have
unequal sizes and may overlap; together they cover the whole. Where they overlap, the lowest coordinate counts as the holder:
`gather` takes its element and gives the gradient to it alone.

The gradients assume that every coordinate runs the same loss from the same whole values and starts backward with 1. They are of the
first order: a backward that is itself recorded (create_graph=True) is refused.

Before `bind`, an axis is spelled "tp:1/4": coordinate 1 of 4 without a group. That is enough to trace; running needs a group,
unless the axis has one rank: then every operator is the identity, or a plain slice, and nothing communicates.

`enter_later` reduces a parameter's gradient where it stands, as `enter` does, so that a module is right by itself. Who runs several
micro-batches `postponed`s that: gradients stay each rank's own part, and he sums them over the axis, once, before anybody reads them.

`enter`, `enter_later` and `shared` are identities. An operator must not return its input, and Inductor relies on that; but a copy of
every value that enters a region would cost memory and time. So these have an autograd kernel of their own: run eagerly, it returns a
view; while something traces, it makes a clone, which is all that Inductor then sees of them, and which it removes. An operator marked as
a view is not an option, since functionalization refuses custom ones; nor is a bare autograd.Function, since export would lose its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.groups import bind, check_bound, group_of, place, postponed, unbound
from tpcompile.collectives.heads import pick
from tpcompile.collectives.indexed import DIGITS, OWN, finalize
from tpcompile.collectives.keyed_dropout import mix
from tpcompile.collectives.linears import define as define_linears
from tpcompile.collectives.pieces import Range, held_by, holders, length, overlap, spread, summed_in, take
from tpcompile.collectives.positions import define as define_positions
from tpcompile.collectives.positions import piece
from tpcompile.collectives.sums import all_reduce, plain
from tpcompile.collectives.table import COLLECTIVES, RING, Collective, Message
from tpcompile.collectives.vocabulary import exp_sum, look_up, own_entries, own_one_hot, own_place, own_scatter
from tpcompile.errors import Refused

__all__ = ["COLLECTIVES", "RING", "Collective", "Message", "Range", "bind", "dropout", "dropout_at", "enter", "enter_later", "exp_sum"]
__all__ += ["finalize", "gather", "held_by", "holders", "length", "local_slice", "look_up", "mix", "ops", "overlap", "own_entries"]
__all__ += ["DIGITS", "OWN", "pick", "piece", "place", "postponed", "reduce", "reduce_max", "shared", "spread", "summed_in", "take"]
__all__ += ["own_one_hot", "own_place", "own_scatter", "unbound", "uniform"]


# ------------------------------------------------------------------------------------------------- reduce, enter


def _first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The backward of an operator whose gradient has no gradient."""

    def checked(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Refused("collectives have no second derivatives", at="backward(create_graph=True)", fix="leave create_graph out")
        return backward(ctx, *grads)

    return checked


@torch.library.custom_op("tpcompile::reduce", mutates_args=())
def _reduce(x: Tensor, axis: str) -> Tensor:
    check_bound(axis)
    return all_reduce(x, axis)


@_reduce.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_reduce.register_autograd(_first_order(lambda ctx, grad: (grad, None)))


@torch.library.custom_op("tpcompile::reduce_max", mutates_args=())
def _reduce_max(x: Tensor, axis: str) -> Tensor:
    check_bound(axis)
    return all_reduce(x, axis, "max")


@_reduce_max.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library: Any = torch.library.Library("tpcompile", "FRAGMENT")  # type: ignore[no-untyped-call]


def _same(x: Tensor) -> Tensor:
    """A view of a tensor; a clone of one that is being traced."""
    return x.view_as(x) if plain(x) else x.clone()


class _Identity(torch.autograd.Function):
    """An identity whose gradient is `backward(grad, *rest)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any, rest: tuple[Any, ...]) -> Tensor:
        ctx.to_input, ctx.rest = backward, rest
        return _same(x)

    @staticmethod
    @_first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.to_input(grad, *ctx.rest), None, None


def _define_identity(name: str, arguments: str, backward: Callable[..., Tensor]) -> None:
    """An operator that returns its first argument's values."""

    def identity(x: Tensor, axis: str, *rest: Any) -> Tensor:
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta:
            check_bound(axis)
        if torch.is_grad_enabled() and x.requires_grad:
            return _Identity.apply(x, backward, (axis, *rest))  # type: ignore[no-any-return,no-untyped-call]
        return _same(x)

    _library.define(f"{name}(Tensor x, str axis{arguments}) -> Tensor")
    _library.impl(name, identity, "Autograd")
    _library.impl(name, lambda x, axis, *rest: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpcompile::{name}", lambda x, *rest: x.clone(), lib=_library)


_define_identity("enter", "", all_reduce)
_define_identity("enter_later", "", lambda grad, axis: grad if place(axis)[1] == 1 else all_reduce(grad, axis))


def _share(grad: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    """The gradient of a piece, summed with those of the coordinates that hold the same elements. Only these elements travel."""
    coordinate, size = place(axis)
    ranges, common = held_by(bounds, coordinate, size), overlap(bounds, size)
    if not common:
        return grad
    whole = max(bounds)
    full = spread(grad, dim, ranges, whole)
    summed = all_reduce(take(full, dim, common), axis)
    offset = 0
    for start, stop in common:
        full.narrow(dim, start, stop - start).copy_(summed.narrow(dim, offset, stop - start))
        offset += stop - start
    return take(full, dim, ranges)


_define_identity("shared", ", int dim, int[] bounds", _share)


# ------------------------------------------------------------------------------------------------- gather, local_slice


@torch.library.custom_op("tpcompile::gather", mutates_args=())
def _gather(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    check_bound(axis)
    size = place(axis)[1]
    longest = max(length(held_by(bounds, c, size)) for c in range(size))
    rows = x.movedim(dim, 0).contiguous()
    if rows.shape[0] < longest:
        rows = torch.cat([rows, rows.new_zeros([longest - rows.shape[0], *rows.shape[1:]])])
    if not rows.numel():
        return x.new_zeros([*x.shape[:dim], max(bounds), *x.shape[dim:][1:]])
    if size > 1:
        functional = torch.ops._c10d_functional
        rows = functional.wait_tensor.default(functional.all_gather_into_tensor.default(rows, size, group_of(axis)))
    runs = [(holder * longest + at, stop - start) for start, stop, holder, at in holders(bounds, size)]
    if size == 1 or runs != [(coordinate * longest, longest) for coordinate in range(size)]:
        rows = torch.cat([rows.narrow(0, at, count) for at, count in runs])
    return rows.movedim(0, dim).contiguous()


@_gather.register_fake
def _(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = max(bounds)
    return x.new_empty(shape)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.axis, ctx.dim, ctx.bounds = inputs


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    coordinate, size = place(ctx.axis)
    ranges = held_by(ctx.bounds, coordinate, size)
    if overlap(ctx.bounds, size):
        mine = [(start, stop) for start, stop, holder, _ in holders(ctx.bounds, size) if holder == coordinate]
        grad = spread(take(grad, ctx.dim, mine), ctx.dim, mine, grad.shape[ctx.dim])
    return take(grad, ctx.dim, ranges), None, None, None


_gather.register_autograd(_first_order(_gather_backward), setup_context=_gather_setup)


@torch.library.custom_op("tpcompile::local_slice", mutates_args=())
def _local_slice(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    return take(x, dim, held_by(bounds, *place(axis))).contiguous()


@_local_slice.register_fake
def _(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length(held_by(bounds, *place(axis)))
    return x.new_empty(shape)


def _local_slice_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.axis, ctx.dim, ctx.bounds = inputs
    ctx.whole = x.shape[ctx.dim]


def _local_slice_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return spread(grad, ctx.dim, held_by(ctx.bounds, *place(ctx.axis)), ctx.whole), None, None, None


_local_slice.register_autograd(_first_order(_local_slice_backward), setup_context=_local_slice_setup)


define_positions(_first_order)
define_linears(_library, _first_order)

ops = torch.ops.tpcompile
"""All of them; the names below are their only overloads."""

dropout = ops.dropout.default
dropout_at = ops.dropout_at.default
enter = ops.enter.default
enter_later = ops.enter_later.default
enter_linear = ops.enter_linear.default
gather = ops.gather.default
kept_linear = ops.kept_linear.default
local_slice = ops.local_slice.default
reduce = ops.reduce.default
reduce_max = ops.reduce_max.default
seq_gather = ops.seq_gather.default
seq_linear = ops.seq_linear.default
seq_scatter = ops.seq_scatter.default
seq_slice = ops.seq_slice.default
seq_whole = ops.seq_whole.default
shared = ops.shared.default
uniform = ops.uniform.default
