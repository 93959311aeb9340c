"""The communication that a rank's program contains, as torch operators with gradients.

Every operator names its group by a string: the name of a torch process group, so that it survives torch.compile and torch.export.

    name          forward                       backward                        stands where
    enter         identity                      all-reduce                      a whole value goes into cut uses
    reduce        all-reduce                    identity                        a partial sum becomes whole
    gather        all-gather                    own pieces                      a cut value becomes whole
    local_slice   own pieces                    zeros around the own pieces     after `enter`, a whole value becomes cut
    shared        identity                      all-reduce of what overlaps     a parameter of which coordinates share pieces
    dropout       a mask drawn from its key     the same mask                   any dropout

`bounds` says who holds what along a dimension: a flat list of shape [coordinates, n, 2], for each coordinate n index ranges
[start, stop) of the whole dimension, in the order in which they lie in its local piece; empty ranges fill up. Pieces may have
unequal sizes and may overlap; together they cover the whole. Where they overlap, the lowest coordinate counts as the holder:
`gather` takes its element and gives the gradient to it alone.

The gradients assume that every coordinate runs the same loss from the same whole values and starts backward with 1.

Before `bind`, an axis is spelled "tp:1/4": coordinate 1 of 4 without a group. That is enough to trace; running needs a group,
unless the axis has one rank: then every operator is the identity, or a plain slice, and nothing communicates.

`enter` and `shared` are identities. An operator must not return its input, and Inductor relies on that, but a copy of every activation
would cost memory and time. So their autograd kernel, which Inductor's code never reaches with gradients on, returns a view in eager
training, and everyone else (tracing, compiled code, no_grad) gets a copy. An operator marked as a view is not an
option: functionalization refuses custom ones. Neither is a bare autograd.Function: export would lose its backward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from tpcompile.errors import TpcompileError

Range = tuple[int, int]


@dataclass(frozen=True)
class Collective:
    """What an operator communicates: "all_reduce", "all_gather", or "" for nothing."""

    forward: str
    backward: str


COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "dropout": Collective("", ""),
        "enter": Collective("", "all_reduce"),
        "gather": Collective("all_gather", ""),
        "local_slice": Collective("", ""),
        "reduce": Collective("all_reduce", ""),
        "shared": Collective("", "all_reduce"),
    }
)
"""Our operators by name."""


# ------------------------------------------------------------------------------------------------- groups


def unbound(axis: str, coordinate: int, size: int) -> str:
    """The spelling of an axis that has no process group yet."""
    return f"{axis}:{coordinate}/{size}"


def place(axis: str) -> tuple[int, int]:
    """This process's coordinate along an axis, and the axis's size."""
    if match := re.fullmatch(r"\w+:(\d+)/(\d+)", axis):
        return int(match[1]), int(match[2])
    group = _resolve_process_group(axis)  # type: ignore[arg-type]
    return group.rank(), group.size()


def bind(module: nn.Module, groups: Mapping[str, str]) -> None:
    """Set the process groups of an emitted module, by axis: `bind(module, {"tp": group.group_name})`."""
    for part in module.modules():
        for axis, name in groups.items():
            if isinstance(vars(part).get(axis), str):
                setattr(part, axis, name)


def _check_bound(axis: str) -> None:
    if ":" in axis and place(axis)[1] > 1:
        raise TpcompileError(
            "the program has no process group to communicate over",
            at=f"a collective over {axis.split(':')[0]}, size {place(axis)[1]}",
            fix='call tpcompile.collectives.bind(module, {"tp": group.group_name}), or use compiled.train_step',
        )


# ------------------------------------------------------------------------------------------------- pieces


def _ranges(bounds: Sequence[int], coordinate: int, size: int) -> list[Range]:
    """The index ranges that a coordinate holds."""
    count = len(bounds) // (2 * size)
    mine = bounds[2 * count * coordinate : 2 * count * (coordinate + 1)]
    return [(mine[2 * i], mine[2 * i + 1]) for i in range(count)]


def _length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _take(x: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """The pieces of a whole value that `ranges` names, joined."""
    filled = [(start, stop) for start, stop in ranges if stop > start] or [(0, 0)]
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in filled], dim)


def _spread(x: Tensor, dim: int, ranges: Sequence[Range], whole: int) -> Tensor:
    """The whole value that holds `x` in `ranges` and zero elsewhere."""
    shape = list(x.shape)
    shape[dim] = whole
    full = x.new_zeros(shape)
    offset = 0
    for start, stop in ranges:
        full.narrow(dim, start, stop - start).add_(x.narrow(dim, offset, stop - start))
        offset += stop - start
    return full


def _holders(bounds: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """The whole dimension as runs (start, stop, lowest holder, offset in that holder's piece), in order."""
    edges = sorted(set(bounds) | {0})
    runs = []
    for start, stop in zip(edges, edges[1:], strict=False):
        held = [(c, at) for c in range(size) for at in _offsets(_ranges(bounds, c, size), start)]
        if not held:
            raise TpcompileError(f"no coordinate holds the indices {start}:{stop} of bounds {list(bounds)}")
        runs.append((start, stop, *held[0]))
    return runs


def _offsets(ranges: Sequence[Range], index: int) -> list[int]:
    """Where in a coordinate's piece a global index lies."""
    found, offset = [], 0
    for start, stop in ranges:
        if start <= index < stop:
            found.append(offset + index - start)
        offset += stop - start
    return found


def overlap(bounds: Sequence[int], size: int) -> list[Range]:
    """The index ranges that more than one coordinate holds."""
    edges = sorted(set(bounds))
    spans = list(zip(edges, edges[1:], strict=False))
    return [(a, b) for a, b in spans if sum(bool(_offsets(_ranges(bounds, c, size), a)) for c in range(size)) > 1]


# ------------------------------------------------------------------------------------------------- reduce, enter


def _all_reduce(x: Tensor, axis: str) -> Tensor:
    """The sum over an axis, as a new tensor."""
    if place(axis)[1] == 1 or x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    functional = torch.ops._c10d_functional
    return functional.wait_tensor.default(functional.all_reduce.default(x, "sum", axis))  # type: ignore[no-any-return]


@torch.library.custom_op("tpcompile::reduce", mutates_args=())
def _reduce(x: Tensor, axis: str) -> Tensor:
    _check_bound(axis)
    return _all_reduce(x, axis)


@_reduce.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_reduce.register_autograd(lambda ctx, grad: (grad, None))


_library = torch.library.Library("tpcompile", "FRAGMENT")


class _Identity(torch.autograd.Function):
    """An identity whose gradient is `backward(grad, *rest)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any, below: Any, rest: tuple[Any, ...]) -> Tensor:
        ctx.to_input, ctx.rest = backward, rest
        plain = type(x) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(x) and not torch._C._len_torch_dispatch_stack()
        return x.view_as(x) if plain else below()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.to_input(grad, *ctx.rest), None, None, None


def _define_identity(name: str, arguments: str, backward: Any) -> None:
    """An operator that returns its first argument's values: a view in eager training, else a copy."""
    _library.define(f"{name}(Tensor x, str axis{arguments}) -> Tensor")

    def copy(x: Tensor, axis: str, *rest: Any) -> Tensor:
        _check_bound(axis)
        return x.clone()

    def with_gradient(keys: Any, x: Tensor, *rest: Any) -> Any:
        def below() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                operator = getattr(torch.ops.tpcompile, name).default
                return operator.redispatch(keys & torch._C._after_autograd_keyset, x, *rest)

        if torch.is_grad_enabled() and x.requires_grad:
            return _Identity.apply(x, backward, below, rest)  # type: ignore[no-untyped-call]
        return below()

    _library.impl(name, copy, "CompositeExplicitAutograd")
    _library.impl(name, with_gradient, "Autograd", with_keyset=True)
    torch.library.register_fake(f"tpcompile::{name}", lambda x, *rest: x.clone(), lib=_library)


_define_identity("enter", "", _all_reduce)


def _share(grad: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    """The gradient of a piece, summed with those of the coordinates that hold the same elements. Only these elements travel."""
    coordinate, size = place(axis)
    ranges, common = _ranges(bounds, coordinate, size), overlap(bounds, size)
    if not common:
        return grad
    whole = max(bounds)
    full = _spread(grad, dim, ranges, whole)
    summed = _all_reduce(_take(full, dim, common), axis)
    offset = 0
    for start, stop in common:
        full.narrow(dim, start, stop - start).copy_(summed.narrow(dim, offset, stop - start))
        offset += stop - start
    return _take(full, dim, ranges)


_define_identity("shared", ", int dim, int[] bounds", _share)


# ------------------------------------------------------------------------------------------------- gather, local_slice


@torch.library.custom_op("tpcompile::gather", mutates_args=())
def _gather(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    _check_bound(axis)
    size = place(axis)[1]
    longest = max(_length(_ranges(bounds, c, size)) for c in range(size))
    rows = x.movedim(dim, 0)
    padded = rows.new_zeros([longest, *rows.shape[1:]])
    padded[: rows.shape[0]] = rows
    if size > 1 and padded.numel():
        functional = torch.ops._c10d_functional
        padded = functional.wait_tensor.default(functional.all_gather_into_tensor.default(padded, size, axis))
    parts = [padded.narrow(0, holder * longest + at, stop - start) for start, stop, holder, at in _holders(bounds, size)]
    return torch.cat(parts or [padded]).movedim(0, dim).contiguous()


@_gather.register_fake
def _(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = max(bounds)
    return x.new_empty(shape)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.axis, ctx.dim, ctx.bounds = inputs


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    coordinate, size = place(ctx.axis)
    ranges = _ranges(ctx.bounds, coordinate, size)
    if overlap(ctx.bounds, size):
        mine = [(start, stop) for start, stop, holder, _ in _holders(ctx.bounds, size) if holder == coordinate]
        grad = _spread(_take(grad, ctx.dim, mine), ctx.dim, mine, grad.shape[ctx.dim])
    return _take(grad, ctx.dim, ranges), None, None, None


_gather.register_autograd(_gather_backward, setup_context=_gather_setup)


@torch.library.custom_op("tpcompile::local_slice", mutates_args=())
def _local_slice(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    return _take(x, dim, _ranges(bounds, *place(axis))).contiguous()


@_local_slice.register_fake
def _(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = _length(_ranges(bounds, *place(axis)))
    return x.new_empty(shape)


def _local_slice_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.axis, ctx.dim, ctx.bounds = inputs
    ctx.whole = x.shape[ctx.dim]


def _local_slice_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _spread(grad, ctx.dim, _ranges(ctx.bounds, *place(ctx.axis)), ctx.whole), None, None, None


_local_slice.register_autograd(_local_slice_backward, setup_context=_local_slice_setup)


# ------------------------------------------------------------------------------------------------- dropout


def mix(*numbers: int) -> int:
    """One 63-bit seed from whole numbers: each is added to the state, which then goes through the finalizer of splitmix64.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), section 4; constants of Stafford's variant 13.
    """
    mask, state = (1 << 64) - 1, 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


@torch.library.custom_op("tpcompile::dropout_mask", mutates_args=())
def _dropout_mask(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    """Which elements of `x` stay. The key is read on the host: on a GPU, keep it in host memory, or every dropout waits."""
    generator = torch.Generator(device=x.device).manual_seed(mix(*rng_key.flatten().tolist(), site, offset))
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)


@_dropout_mask.register_fake
def _(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _dropout(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    mask = torch.ops.tpcompile.dropout_mask.default(x, p, rng_key, site, offset)
    return x * mask * (0.0 if math.isclose(p, 1) else 1 / (1 - p))


_library.define("dropout(Tensor x, float p, Tensor rng_key, int site, int offset) -> Tensor")
_library.impl("dropout", _dropout, "CompositeImplicitAutograd")

dropout = torch.ops.tpcompile.dropout.default
enter = torch.ops.tpcompile.enter.default
gather = torch.ops.tpcompile.gather.default
local_slice = torch.ops.tpcompile.local_slice.default
reduce = torch.ops.tpcompile.reduce.default
shared = torch.ops.tpcompile.shared.default
