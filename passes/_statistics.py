"""Private to capture: norms that keep running statistics, with what they do to their buffers spelled out.

    before  %y = batch_norm(%x, %w, %b, %mean, %var, True, 0.1, 1e-5)       changes %mean and %var without saying so
    after   %y = batch_norm(%x, %w, %b, None, None, True, 0.1, 1e-5)
            %d = detach(%x), %m = mean(%d, [0, 2, 3]), %v = var(%d, [0, 2, 3])
            %_ = copy_(%mean, 0.9 · %mean + 0.1 · %m), %_ = copy_(%var, 0.9 · %var + 0.1 · %v)

The mean and the unbiased variance of every channel, over rows and places; of an instance norm over places, and then their mean over rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse
from tpcompile.passes._views import argument, like, schema_name

aten = torch.ops.aten

NORMS = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}
"""Norms that have a functional form without running statistics, and the argument that says whether they take those of their input."""

OTHERS = frozenset({"aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::native_batch_norm"})
"""What these make of a norm that learns is known to one kind of device."""


def spell_statistics(graph: fx.Graph) -> None:
    """Give norms that update running statistics their explicit form. Raises CaptureError for those that have none."""
    for node in list(graph.nodes):
        name = schema_name(node)
        if name in OTHERS and argument(node, "training") and argument(node, "running_mean") is not None:
            _refuse(node)
        if name in NORMS and argument(node, NORMS[name]) and argument(node, "running_mean") is not None:
            _spell(graph, node)


def _spell(graph: fx.Graph, node: fx.Node) -> None:
    x, momentum = argument(node, "input"), argument(node, "momentum")
    places, rows = list(range(2, x.meta["val"].ndim)), [0]
    over = places if schema_name(node) == "aten::instance_norm" else rows + places

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        given = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        new = like(graph, node, target, args, kwargs, target(*given[0], **given[1]))
        new.meta["no_grad"] = True
        return new

    with graph.inserting_before(node):
        seen = call(aten.detach.default, x)
        for name, statistic in (("running_mean", aten.mean.dim), ("running_var", aten.var.dim)):
            buffer = argument(node, name)
            dtype = buffer.meta["val"].dtype
            exact = seen if seen.meta["val"].dtype == dtype else call(aten.to.dtype, seen, dtype)
            made = call(statistic, exact, over)
            if over == places:
                made = call(aten.mean.dim, made, rows)
            kept = call(aten.mul.Tensor, buffer, 1 - momentum)
            call(aten.copy_.default, buffer, call(aten.add.Tensor, kept, call(aten.mul.Tensor, made, momentum)))
    for name in ("running_mean", "running_var"):
        _leave_out(node, name)


def _leave_out(node: fx.Node, name: str) -> None:
    """Leave an operand of a norm out."""
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    if place < len(node.args):
        node.args = (*node.args[:place], None, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: None}


def _refuse(node: fx.Node) -> None:
    source = source_of(node)
    what = f"{(source and source.path) or 'the model'} updates its running statistics in forward, by {schema_name(node)}"
    refuse(what, source, "use torch.nn.functional.batch_norm")
