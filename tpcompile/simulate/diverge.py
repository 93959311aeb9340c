"""Find the first value of a compiled program that is not what one device computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from tpcompile.collectives import held_by, spread, take
from tpcompile.driver import Compilation
from tpcompile.ir import Stage
from tpcompile.layout import Layout, bounds, concrete, cut_factors, size_of
from tpcompile.rules import op_name
from tpcompile.simulate.distance import distance
from tpcompile.simulate.lockstep import Values, run
from tpcompile.simulate.replay import Replay, flatten, rows
from tpcompile.simulate.report import Divergence
from tpcompile.verify import entered_values

SEQUENCE = ("seq_gather", "seq_scatter", "seq_slice", "seq_whole")
CONVERSIONS = tuple(
    f"tpcompile.{name}.default"
    for name in ("enter", "enter_later", "gather", "local_slice", "pick", "reduce", "reduce_max", *SEQUENCE, "shared")
)
"""Their own gradients belong to no value of the global program."""


def first_divergence(model: nn.Module, compilation: Compilation, batch: Mapping[str, Any], tolerance: float) -> Divergence | None:
    """Parameters, then values in the order of the program, then gradients in the order of backward; on the first part of the rows."""
    replay = Replay(model, compilation, dropout=compilation.options.dropout == "exact")
    program, mesh = compilation.program, compilation.mesh
    tensors = flatten(program, batch)
    counts = replay.counts(tensors)
    part = rows(program, tensors, 0, mesh.dp * compilation.options.microbatches)
    whole = _whole(model, replay, part, counts)
    search = _Search(compilation, whole, tolerance, {symbol: part[name].shape[dim] for symbol, (name, dim) in program.symbols.items()})
    for number, stage in enumerate(compilation.stages):
        if found := search.parameters(stage, replay.pieces[number]):
            return found
    values = replay.forward(part, counts)
    _keep_gradients(value for stage in values for value in stage.values())
    for stage, made in zip(compilation.stages, values, strict=True):
        if found := search.values(stage, made):
            return found
    losses = [output[0] for output in values[-1]["output"]]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    replay.tie()
    for stage, made in reversed(list(zip(compilation.stages, values, strict=True))):
        if found := search.gradients(stage, made):
            return found
    return None


def _whole(model: nn.Module, replay: Replay, part: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every value of the program before it is cut, on one device, with gradients kept."""
    program = replay.compilation.program
    state = dict(model.named_parameters(remove_duplicate=False))
    given: dict[str, Any] = {**part, **counts, **program.constants, "rng_key": replay.key(0)}
    given |= {key: state[name].detach().clone().requires_grad_(state[name].requires_grad) for key, name in program.parameters.items()}
    given |= {key: model.get_buffer(name) for key, name in program.buffers.items()}
    values = run(program.graph, {name: [value] for name, value in given.items()}, 1, dropout=replay.dropout)
    _keep_gradients(values.values())
    assert program.loss is not None
    values[program.loss][0].backward()
    return {name: value[0] for name, value in values.items()}


def _keep_gradients(values: Iterable[Values]) -> None:
    for ranks in values:
        for value in ranks:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()


