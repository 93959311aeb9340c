"""What ranks do with programs on disk; `launch` imports these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.export.aoti import load_aoti, own_groups, registered
from tpcompile.export.check import run_stages, whole_inputs
from tpcompile.export.read import Saved


def trained(compiled: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Steps of AdamW: the losses, this rank's parameters after, and the outputs for the last batch."""
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for batch in batches:
        losses.append(compiled.train_step(**batch))
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    return {"losses": losses, "parameters": parameters, "loss": compiled.eval_step(**batches[-1]).loss}


def emitted_trained(model: nn.Module, mesh: str, batches: list[dict[str, Tensor]], directory: str, options: dict[str, Any]) -> bool:
    """Whether a program that is written after training has the trained weights, and the model its own."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = tpcompile.compile(model, mesh, batches[0], **options)
    trained(compiled, batches)
    compiled.emit(directory)
    torch.distributed.barrier()
    loaded = tpcompile.load(directory)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    mine, theirs = compiled.full_state_dict(everywhere=True), loaded.full_state_dict(everywhere=True)
    changed = [name for name, value in mine.items() if value.is_floating_point() and not torch.equal(value, before[name])]
    return len(changed) > 10 and mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def both(model: nn.Module, mesh: str, batches: list[dict[str, Tensor]], directory: str, options: dict[str, Any]) -> bool:
    """Whether the program in memory and the one on disk do the same, to the last bit."""
    torch.manual_seed(3)
    memory = trained(tpcompile.compile(model, mesh, batches[0], **options), batches)
    torch.manual_seed(3)
    disk = trained(tpcompile.load(directory), batches)
    assert memory["parameters"].keys() == disk["parameters"].keys()
    equal = all(torch.equal(a, disk["parameters"][name]) for name, a in memory["parameters"].items())
    return equal and torch.equal(torch.stack(memory["losses"]), torch.stack(disk["losses"])) and torch.equal(memory["loss"], disk["loss"])


def packaged(directory: str, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The outputs of AOTInductor's packages, for each batch."""
    saved, rank = Saved.open(directory), torch.distributed.get_rank()
    with registered(own_groups(saved, rank)):
        return [run_stages(saved, rank, "aoti", {}, whole_inputs(saved, batch)) for batch in batches]


def packaged_often(directory: str, x: Tensor, times: int) -> Tensor:
    """The last output of a package that runs so many times, each output dropped before the next."""
    saved, rank = Saved.open(directory), torch.distributed.get_rank()
    with registered(own_groups(saved, rank)):
        package = load_aoti(saved, f"rank_{rank:03d}.aoti.pt2")
        torch.distributed.barrier()
        for _ in range(times):
            (made,) = package(x=x)
    return made
