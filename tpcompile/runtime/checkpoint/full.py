"""Back to the original model: whole tensors on the CPU, under the names of its own state dict."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from tpcompile.runtime.checkpoint.boxes import Box, shared_out
from tpcompile.runtime.checkpoint.shares import Running, Share, of_buffers, of_parameters
from tpcompile.runtime.checkpoint.together import alone, on_first, rank


@torch.no_grad()
def full_state_dict(running: Running, *, everywhere: bool) -> dict[str, Tensor]:
    """Every parameter and saved buffer, whole, on the CPU: on rank 0, or on all ranks. Collective; each element is sent once."""
    shares = {share.name: share for share in (*of_parameters(running), *of_buffers(running))}
    whole: dict[str, Tensor] = {}
    held = [{name: (share.shape, share.tensor.dtype, [part.box for part in share.parts]) for name, share in shares.items()}]
    if not alone():
        held *= dist.get_world_size()
        dist.all_gather_object(held, held[0])
    kinds = {name: (shape, dtype) for own in held for name, (shape, dtype, _) in own.items()}
    if everywhere or rank() == 0:
        whole = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    boxes = [{name: found for name, (_, _, found) in own.items()} for own in held]
    for source, writes in enumerate(shared_out(boxes, {name: dtype.itemsize for name, (_, dtype) in kinds.items()})):
        for name, box in writes:
            _send(running.engine.groups.device, shares.get(name), whole.get(name), box, source, kinds[name][1], everywhere)
    first = running.first_names
    names = [name for name in running.model.state_dict(keep_vars=True) if name in first]
    return {name: whole[f"model.{first[name]}"] for name in names if f"model.{first[name]}" in whole}


def _send(
    device: torch.device, share: Share | None, whole: Tensor | None, box: Box, source: int, dtype: torch.dtype, everywhere: bool
) -> None:
    """One box from the rank that sends it to rank 0, or to all."""
    here = rank()
    if here == source:
        assert share is not None
        (inside,) = (part for part in share.parts if part.box.meet(box) == box)
        value = inside.local(box).of(share.tensor).contiguous()
    elif everywhere or here == 0:
        value = torch.empty(box.size, dtype=dtype, device=device)
    else:
        return
    if everywhere and not alone():
        dist.broadcast(value, src=source)
    elif source != 0:
        dist.send(value, dst=0) if here == source else dist.recv(value, src=source)
    if whole is not None:
        box.of(whole).copy_(value)


def save_pretrained(running: Running, directory: Path) -> None:
    """Write the original model's weights: through its own `save_pretrained`, if it has one, else as `model.safetensors`. Collective."""
    state = full_state_dict(running, everywhere=False)
    on_first(lambda: _write(running.model, state, directory))


def _write(model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    own = getattr(model, "save_pretrained", None)
    if callable(own):
        own(str(directory), state_dict=state)
        return
    directory.mkdir(parents=True, exist_ok=True)
    once = {id(tensor): name for name, tensor in reversed(state.items())}
    save_file(
        {name: tensor for name, tensor in state.items() if once[id(tensor)] == name}, directory / "model.safetensors", {"format": "pt"}
    )
