"""What a rank of real processes holds, beside what `explain()` says: the storages that are there, and what autograd keeps in a step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import checkpoint

import tpcompile
from tpcompile.inspect.load import Load
from tpcompile.models import Sizes, load
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.data_parallel import local


@dataclass(frozen=True)
class Case:
    model: str  # as `tpcompile.models.load` takes it
    mesh: str
    data_parallel: str = "ddp"
    recompute: str = "none"
    schedule: str = "1f1b"
    microbatches: int | None = None
    rows: int = 8
    sequence: int = 64

    def __str__(self) -> str:
        again = f" recompute {self.recompute}" if self.recompute != "none" else ""
        return f"{self.data_parallel}{again}" + (f" {self.schedule} m={self.microbatches}" if "pp" in self.mesh else "")


@dataclass(frozen=True)
class Bytes:
    """Of one rank. All but the first three are the most that there is at once in a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    unreduced: int
    allocated: int = 0  # by torch, on a GPU


@dataclass(frozen=True)
class Found:
    """A rank's place along the pipeline, and its bytes: stated for the tensor rank and the replica that hold most, and measured."""

    place: int
    stated: Bytes
    measured: Bytes


def jobs(cases: tuple[Case, ...]) -> list[Found]:
    """Several cases of one mesh, in the same processes."""
    return [of(case) for case in cases]


def of(case: Case) -> Found:
    """The third step of AdamW, when everything is there that will be."""
    model, batch = load(case.model, Sizes(case.rows, case.sequence))
    settings: dict[str, Any] = {name: getattr(case, name) for name in ("data_parallel", "recompute", "schedule", "microbatches")}
    compiled = tpcompile.compile(model.train(), case.mesh, batch, **settings)
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-4)
    for _ in range(2):
        compiled.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    gpu = torch.cuda.is_available() and next(compiled.parameters()).is_cuda
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with watched(root_of(compiled)) as most:
        compiled.train_step(**batch)
    parameters, every = list(compiled.parameters()), list(root_of(compiled).parameters())  # of all stages, also those that share one
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor) and value.ndim]
    held = (total(some) for some in ([*parameters, *every], [p.grad for p in parameters], state))
    measured = Bytes(*held, most["kept"], most["gathered"], most["unreduced"], torch.cuda.max_memory_allocated() if gpu else 0)
    place = Load(compiled.compilation).places[compiled.mesh.coordinates(dist.get_rank())["pp"]]
    one = place.state
    stated = Bytes(one.parameters, one.gradients, one.optimizer, place.activations, one.gathered, one.unreduced, place.most)
    return Found(place.place, stated, measured)


def root_of(compiled: Compiled) -> nn.Module:
    assert compiled._engine is not None
    return compiled._engine.root


# ------------------------------------------------------------------------------------------------- storages


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """The bytes of the memory that tensors lie in, each part once."""
    plain = [local(tensor.detach()) for tensor in tensors if tensor is not None]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}


def total(tensors: Iterable[Tensor | None]) -> int:
    return sum(storages(tensors).values())


class Holder:
    """What autograd is given in a tensor's place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """The most that a module's steps keep for backward at once, and that torch's engines have gathered and not yet reduced.

    Autograd gets a holder for everything that it saves; when it drops that, the storage counts no more, unless another holder is left.
    What a layer saves that runs again is in nobody's hooks but torch's own: there it counts as long as torch's copy of the tensor.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root, self.most, self.now = root, Counter[str](), 0
        self.holders = Counter[int]()

    def pack(self, tensor: Tensor) -> Tensor | Holder:
        self.look()
        if self.is_own(tensor):
            return tensor
        holder = Holder(tensor.detach())  # an operation's own result would otherwise keep the operation, and that the holder
        self.keep(tensor, holder)
        return holder

    def unpack(self, packed: Tensor | Holder) -> Tensor:
        self.look()
        return packed.tensor if isinstance(packed, Holder) else packed

    def again(self, tensor: Tensor, kept: Tensor) -> Tensor:
        """Saved by a layer that runs again: what torch keeps in its place."""
        if not self.is_own(tensor):
            self.keep(tensor, kept)
        return kept

    def keep(self, tensor: Tensor, until: object) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.holders[key] += 1
        self.now += size if self.holders[key] == 1 else 0
        self.most["kept"] = max(self.most["kept"], self.now)
        weakref.finalize(until, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        self.now -= size if self.holders[key] == 0 else 0

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a parameter or a buffer, also of one that is gathered just now."""
        return tensor.untyped_storage()._cdata in storages([*self.root.parameters(), *self.root.buffers()])

    def look(self) -> None:
        """Note what torch's engines have gathered, and what gradients wait whole."""
        groups = [group for one in self.root.modules() if isinstance(one, FSDPModule) for group in one._get_fsdp_state()._fsdp_param_groups]
        held = [p for group in groups for p in group.fsdp_params]
        own = storages(p.sharded_param for p in held)
        ahead = [group._all_gather_result.all_gather_output for group in groups if group._all_gather_result is not None]
        gathered = storages([*ahead, *(tensor for p in held for tensor in p.all_gather_outputs)])
        waiting = storages(grad for p in held for grad in whole_gradients(p))
        self.most["gathered"] = max(self.most["gathered"], sum(size for key, size in gathered.items() if key not in own))
        self.most["unreduced"] = max(self.most["unreduced"], sum(waiting.values()))


def whole_gradients(parameter: Any) -> Iterator[Tensor | None]:
    yield parameter.unsharded_accumulated_grad
    if hasattr(parameter, "_unsharded_param"):
        yield parameter._unsharded_param.grad


@contextmanager
def watched(root: nn.Module) -> Iterator[Counter[str]]:
    """Around steps: the most that there is at once."""
    watch = Watch(root)

    class Again(checkpoint._recomputation_hook):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: watch.again(tensor, pack(tensor))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(checkpoint, "_recomputation_hook", Again))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack))
        yield watch.most
