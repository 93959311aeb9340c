"""cast: parameters are held in a wider type than the model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from tpcompile.graphs import add_node, copy_graph
from tpcompile.ir import Local
from tpcompile.layout import TensorType
from tpcompile.rules import op_name

BEFORE = ("tpcompile.enter.default", "tpcompile.enter_later.default", "tpcompile.shared.default")
"""What adds up a parameter's gradients over tensor ranks: it stands before the cast, so that they are added in the wider type."""


def cast(local: Local, held: Mapping[str, torch.dtype]) -> Local:
    """Cast every parameter where it is used to the type that the model computes in; `held` are the types that ranks hold, by name.

    before  %p_norm_weight : bf16[64];  %e = enter(%p_norm_weight, tp);  %y = layer_norm(%x, [64], %e)
    after   %p_norm_weight : f32[64];   %e = enter(%p_norm_weight, tp);  %c = to(%e, bf16);  %y = layer_norm(%x, [64], %c)

    Its gradients are in the wider type, and add up in it over uses, micro-batches and ranks.
    """
    graph, nodes = copy_graph(local.graph)
    layouts, origins = dict(local.layouts), dict(local.origins)
    types, sources = dict(local.program.types), dict(local.program.sources)
    for placeholder, name in local.program.parameters.items():
        kind, wide = types[placeholder], held.get(name)
        if not isinstance(kind, TensorType) or wide is None or wide == kind.dtype or placeholder not in nodes:
            continue
        types[placeholder] = TensorType(wide, kind.shape)
        todo = [nodes[placeholder]]
        while todo:
            value = todo.pop()
            for user in list(value.users):
                if op_name(user) in BEFORE:
                    todo.append(user)
                    continue
                made = _cast(graph, value, user, kind.dtype)
                layouts[made.name], types[made.name] = layouts[value.name], kind
                if (line := origins.get(user.name, user.name)) in sources:
                    sources[made.name] = sources[line]
    program = replace(local.program, types=types, sources=sources)
    return replace(local, program=program, graph=graph, layouts=layouts, origins=origins)


def _cast(graph: fx.Graph, value: fx.Node, user: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The value in the narrower type, for one of its users."""
    with graph.inserting_before(user):
        made = add_node(graph, "call_function", torch.ops.aten.to.dtype, (value, dtype), {}, f"{value.name}_cast")
    user.replace_input_with(value, made)
    return made
