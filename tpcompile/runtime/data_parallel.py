"""Gradients averaged over the replicas.

    pp = 1   torch's DistributedDataParallel around the rank's module: reduction overlaps backward
    pp > 1   torch's `replicate` on the stage's root: the schedule reduces once, after the last micro-batch
             (DistributedDataParallel around a pipeline stage can leave gradients unsynchronised without a word)

Averaging what is already averaged changes nothing, so two steps before an optimizer step add up right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tpcompile.errors import TpcompileError
from tpcompile.ir import Program, Type
from tpcompile.layout import TensorType
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import StageRoot

Engine = StageRoot | DistributedDataParallel


def replicate_stage(root: StageRoot, groups: Groups) -> None:
    """Average a pipeline stage's gradients over dp from now on. Its parameters become DTensors, so it comes before any optimizer."""
    along = groups.along("dp")
    if groups.mesh.pp > 1 and along is not None and any(p.requires_grad for p in root.parameters()):
        replicate(root, mesh=along)


@contextmanager
def gradients_aside(root: StageRoot) -> Iterator[None]:
    """What earlier steps left in `.grad`, set aside while a schedule runs, and added back at its end.

    The first step of a new schedule sets the gradients of a `replicate` module to None, and shared weights are summed over stages.
    """
    aside = [(p, p.grad) for p in root.parameters() if p.grad is not None]
    for p, _ in aside:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for p, grad in aside:
                p.grad = grad if p.grad is None else p.grad + grad


def settle(root: StageRoot) -> None:
    """After a forward without backward: give the parameters back the form that the optimizer knows."""
    if isinstance(root, FSDPModule):
        root.reshard()


def distribute(root: StageRoot, groups: Groups, trained: frozenset[str]) -> Engine:
    """Without a pipeline: the module to call, whose backward averages over dp. `trained` get a gradient in every step."""
    group = groups.group("dp")
    if group is None or groups.mesh.pp > 1:
        return root
    named = list(root.named_own_parameters())
    for name, p in named:
        if name not in trained and p.requires_grad:
            _average_when_ready(p, group)
    kept = {p for name, p in named if name in trained and p.requires_grad}
    if not kept:
        return root
    ignored = [name for name, p in root.named_parameters(remove_duplicate=False) if p not in kept]
    ignored += [name for name, _ in root.named_buffers(remove_duplicate=False)]  # equal on all replicas, and stay so
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(root, process_group=group)


def _average_when_ready(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Average the gradient of a parameter that the loss does not reach, should the user's own loss do so."""

    def average(p: Tensor) -> None:
        assert p.grad is not None
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()

    parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]


def local(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_gradients(root: StageRoot, trained: frozenset[str]) -> None:
    """Raise for parameters that a step should have given a gradient, and did not."""
    without = [name for name, p in root.named_own_parameters() if name in trained and p.requires_grad and p.grad is None]
    if without:
        raise TpcompileError(
            f"no gradient after a step: {', '.join(without)}",
            at="compiled.train_step",
            fix="this is a fault of tpcompile or torch: please report it with the model and the mesh",
        )


def reached(program: Program) -> frozenset[str]:
    """The parameters, by qualified name, that have a gradient: a floating path to the loss, or to any output if there is no loss."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    open_nodes = [node for node in output.all_input_nodes if program.loss in (None, node.name)]
    seen = set(open_nodes)
    found = set()
    while open_nodes:
        node = open_nodes.pop()
        if node.name in program.parameters:
            found.add(program.parameters[node.name])
        if node.target is torch.ops.aten.detach.default:
            continue
        for source in node.all_input_nodes:
            if source not in seen and _is_floating(program.types.get(source.name)):
                seen.add(source)
                open_nodes.append(source)
    return frozenset(found)


def _is_floating(kind: Type | None) -> bool:
    """Whether a value can carry a gradient; unknown counts as yes."""
    parts: Iterable[object] = kind if isinstance(kind, tuple) else (kind,)
    return any(part is None or (isinstance(part, TensorType) and (part.dtype.is_floating_point or part.dtype.is_complex)) for part in parts)
