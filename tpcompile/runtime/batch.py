"""From the user's batch to what the stages take: names, the replica's rows, equal micro-batches.

compiled.train_step(input_ids=[8, 128], labels=[8, 128])      dp=2, microbatches=2

rows        0 1 2 3 4 5 6 7
replica     └──0──┘ └──1──┘      split_batches=True: every rank passes all rows and takes its replica's
micro-batch └0┘ └1┘ └0┘ └1┘
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tpcompile.errors import InputError, caller
from tpcompile.ir import Input, Program
from tpcompile.mesh import Mesh
from tpcompile.precision import narrowed

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Division:
    """How a batch's rows are divided: among replicas, and then into micro-batches."""

    replicas: int  # 1 where every rank passes its own rows
    microbatches: int
    pp: int

    @property
    def parts(self) -> int:
        return self.replicas * self.microbatches

    @classmethod
    def of(cls, mesh: Mesh, microbatches: int, split_batches: bool) -> Division:
        return cls(mesh.dp if split_batches else 1, microbatches, mesh.pp)


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Batch) -> dict[str, Any]:
    """Positional arguments of the model's forward, by name."""
    if not args:
        return dict(kwargs)
    names = [name for name, p in inspect.signature(forward).parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(names):
        raise InputError(
            f"forward takes {len(names)} positional arguments, {len(args)} were given",
            at=describe("", {f"argument {i}": value for i, value in enumerate(args)}),
            source=caller(),
            fix=f"pass at most {', '.join(names) or 'none'}",
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def leaves(batch: Batch) -> dict[str, Any]:
    """Everything in a batch by its path: {"past": [{"key": k}]} → {"past.0.key": k}."""
    found, _ = pytree.tree_flatten_with_path(dict(batch))
    return {".".join(_step(key) for key in path): leaf for path, leaf in found}


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def describe(method: str, batch: Batch) -> str:
    """compiled.train_step(input_ids=[10, 128])"""
    shown = ", ".join(f"{path}={_shape(leaf)}" for path, leaf in leaves(batch).items() if leaf is not None)
    return f"compiled.{method}({shown})" if method else f"({shown})"


def _shape(leaf: Any) -> str:
    return str(list(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf)


# ----------------------------------------------------------------------------- before there is a program


def example(batch: Batch, division: Division) -> dict[str, Any]:
    """A batch of the shape of one micro-batch, to capture the model with.

    Rows are taken to be the first dimension that most tensors share. The batch may be the whole one, one replica's, or one micro-batch.
    """
    rows = guess_rows(batch)
    if rows is None:
        return dict(batch)
    for parts in (division.parts, division.microbatches):
        if rows % parts == 0:
            return _cut(batch, rows, rows // parts)
    return dict(batch)


def guess_rows(batch: Batch) -> int | None:
    """The first dimension that most tensors share."""
    sizes = Counter(leaf.shape[0] for leaf in leaves(batch).values() if isinstance(leaf, Tensor) and leaf.ndim)
    return sizes.most_common(1)[0][0] if sizes else None


def _cut(batch: Batch, rows: int, wanted: int) -> dict[str, Any]:
    def cut(leaf: Any) -> Any:
        return leaf[:wanted] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows else leaf

    return dict(pytree.tree_map(cut, dict(batch)))


# ------------------------------------------------------------------------------------- with the program


def flatten(batch: Batch, inputs: Mapping[str, Input], call: str) -> dict[str, Tensor]:
    """The batch's tensors by placeholder name. Raises InputError naming what is missing or does not belong."""
    given = leaves(batch)
    lacking = [i.path for i in inputs.values() if not isinstance(given.get(i.path), Tensor)]
    if lacking:
        raise missing(lacking, call, loss=False)
    known = {i.path for i in inputs.values()}
    extra = [path for path, leaf in given.items() if isinstance(leaf, Tensor) and path not in known]
    if extra:
        raise InputError(
            f"the model was compiled without {_names(extra)}",
            at=call,
            source=caller(),
            fix=f"leave {'it' if len(extra) == 1 else 'them'} out, or pass {'it' if len(extra) == 1 else 'them'} in example_inputs",
        )
    return {name: given[i.path] for name, i in inputs.items()}


def missing(paths: list[str], call: str, *, loss: bool) -> InputError:
    """The error for inputs that a batch lacks."""
    one = len(paths) == 1
    if loss:
        fix = f"pass {_names(paths)}: the loss is computed from {'it' if one else 'them'}"
    else:
        fix = f"pass {_names(paths)}, or compile with example_inputs that leave {'it' if one else 'them'} out"
    return InputError(f"{_names(paths)} {'is' if one else 'are'} missing", at=call, source=caller(), fix=fix)


def is_target(path: str, forward: Callable[..., Any]) -> bool:
    """Whether an input serves the loss alone: named as labels or targets, or not an argument of the model's forward."""
    root, parameters = path.split(".")[0], inspect.signature(forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "label" in root.lower() or "target" in root.lower() or (root not in parameters and not open_ended)


def _names(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else ", ".join(paths[:-1]) + " and " + paths[-1]


def rows_of(tensors: Mapping[str, Tensor], inputs: Mapping[str, Input], call: str) -> int | None:
    """The number of rows that the batch's tensors share; None if no input has rows."""
    sizes = {inputs[n].path: t.shape[d] for n, t in tensors.items() if (d := inputs[n].batch_dim) is not None}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        what = f"the inputs do not have the same number of rows: {shown}"
        raise InputError(what, at=call, source=caller(), fix="pass equally many rows of every input")
    return next(iter(sizes.values()), None)


def check_rows(rows: int | None, division: Division, call: str) -> None:
    """Whether the rows divide among replicas and micro-batches."""
    if division.parts == 1 or (rows is not None and rows % division.parts == 0 and rows):
        return
    into = f"{division.microbatches} equal micro-batches"
    if division.replicas > 1:
        into = f"{division.replicas} replicas" + (f" of {into}" if division.microbatches > 1 else "")
    if rows is None:
        raise InputError(
            f"a batch without rows cannot be divided into {into}",
            at=call,
            source=caller(),
            fix="use dp=1 and microbatches=1, or inputs whose first dimension counts rows",
        )
    raise InputError(f"a batch of {rows} rows cannot be divided into {into}", at=call, source=caller(), fix=_row_fix(rows, division))


def _row_fix(rows: int, division: Division) -> str:
    """The nearest row counts, and the nearest numbers of micro-batches, that divide."""
    below, above = rows // division.parts * division.parts, -(-rows // division.parts) * division.parts
    fix = "use a batch of " + " or ".join(str(count) for count in dict.fromkeys((below, above or division.parts)) if count) + " rows"
    share, rest = divmod(rows, division.replicas)
    if rest:
        return fix
    fitting = [m for m in range(division.pp, share + 1) if share % m == 0]
    lower = [m for m in fitting if m < division.microbatches][-1:]
    higher = [m for m in fitting if m > division.microbatches][:1]
    if lower or higher:
        fix += ", or microbatches=" + " or ".join(str(m) for m in lower + higher)
    return fix


def part(tensors: Mapping[str, Tensor], dims: Mapping[str, int | None], index: int, count: int) -> dict[str, Tensor]:
    """One of `count` equal parts of the rows; tensors without rows go into every part."""
    return {name: _part(tensor, dims[name], index, count) for name, tensor in tensors.items()}


def _part(tensor: Tensor, dim: int | None, index: int, count: int) -> Tensor:
    if dim is None or count == 1:
        return tensor
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)


def structured(batch: Batch, program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The user's batch with some of its tensors replaced: the shape in which a model is captured."""
    by_path = {program.inputs[name].path: tensor for name, tensor in tensors.items()}
    found, spec = pytree.tree_flatten_with_path(dict(batch))
    parts = [by_path.get(".".join(_step(key) for key in path), leaf) for path, leaf in found]
    return dict(pytree.tree_unflatten(parts, spec))


def computing_in(batch: Batch, forward: Callable[..., Any], precision: str | None) -> Batch:
    """A batch whose floating inputs of forward are in the type that the model computes in; what serves the loss alone stays."""
    if precision is None:
        return batch
    found, spec = pytree.tree_flatten_with_path(dict(batch))

    def cast(path: str, leaf: Any) -> Any:
        stays = not isinstance(leaf, Tensor) or is_target(path, forward)
        return leaf if stays else leaf.to(narrowed(leaf.dtype, precision))

    return dict(pytree.tree_unflatten([cast(".".join(_step(key) for key in path), leaf) for path, leaf in found], spec))


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    return dict(pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(batch)))
