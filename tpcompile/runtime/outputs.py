"""From what the last stage returns to the output of the user's model, in its own type."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tpcompile.ir import Program
from tpcompile.layout import Size, TensorType
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.step import mean_over_replicas


def rebuild(program: Program, values: tuple[Tensor, ...]) -> Any:
    """The user's output object. With a loss of the user's own, which stands in no output, only the outputs."""
    by_name = dict(zip(program.returned(), values, strict=True))
    found = [by_name[name] if name is not None else program.output_constants.get(i) for i, name in enumerate(program.outputs)]
    return pytree.tree_unflatten(found, program.out_spec)


class _Reported(torch.autograd.Function):
    """The whole batch's loss in forward; in backward the replica's own, which the data-parallel engine averages."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, groups: Groups) -> Tensor:
        return mean_over_replicas(loss, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def whole_loss(program: Program, values: tuple[Tensor, ...], groups: Groups) -> tuple[Tensor, ...]:
    """Outputs whose loss is that of the whole batch, over all replicas. Collective over dp."""
    if program.loss is None or groups.mesh.dp == 1:
        return values
    loss: Tensor = _Reported.apply(values[0], groups)  # type: ignore[no-untyped-call]
    return loss, *values[1:]


def merge(program: Program, chunks: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The outputs of micro-batches as those of the replica's rows: the loss is summed, rows follow each other."""
    merged = []
    for index, (name, parts) in enumerate(zip(program.returned(), zip(*chunks, strict=True), strict=True)):
        if index == 0 and name == program.loss:
            merged.append(torch.stack(parts).sum(0))
        else:
            dim = row_dim(program, name)
            merged.append(parts[0] if dim is None else torch.cat(parts, dim))
    return tuple(merged)


def row_dim(program: Program, name: str) -> int | None:
    """The dimension of a value that counts the batch's rows; where capture fixed their number, only the first can."""
    kind = program.types[name]
    if not isinstance(kind, TensorType):
        return None
    rows = {_size(program, placeholder, i.batch_dim) for placeholder, i in program.inputs.items() if i.batch_dim is not None}
    symbols = set().union(*(size.free_symbols for size in rows if not isinstance(size, int)))
    for dim, size in enumerate(kind.shape):
        if size in rows and dim == 0 if isinstance(size, int) else size.free_symbols & symbols:
            return dim
    return None


def _size(program: Program, placeholder: str, dim: int) -> Size:
    kind = program.types[placeholder]
    assert isinstance(kind, TensorType)
    return kind.shape[dim]


def to_every_rank(values: tuple[Tensor, ...], groups: Groups, last: int) -> tuple[Tensor, ...]:
    """The last stage's outputs, from its place along the pipeline, on every rank. Collective over pp."""
    pipeline = groups.group("pp")
    if pipeline is None:
        return values
    source = groups.at_place(last)
    kinds: list[Any] = [[(tuple(value.shape), value.dtype) for value in values]]
    dist.broadcast_object_list(kinds, src=source, group=pipeline)
    here = groups.rank == source
    sent = []
    for index, (shape, dtype) in enumerate(kinds[0]):
        value = values[index].contiguous() if here else torch.empty(shape, dtype=dtype, device=groups.device)
        dist.broadcast(value, src=source, group=pipeline)
        sent.append(value)
    return tuple(sent)
