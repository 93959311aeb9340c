"""This process's place in the mesh, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcompile.errors import InputError, caller
from tpcompile.mesh import Mesh
from tpcompile.runtime.recorded import BACKEND


@dataclass(frozen=True)
class Groups:
    """A rank, its device, and torch's DeviceMesh. Without a process group there is one rank and no DeviceMesh."""

    mesh: Mesh
    rank: int
    device: torch.device
    devices: DeviceMesh | None

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along an axis through this one; None where this rank is alone on it."""
        if self.devices is None or self.mesh.axis(axis) == 1:
            return None
        return self.devices.get_group(axis)

    def along(self, axis: str) -> DeviceMesh | None:
        """The one-dimensional DeviceMesh along an axis; None where this rank is alone on it."""
        if self.devices is None or self.mesh.axis(axis) == 1:
            return None
        return self.devices[axis]

    @property
    def names(self) -> dict[str, str]:
        """Group names by axis, for the collectives of an emitted module."""
        found = {axis: self.group(axis) for axis in ("dp", "pp", "tp")}
        return {axis: group.group_name for axis, group in found.items() if group is not None}

    def at_place(self, place: int) -> int:
        """The rank at a place along the pipeline and this rank's other coordinates."""
        return self.mesh.rank({**self.coordinates, "pp": place})

    def holders(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the ranks at these places along the pipeline and this rank's other coordinates; None if it is none of them.

        Collective: every rank calls it with the same places.
        """
        if len(places) == self.mesh.pp:
            return self.group("pp")
        mine = None
        for ranks in self.mesh.groups("pp"):
            held = [ranks[place] for place in places]
            group = dist.new_group(held)
            if self.rank in held:
                mine = group
        return mine


def connect(mesh: Mesh, devices: DeviceMesh | None, call: str) -> Groups:
    """Lay the mesh over the processes that run; `devices` is the user's own DeviceMesh, if the mesh came from one.

    Collective. Raises InputError when the number of processes is not the mesh's.
    """
    if not dist.is_available() or not dist.is_initialized():
        if mesh.size == 1:
            return Groups(mesh, 0, _own_device(None), None)
        raise InputError(
            f"mesh {mesh} needs {mesh.size} processes, and no process group is initialised",
            at=call,
            source=caller(),
            fix=f"start with torchrun --nproc-per-node {mesh.size} and call torch.distributed.init_process_group(), "
            f"or use tpcompile.launch(fn, mesh)",
        )
    world = dist.get_world_size()
    if world != mesh.size:
        raise InputError(
            f"mesh {mesh} needs {mesh.size} processes, {world} are running",
            at=call,
            source=caller(),
            fix=f"start {mesh.size} processes (torchrun --nproc-per-node {mesh.size}), or use a mesh whose sizes multiply to {world}",
        )
    device = _own_device(devices)
    if devices is None:
        sizes = tuple(mesh.axis(axis) for axis in mesh.order)
        devices = init_device_mesh(device.type, sizes, mesh_dim_names=mesh.order)
    return Groups(mesh, dist.get_rank(), device, devices)


def _own_device(devices: DeviceMesh | None) -> torch.device:
    """The device of this process: of the user's DeviceMesh, else the current GPU if the process group can use it."""
    if devices is not None:
        kind = devices.device_type
    else:
        takes = dist.get_backend_config() if dist.is_initialized() and torch.cuda.is_available() else ""
        kind = "cuda" if "nccl" in takes or f"cuda:{BACKEND}" in takes else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
