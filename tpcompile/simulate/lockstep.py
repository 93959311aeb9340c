"""Run one graph for every rank of the tensor axis at once, in one process and one autograd graph.

Every node holds a list of values, one per coordinate. Collectives are joint functions of all of them, with the gradients that the real
operators have; so a missing or a doubled reduction gives the wrong numbers that it would give on as many devices. What they move is
noted on a `Wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tpcompile.collectives import held_by, holders, spread, take
from tpcompile.ir import PerRank
from tpcompile.rules import op_name
from tpcompile.simulate.wire import Line, Wire, Work, copies

Values = list[Any]
"""A value on every coordinate of the tensor axis."""


def run(
    graph: fx.Graph, feed: Mapping[str, Values], parts: int, *, dropout: bool = False, wire: Wire | None = None, stage: int = 0
) -> dict[str, Values]:
    """Every node's values, by name; the graph's output stands under "output". `feed` gives the placeholders'.

    Without `dropout` nothing is dropped. What collectives move is noted on `wire`, as of `stage`.
    """
    wire = wire or Wire()
    values: dict[fx.Node, Values] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = feed[node.name]
        elif node.op == "output":
            values[node] = [_local(node.args[0], values, coordinate) for coordinate in range(parts)]
        elif (joint := JOINT.get(op_name(node))) is not None:
            source = node.all_input_nodes[0]
            values[node] = list(joint(wire.line(stage, source.name), values[source], *_local(node.args[2:], values, 0)))
        elif (opened := LINEARS.get(op_name(node))) is not None:
            values[node] = _linears(node, values, wire.line(stage, node.all_input_nodes[0].name), opened)
        elif op_name(node) in DROPS and not dropout:
            values[node] = values[node.all_input_nodes[0]]
        else:
            values[node] = [_call(node, values, coordinate, dropout) for coordinate in range(parts)]
    return {node.name: value for node, value in values.items()}


def _call(node: fx.Node, values: Mapping[fx.Node, Values], coordinate: int, dropout: bool) -> Any:
    args = [_local(argument, values, coordinate) for argument in node.args]
    kwargs = {name: _local(argument, values, coordinate) for name, argument in node.kwargs.items()}
    assert callable(node.target)
    if not dropout and op_name(node) == "aten.scaled_dot_product_attention.default":
        if len(args) > 4:
            args[4] = 0.0
        else:
            kwargs["dropout_p"] = 0.0
    return node.target(*args, **kwargs)


def _local(argument: Any, values: Mapping[fx.Node, Values], coordinate: int) -> Any:
    """An argument as one coordinate has it."""
    match argument:
        case fx.Node():
            return values[argument][coordinate]
        case PerRank(numbers):
            return numbers[coordinate]
        case list() | tuple():
            return [_local(item, values, coordinate) for item in argument]
        case slice():
            return slice(*(_local(item, values, coordinate) for item in (argument.start, argument.stop, argument.step)))
    return argument


class _Joint(torch.autograd.Function):
    """A function of the values on all coordinates, with a given gradient."""

    @staticmethod
    def forward(ctx: Any, work: Work, back: Work, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(work(*values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.back(*grads)


def _joint(work: Work, back: Work, values: Values) -> Sequence[Tensor]:
    return _Joint.apply(work, back, *values)  # type: ignore[no-untyped-call, no-any-return]


def _enter(line: Line, values: Values) -> Sequence[Tensor]:
    return _joint(copies, line.sums("backward"), values)


def _enter_later(line: Line, values: Values) -> Sequence[Tensor]:
    """Every rank's own part of the gradient stays its own: `Replay` sums them."""
    return _joint(copies, copies, values)


def _reduce(line: Line, values: Values) -> Sequence[Tensor]:
    return _joint(line.sums("forward"), copies, values)


def _reduce_max(line: Line, values: Values) -> Sequence[Tensor]:
    return line.highest("forward")(*(value.detach() for value in values))


