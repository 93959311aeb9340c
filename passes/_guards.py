"""When a capture serves another batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tpcompile.ir import Guards, Program
from tpcompile.layout import Size, TensorType
from tpcompile.passes import _binding as binding
from tpcompile.passes._symbols import Symbols


def guards_of(model: nn.Module, exported: ExportedProgram, symbols: Symbols, leaves: Mapping[str, Any]) -> Guards:
    """What export took for granted, in our symbols."""
    ranges: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for theirs, bounds in exported.range_constraints.items():
        if (ours := symbols.names.get(theirs)) is not None:
            low, high = ranges.get(ours, (2, None))
            upper = int(bounds.upper) if bounds.upper.is_Integer else None
            ranges[ours] = max(low, int(bounds.lower)), min(upper, high) if upper is not None and high is not None else upper or high
    environment = _shape_env(exported)
    conditions = {guard.expr.xreplace(symbols.names): None for guard in environment.guards} if environment else {}
    return Guards(
        *_modes(model),
        {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Tensor)},
        ranges,
        tuple(condition for condition in conditions if condition is not sympy.true and condition.free_symbols <= set(symbols.places)),
    )


def _shape_env(exported: ExportedProgram) -> ShapeEnv | None:
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _modes(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    training = frozenset(name for name, module in model.named_modules() if module.training)
    return training, frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def matches(program: Program, batch: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether a program computes the model for a batch: same structure, types and mode, and sizes that its symbols may have."""
    guards = program.guards
    return guards is not None and _modes(model) == (guards.training, guards.trained) and suits(program, batch)


def suits(program: Program, batch: Mapping[str, Any]) -> bool:
    """Whether a batch has the structure, the types and the sizes that a program is for."""
    guards = program.guards
    if guards is None:
        return False
    leaves = dict(binding.leaves(batch)[0])
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    rest = {path: leaf for path, leaf in leaves.items() if path not in tensors}
    if tensors.keys() != {i.path for i in program.inputs.values()} or rest != guards.leaves:
        return False
    given = {name: tensors[i.path] for name, i in program.inputs.items()}
    values: dict[Any, Any] = {s: given[name].shape[dim] if dim < given[name].ndim else 0 for s, (name, dim) in program.symbols.items()}
    return all(_fits(program.types[name], tensor, values) for name, tensor in given.items()) and _hold(guards, values)


def other_path(program: Program, tensors: Mapping[str, Tensor], rows: int) -> str:
    """What a program takes for granted and does not hold for so many rows, of which `tensors` are some; "" if all of it does."""
    if program.guards is None:
        return ""
    values: dict[Any, int] = {}
    for size, (name, dim) in program.symbols.items():
        values[size] = rows if dim == program.inputs[name].batch_dim else tensors[name].shape[dim]
    for size, value in values.items():
        low, high = program.guards.ranges.get(size, (2, None))
        if value < low or (high is not None and value > high):
            return f"{low} <= {size}" if value < low else f"{size} <= {high}"
    return next((str(condition) for condition in program.guards.conditions if not _holds(condition, tuple(values.items()))), "")


def _fits(kind: Any, tensor: Tensor, values: dict[Any, Any]) -> bool:
    assert isinstance(kind, TensorType)
    if tensor.dtype != kind.dtype or tensor.ndim != len(kind.shape):
        return False
    return all(_size(size, values) == given for size, given in zip(kind.shape, tensor.shape, strict=True))


def _size(size: Size, values: dict[Any, Any]) -> Any:
    """A size in a batch; that of a symbol is looked up, which every step does for every input."""
    if isinstance(size, int):
        return size
    return values[size] if size in values else size.subs(values)


def _hold(guards: Guards, values: dict[Any, Any]) -> bool:
    for name, value in values.items():
        low, high = guards.ranges.get(name, (2, None))
        if value < low or (high is not None and value > high):
            return False
    return all(_holds(condition, tuple(values.items())) for condition in guards.conditions)


@lru_cache(maxsize=1024)
def _holds(condition: sympy.Basic, values: tuple[tuple[sympy.Symbol, int], ...]) -> bool:
    """Whether a condition holds for these sizes; kept, since steps have the same sizes again and again."""
    return bool(condition.subs(dict(values)))
