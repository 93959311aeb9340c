"""A custom autograd.Function while its model is exported: its call becomes an operator, so that its backward is not lost.

    y = GeLUFunction.apply(x)   →   %y = tpcompile_functions.ge_lu_function_x3fa2c1(%x)

Once the graph is there, `prove_rules` asks of every such operator what its forward and its backward do to cut dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from tpcompile.errors import CaptureError
from tpcompile.functions import PLAIN, Kept, Operand, apply, kept, operator
from tpcompile.passes._functional import written
from tpcompile.passes._letters import proved
from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse, user_code, user_line
from tpcompile.passes._traced import Example, Untraceable
from tpcompile.rules import op_name

TENSORS = "write it so that it takes and returns tensors, numbers and strings"


def keep(function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`function.apply(*args, **kwargs)` by its operator. Raises CaptureError for what an operator cannot do: write to its operands."""
    operands: list[Any] = []
    if torch._C._are_functorch_transforms_active():
        _refuse(f"{function.__qualname__} is an autograd.Function under torch.vmap", "apply it to the whole tensor")

    def place(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            _refuse(f"{function.__qualname__} is given a number that is computed from sizes", "give it the size, and compute inside")
        if not isinstance(leaf, Tensor | torch.SymInt):
            return leaf
        operands.append(leaf)
        return Operand(len(operands) - 1)

    ways = pytree.tree_map(place, (args, dict(kwargs)))
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    versions = [tensor._version for tensor in tensors]
    with disable_proxy_modes_tracing():
        returned = apply(function, *args, **kwargs)
    if versions != [tensor._version for tensor in tensors]:
        _refuse(f"{function.__qualname__} writes to a tensor that it is given", "return a new tensor")
    places = _places(function, returned)
    sizes = tuple(not isinstance(operand, Tensor) for operand in operands)
    made = operator(Kept(function, ways[0], ways[1], sizes, places))(*operands)
    if places is None:
        return made
    tensor = iter(made)
    return tuple(next(tensor) if index in places else value for index, value in enumerate(returned))


def _places(function: type[Function], returned: Any) -> tuple[int, ...] | None:
    """Which of the returned values are tensors; None for a tensor by itself."""
    if isinstance(returned, Tensor):
        return None
    values = returned if isinstance(returned, tuple) else (returned,)
    places = tuple(index for index, value in enumerate(values) if isinstance(value, Tensor))
    if not isinstance(returned, tuple) or not places or not all(isinstance(value, (Tensor, *PLAIN)) for value in values):
        odd = next((value for value in values if not isinstance(value, (Tensor, *PLAIN))), returned)
        _refuse(f"{function.__qualname__} returns a {type(odd).__name__}", TENSORS)
    return places


def _refuse(what: str, fix: str) -> NoReturn:
    raise CaptureError(what, at=user_code(), source=user_line(), fix=fix)


# --- once the graph is there


def refuse_shared_memory(graph: fx.Graph) -> None:
    """A Function that returns a tensor in the memory of an operand: none of the two may be written to, since gradients would not follow."""
    writes = {node.args[place].meta.get("storage") for node in graph.nodes for place in written(node)}
    for node in graph.nodes:
        way = kept(node.target)
        if way is None:
            continue
        memory = {operand.meta.get("storage") for operand in node.all_input_nodes} - {None}
        results = [node, *(user for user in node.users if op_name(user) == "getitem")]
        if any(result.meta.get("storage") in memory & writes for result in results):
            refuse(f"{way.name} returns a tensor that it is given, which is then changed in place", source_of(node), "return a clone")


def prove_rules(graph: fx.Graph, connected: Set[fx.Node]) -> None:
    """Give every operator of a Function its rule. `connected` are the values that gradients flow through.

    Raises CaptureError for a Function whose forward or backward cannot be traced: what it does is then not known at all.
    """
    found: dict[Any, torch._ops.OpOverload] = {}
    for node in graph.nodes:
        way = kept(node.target)
        if way is None:
            continue
        values = [operand.meta["val"] if isinstance(operand, fx.Node) else operand for operand in node.args]
        flows = [operand in connected and bool(_is_float(value)) for operand, value in zip(node.args, values, strict=True)]
        examples = tuple(Example.of(value, flow) for value, flow in zip(values, flows, strict=True))
        key = (node.target, examples)
        if key not in found:
            try:
                found[key] = operator(proved(way, examples))
            except Untraceable as error:
                what = f"{way.function.__qualname__} is an autograd.Function that cannot be traced: {error}"
                refuse(what, source_of(node), "write its forward and backward with torch operations on what they are given")
        node.target = found[key]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