def _gather(line: Line, values: Values, dim: int, bounds: Sequence[int]) -> Sequence[Tensor]:
    parts = len(values)

    def back(*grads: Tensor) -> list[Tensor]:
        made = []
        for coordinate, grad in enumerate(grads):
            mine = [(start, stop) for start, stop, holder, _ in holders(bounds, parts) if holder == coordinate]
            made.append(take(spread(take(grad, dim, mine), dim, mine, grad.shape[dim]), dim, held_by(bounds, coordinate, parts)))
        return made

    return _joint(line.whole("forward", dim, bounds), back, values)


def _local_slice(line: Line, values: Values, dim: int, bounds: Sequence[int]) -> Sequence[Tensor]:
    return [take(value, dim, held_by(bounds, coordinate, len(values))).contiguous() for coordinate, value in enumerate(values)]


def _shared(line: Line, values: Values, dim: int, bounds: Sequence[int]) -> Sequence[Tensor]:
    return _joint(copies, line.sums_of_common("backward", dim, bounds), values)


def send(out: Line, back: Line, values: Values) -> Values:
    """A value as the next stage gets it; its gradient comes back the same way."""
    return list(_joint(out.sends("forward"), back.sends("backward"), values))


OURS = ("tpcompile.dropout.default", "tpcompile.dropout_at.default")
DROPS = ("aten.alpha_dropout.default", "aten.dropout.default", "aten.feature_dropout.default", *OURS)


def _seq_gather(line: Line, values: Values, dim: int, length: int) -> Sequence[Tensor]:
    return _joint(line.all_positions("forward", dim), line.summed_positions("backward", dim, length), values)


def _seq_scatter(line: Line, values: Values, dim: int, length: int) -> Sequence[Tensor]:
    return _joint(line.summed_positions("forward", dim, length), line.all_positions("backward", dim), values)


def _seq_slice(line: Line, values: Values, dim: int, length: int) -> Sequence[Tensor]:
    return _joint(line.own_positions(dim, length), line.all_positions("backward", dim), values)


def _seq_whole(line: Line, values: Values, dim: int, length: int) -> Sequence[Tensor]:
    return _joint(line.all_positions("forward", dim), line.own_positions(dim, length), values)


def _linears(node: fx.Node, values: Mapping[fx.Node, Values], line: Line, opened: Callable[..., Sequence[Tensor]]) -> Values:
    """Linear layers over a value that a collective prepares; where that runs again in backward, it does so for the weights' gradients."""
    value, _, *where, weights, biases = node.args
    whole = opened(line, values[value], *_local(where, values, 0))  # type: ignore[index]
    ranks = range(len(whole))
    held = [[_local(weight, values, coordinate) for coordinate in ranks] for weight in weights]  # type: ignore[union-attr]
    asked = next((place for place, own in enumerate(held) if any(weight.requires_grad for weight in own)), None)
    if op_name(node) == "tpcompile.seq_linear.default" and asked is not None:

        def back(*grads: Tensor) -> Sequence[Tensor]:
            line.note("backward", "all_gather", max(values[value], key=Tensor.numel))  # type: ignore[index]
            return grads

        held[asked] = list(_joint(copies, back, held[asked]))
    added = [_local(biases, values, coordinate) or [None] * len(held) for coordinate in ranks]
    return [[F.linear(whole[c], weight[c], bias) for weight, bias in zip(held, added[c], strict=True)] for c in ranks]


JOINT: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "tpcompile.enter.default": _enter,
    "tpcompile.enter_later.default": _enter_later,
    "tpcompile.gather.default": _gather,
    "tpcompile.local_slice.default": _local_slice,
    "tpcompile.reduce.default": _reduce,
    "tpcompile.seq_gather.default": _seq_gather,
    "tpcompile.seq_scatter.default": _seq_scatter,
    "tpcompile.seq_slice.default": _seq_slice,
    "tpcompile.seq_whole.default": _seq_whole,
    "tpcompile.reduce_max.default": _reduce_max,
    "tpcompile.shared.default": _shared,
}

LINEARS: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "tpcompile.enter_linear.default": _enter,
    "tpcompile.kept_linear.default": _seq_gather,
    "tpcompile.seq_linear.default": _seq_gather,
}
"""How the value becomes whole that joined linear layers read."""
