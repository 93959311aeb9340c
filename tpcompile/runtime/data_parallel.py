"""Gradients averaged over the replicas, and what of the training state the replicas share out.

            a rank holds, between steps          pp = 1                                  pp > 1
    ddp     all that is its stage's              DistributedDataParallel                 `replicate` on the stage's root
    zero1   its part of the optimizer's state    the same, and `runtime.zero1`           the same, and `runtime.zero1`
    zero2   its part of everything               `fully_shard` of layers and root, whose parameters stay gathered from the first
                                                 forward of a step to the end of its backward
    zero3   its part of everything               `fully_shard`; layers' parameters are gathered for forward and again for backward

With a pipeline the schedule reduces once, after the last micro-batch (DistributedDataParallel around a pipeline stage can leave
gradients unsynchronised without a word). Schedules that divide backward in two find no gradients where layers are gathered again: for
them zero3 gathers as zero2 does.

Averaging what is already averaged changes nothing, so two steps before an optimizer step add up right.
Source of the three stages: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), §5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tpcompile.errors import InputError, Refused, TpcompileError, caller
from tpcompile.ir import Program, Type
from tpcompile.layout import TensorType
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import Root, StageRoot
from tpcompile.sharing import SHARED_OUT, gathers_again

Engine = Root | DistributedDataParallel

MODES = ("ddp", "zero1", "zero2", "zero3")


def check_mode(mode: str) -> str:
    """Raises InputError for a mode of data parallelism that there is not."""
    if mode not in MODES:
        fix = f"use {', '.join(MODES[:-1])} or {MODES[-1]}"
        raise InputError(f"there is no data_parallel {mode!r}", at=f"compile(data_parallel={mode!r})", source=caller(), fix=fix)
    return mode


def share_out(root: StageRoot, groups: Groups, mode: str, schedule: str, units: Sequence[nn.Module]) -> None:
    """Let torch's engine hold this rank's part of a stage, and average its gradients over dp, from now on.

    Parameters that it takes become DTensors, so it comes before any optimizer. Those without dimensions cannot be cut: see `distribute`.
    """
    along, taken = groups.along("dp"), [p for p in root.parameters() if p.ndim]
    if along is None or not any(p.requires_grad for p in taken) or (mode not in SHARED_OUT and groups.mesh.pp == 1):
        return
    if len({p.dtype for p in taken if p.requires_grad}) > 1:
        raise Refused(
            "torch's engine reduces gradients of one type together, and trained parameters have several",
            at=f"compile(data_parallel={mode!r}, mesh {groups.mesh})",
            fix='give all trained parameters one type, or use pp=1 with data_parallel="ddp"',
        )
    ignored = {p for p in root.parameters() if not p.ndim}
    if mode not in SHARED_OUT:
        replicate(root, mesh=along, ignored_params=ignored)
        return
    again = gathers_again(mode, schedule, groups.mesh.pp)
    for unit in units:
        fully_shard(unit, mesh=along, reshard_after_forward=again, ignored_params=ignored)
    fully_shard(root, mesh=along, reshard_after_forward=False, ignored_params=ignored)
    root.gathered = (root,) if again else (root, *units)


def reduce_now(engine: Engine, now: bool) -> None:
    """Whether the next backward of a shared-out stage reduces gradients, or leaves them whole for a later one.

    What stays gathered after forward stays so until then.
    """
    for place, module in enumerate(engine.gathered if isinstance(engine, StageRoot) else ()):
        if place == 0:
            module.set_is_last_backward(now)
            module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now, recurse=False)


def average_rest(root: Root, groups: Groups, trained: frozenset[str]) -> None:
    """After the micro-batches: average over dp what the engine does not take, a scalar. Collective over dp."""
    group = None if groups.mesh.pp == 1 and not isinstance(root, FSDPModule) else groups.group("dp")
    if group is None:
        return
    for name, p in root.named_own_parameters():
        if name in trained and not p.ndim and p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


@contextmanager
def rest_averaged_once(root: StageRoot, groups: Groups, trained: frozenset[str]) -> Iterator[None]:
    """Around the micro-batches of a step without a pipeline: the same at their end, in place of once for each."""
    root.averages = False
    try:
        yield
    finally:
        root.averages = True
    average_rest(root, groups, trained)


@contextmanager
def gradients_aside(root: Root) -> Iterator[None]:
    """What earlier steps left in `.grad`, set aside while a schedule runs, and added back at its end.

    The first step of a new schedule sets the gradients of a `replicate` module to None, and shared weights are summed over stages.
    """
    aside = [(p, p.grad.clone()) for p in root.parameters() if p.grad is not None]  # torch may reuse the memory for the next ones
    for p, _ in aside:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for p, grad in aside:
                p.grad = grad if p.grad is None else p.grad + grad


def settle(root: Root) -> None:
    """Drop what is gathered: after a forward without backward, and before the next step reads the parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def distribute(root: Root, groups: Groups, trained: frozenset[str]) -> Engine:
    """Without a pipeline: the module to call, whose backward averages over dp. `trained` get a gradient in every step."""
    group = groups.group("dp")
    if group is None or groups.mesh.pp > 1:
        return root
    named = list(root.named_own_parameters())
    if isinstance(root, FSDPModule):
        for _, p in named:
            if p.requires_grad and not p.ndim:
                _average_when_ready(p, group, root)
        return root
    for name, p in named:
        if name not in trained and p.requires_grad:
            _average_when_ready(p, group, root)
    kept = {p for name, p in named if name in trained and p.requires_grad}
    if not kept:
        return root
    ignored = [name for name, p in root.named_parameters(remove_duplicate=False) if p not in kept]
    ignored += [name for name, _ in root.named_buffers(remove_duplicate=False)]  # equal on all replicas, and stay so
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(root, process_group=group, gradient_as_bucket_view=True)


def _average_when_ready(parameter: nn.Parameter, group: dist.ProcessGroup, root: Root) -> None:
    """Average the gradient of a parameter that no engine takes: the loss does not reach it, and the user's own might; or it is a scalar.

    A step averages it once, at its end.
    """

    def average(p: Tensor) -> None:
        assert p.grad is not None
        if isinstance(root, StageRoot) and not root.averages:
            return
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()

    parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]


def local(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_gradients(root: Root, trained: frozenset[str]) -> None:
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
