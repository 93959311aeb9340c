"""The device mesh: named axes, coordinates, and the groups of ranks along an axis. No process group is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import InputError, caller

AXES = ("dp", "pp", "tp")


@dataclass(frozen=True, init=False)
class Mesh:
    """Data × pipeline × tensor parallel axes, outermost first.

    Axes nest dp, pp, tp (tensor ranks are neighbours) whatever order they are given in; a torch DeviceMesh keeps its own order. Raises
    InputError for a size that is no whole number of 1 or more.

    >>> Mesh(dp=2, tp=4).coordinates(5)
    {'dp': 1, 'pp': 0, 'tp': 1}
    """

    sizes: tuple[int, int, int]  # of dp, pp and tp
    order: tuple[str, ...]  # of the axes, outermost first

    def __init__(self, dp: int = 1, pp: int = 1, tp: int = 1, *, order: tuple[str, ...] = AXES) -> None:
        for axis, size in zip(AXES, (dp, pp, tp), strict=True):
            if not isinstance(size, int) or size < 1:
                raise InputError(
                    f"axis {axis} has size {size!r}",
                    at=f"Mesh({axis}={size!r})",
                    source=caller(),
                    fix=f"give {axis} a whole number of 1 or more",
                )
        object.__setattr__(self, "sizes", (dp, pp, tp))
        object.__setattr__(self, "order", order)

    @property
    def dp(self) -> int:
        """The number of replicas."""
        return self.sizes[0]

    @property
    def pp(self) -> int:
        """The number of ranks along the pipeline."""
        return self.sizes[1]

    @property
    def tp(self) -> int:
        """The number of tensor ranks."""
        return self.sizes[2]

    def axis(self, name: str) -> int:
        """The number of ranks along the axis `name`: "dp", "pp" or "tp"."""
        return self.sizes[AXES.index(name)]

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` on every axis: {"dp": 1, "pp": 0, "tp": 1}."""
        place = {}
        for name in reversed(self.order):
            rank, place[name] = divmod(rank, self.axis(name))
        return {name: place[name] for name in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these `coordinates`; an axis that is not named counts as 0."""
        rank = 0
        for name in self.order:
            rank = rank * self.axis(name) + coordinates.get(name, 0)
        return rank

    def group(self, axis: str, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The ranks that differ from these `coordinates` along one `axis` only."""
        return tuple(self.rank({**coordinates, axis: place}) for place in range(self.axis(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an `axis`, by their first rank. Built on request: compiling one rank never calls this."""
        return tuple(sorted({self.group(axis, self.coordinates(rank)) for rank in range(self.size)}))

    def __str__(self) -> str:
        return ",".join(f"{name}={self.axis(name)}" for name in self.order)

    @classmethod
    def of(cls, mesh: Mesh | DeviceMesh | str) -> Mesh:
        """`mesh` as a Mesh: itself, text such as "dp=2,pp=2,tp=2", or a DeviceMesh with named dimensions. Raises InputError for others."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, DeviceMesh):
            return cls._of_device_mesh(mesh)
        if not isinstance(mesh, str):
            raise InputError(f"{mesh!r} is no mesh", at="mesh", source=caller(), fix='write a mesh as "dp=2,pp=2,tp=2"')
        sizes: dict[str, int] = {}
        for part in filter(None, mesh.replace(" ", "").split(",")):
            match = re.fullmatch(r"([A-Za-z_]+)=(\d+)", part)
            if not match:
                raise InputError(f"{part!r} is not axis=size", at=f"mesh {mesh!r}", source=caller(), fix='write a mesh as "dp=2,pp=2,tp=2"')
            name = match[1]
            if name not in AXES:
                raise InputError(f"unknown mesh axis {name!r}", at=f"mesh {mesh!r}", source=caller(), fix="the axes are dp, pp and tp")
            if name in sizes:
                raise InputError(f"mesh axis {name!r} is given twice", at=f"mesh {mesh!r}", source=caller(), fix=f"give {name} once")
            sizes[name] = int(match[2])
        return cls(sizes.get("dp", 1), sizes.get("pp", 1), sizes.get("tp", 1))

    @classmethod
    def _of_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        names = mesh.mesh_dim_names
        if names is None or any(name not in AXES for name in names):
            raise InputError(
                f"the DeviceMesh's dimensions are named {names}",
                at="mesh",
                source=caller(),
                fix='use init_device_mesh(..., mesh_dim_names=("dp", "pp", "tp")), or a part of these names',
            )
        if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
            raise InputError(
                "the DeviceMesh does not hold the ranks 0, 1, 2, … in order",
                at="mesh",
                source=caller(),
                fix="use init_device_mesh without reordering ranks",
            )
        sizes = {"dp": 1, "pp": 1, "tp": 1} | dict(zip(names, mesh.mesh.shape, strict=True))
        missing = tuple(name for name in AXES if name not in names)
        return cls(sizes["dp"], sizes["pp"], sizes["tp"], order=missing + tuple(names))