class _Search:
    """Compares local values, put together by their layouts, with the whole ones."""

    def __init__(self, compilation: Compilation, whole: Mapping[str, Any], tolerance: float, sizes: Mapping[Any, int]) -> None:
        self.compilation, self.whole, self.tolerance, self.sizes = compilation, whole, tolerance, sizes
        self.parts = compilation.mesh.tp
        grads = [value.grad for value in whole.values() if isinstance(value, Tensor) and value.requires_grad and value.grad is not None]
        self.scale = max((float(grad.abs().max()) for grad in grads if grad.numel()), default=1.0) or 1.0

    def parameters(self, stage: Stage, pieces: Mapping[str, list[Tensor]]) -> Divergence | None:
        for placeholder, name in stage.parameters.items():
            error = self.error(self.compilation.sharded.layouts[placeholder], list(pieces[name]), self.whole[placeholder])
            if error > self.tolerance:
                return self.found("parameter", self.compilation.program.parameters[placeholder], placeholder, error, stage)
        return None

    def values(self, stage: Stage, made: Mapping[str, Values]) -> Divergence | None:
        local = self.compilation.local
        for node in stage.graph.nodes:
            origin = local.origins.get(node.name)
            layout = local.layouts.get(node.name)
            if (
                node.op != "call_function"
                or "empty" in op_name(node)
                or origin is None
                or not isinstance(layout, Layout)
                or not isinstance(self.whole.get(origin), Tensor)
            ):
                continue
            expected = self.whole[origin]
            size = max(1.0, float(expected.detach().abs().max())) if expected.is_floating_point() and expected.numel() else 1.0
            error = self.error(layout, made[node.name], expected) / size
            if error > self.tolerance:
                return self.found("value", node.name, origin, error, stage)
        return None

    def gradients(self, stage: Stage, made: Mapping[str, Values]) -> Divergence | None:
        local = self.compilation.local
        entered = entered_values(stage.graph, local.layouts, set(stage.graph.nodes))
        for node in reversed(stage.graph.nodes):
            origin, layout = local.origins.get(node.name, node.name), local.layouts.get(node.name)
            expected = getattr(self.whole.get(origin), "grad", None) if isinstance(self.whole.get(origin), Tensor) else None
            converted = op_name(node) in CONVERSIONS or node in entered or _partial(layout)
            if node.op == "output" or converted or expected is None or not isinstance(layout, Layout):
                continue
            grads = [torch.zeros_like(value) if value.grad is None else value.grad for value in made[node.name]]
            error = self.error(layout, grads, expected, overlapping="sum" if node.op != "placeholder" else "same") / self.scale
            if error > self.tolerance:
                return self.found("gradient", node.name, origin, error, stage)
        return None

    def error(self, layout: object, values: Values, expected: Tensor, *, overlapping: str = "same") -> float:
        """The worst element: of the ranks' sum, of the pieces put together, or of any rank's whole value.

        Where pieces overlap, each rank's must be right; a gradient inside a region is there a part of a sum.
        """
        assert isinstance(layout, Layout)
        if layout.partial:
            return distance(torch.stack([value.detach() for value in values]).sum(0), expected)
        if not layout.is_cut:
            return max(distance(value, expected) for value in values)
        if any(not size.free_symbols <= self.sizes.keys() for dim in layout.dims if isinstance(size := size_of(dim), sympy.Expr)):
            return 0.0  # a size that only a run of the model gives: nothing is said of it
        layout = concrete(layout, self.sizes)
        cuts = [(dim, bounds(places, self.parts)) for dim, places in enumerate(layout.dims) if cut_factors(places)]
        if len(cuts) > 1:
            return 0.0
        dim, held = cuts[0]
        pieces = [held_by(held, coordinate, self.parts) for coordinate in range(self.parts)]
        sizes = [sum(stop - start for start, stop in ranges) for ranges in pieces]
        if [value.shape[dim] for value in values] != sizes:
            return float("inf")
        if overlapping == "sum":
            total = torch.stack(
                [spread(value.detach(), dim, ranges, expected.shape[dim]) for value, ranges in zip(values, pieces, strict=True)]
            ).sum(0)
            return distance(total, expected)
        return max(distance(value, take(expected, dim, ranges)) for value, ranges in zip(values, pieces, strict=True))

    def found(self, kind: str, name: str, origin: str, error: float, stage: Stage) -> Divergence:
        source = self.compilation.program.sources.get(origin)
        if source is None:
            users = (self.compilation.program.sources.get(user.name) for user in self.compilation.program.nodes()[origin].users)
            source = next((line for line in users if line is not None), None)
        return Divergence(kind, name, error, stage.index, f"{source} {source.code}".strip() if source else "")


def _partial(layout: object) -> bool:
    return isinstance(layout, Layout) and bool(layout.partial)
