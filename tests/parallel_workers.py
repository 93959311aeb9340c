"""What the tests of data parallelism, clipping and optimizers run in real processes, beside the untouched model in every process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from parity_models import VOCABULARY, causal_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from training_workers import batch as labelled
from training_workers import gpt2, turning

import tpcompile
from tpcompile.inspect import memory as inspect_memory
from tpcompile.memory import Memory, memory
from tpcompile.mesh import Mesh
from tpcompile.precision import TYPES
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import connect
from tpcompile.runtime.scaling import START, Scaler, skipping

LR, EPS = 1e-2, 1e-6
KINDS = {"gpipe": "1f1b", "looped_bfs": "interleaved_1f1b", "interleaved_zero_bubble": "interleaved_1f1b", "dualpipev": "zbv"}
"""Schedules for which the compiler makes the same stages, on the same ranks."""


class Attention(nn.Module):
    """Four query heads that share one key/value head: two tensor ranks both hold it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (width, width // 4, width // 4))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (p(x).view(b, s, -1, width // 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return self.o(made.transpose(1, 2).reshape(b, s, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.attn, self.second = nn.RMSNorm(width), Attention(width), nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Llama's blocks in one type throughout, and a scalar parameter."""

    def __init__(self, width: int = 32, inner: int = 45, vocabulary: int = VOCABULARY, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)) * self.temperature
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())})


def llama() -> nn.Module:
    torch.manual_seed(5)
    return Llama().double()


def four_layers() -> nn.Module:
    """From which four stages can be cut."""
    torch.manual_seed(5)
    return Llama(layers=4).double()


def tied_four_layers() -> nn.Module:
    return gpt2(layers=4)


def gpt2_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """In the logits' own type, which transformers' loss is not."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch["targets"].flatten())


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Tensor] | None]] = {
    "llama": (llama, None),
    "gpt2": (gpt2, gpt2_loss),
    "llama of 4": (four_layers, None),
    "gpt2 of 4": (tied_four_layers, gpt2_loss),
    "turning": (turning, None),
}


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    data_parallel: str = "ddp"
    microbatches: int | None = None
    recompute: str = "none"
    schedule: str = "1f1b"
    backend: str | None = None

    def __str__(self) -> str:
        divided = f" m={self.microbatches}" if self.microbatches else ""
        again = f" recompute {self.recompute}" if self.recompute != "none" else ""
        through = f" {self.backend}" if self.backend else ""
        order = f" {self.schedule}" if self.schedule != "1f1b" else ""
        return f"{self.model} {self.mesh} {self.data_parallel}{divided}{again}{order}{through}"

    def made(self) -> nn.Module:
        return MODELS[self.model][0]()

    def batch(self, step: int) -> dict[str, Tensor]:
        if self.model == "turning":
            return labelled(length=7)
        rows = causal_batch()
        if MODELS[self.model][1] is None:
            return {name: value.roll(step, 0) for name, value in rows.items()}
        return {"input_ids": rows["input_ids"].roll(step, 0), "targets": rows["labels"].roll(step, 0)}

    def compiled(self, model: nn.Module, other: Compiled | None = None) -> Compiled:
        """`other` is the same case, but for what is the runtime's alone: what the compiler made serves both."""
        modes: dict[str, Any] = {"data_parallel": self.data_parallel, "recompute": self.recompute, "schedule": self.schedule}
        modes["backend"] = self.backend
        if other is None:
            settings: dict[str, Any] = {"loss": MODELS[self.model][1], "microbatches": self.microbatches}
            return tpcompile.compile(model, self.mesh, self.batch(0), **settings, **modes)
        found = Compiled(model, other.mesh, replace(other.options, **modes), None)
        found._compilations = list(other._compilations)
        return found

    def eager(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = MODELS[self.model][1]
        found: Tensor = loss(model(batch["input_ids"]), batch) if loss else model(**batch)["loss"]
        return found


@dataclass
class Found:
    """How far a rank was from one device; gradients and parameters as parts of the model's largest."""

    rank: dict[str, int]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loss_error: float = 0.0
    norm_error: float = 0.0
    evaluation_error: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)  # after clipping, in the last step
    parameters: dict[str, float] = field(default_factory=dict)  # after the last step


def whole(tensor: Tensor) -> Tensor:
    """What a rank holds of a tensor, put together from its replicas. Collective over dp."""
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def no_decay(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {"weight_decay": 0.1, "lr": LR / 2}


def train(case: Case, compiled: Compiled) -> Found:
    """Three steps of AdamW with clipping, a scheduler and groups; the second adds up the gradients of two batches, and evaluates."""
    alone = case.made()
    optimizer = compiled.optimizer(torch.optim.AdamW, no_decay, lr=LR, eps=EPS)
    named = list(alone.named_parameters())
    groups = [{"params": [p for name, p in named if no_decay(name, p) == kind], **kind} for kind in map(dict, _kinds(named))]
    reference = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, [lambda i: 0.5**i, lambda i: 0.9**i]) for o in (optimizer, reference)]
    pieces, found = compiled.program().parameters, Found(compiled.program().coordinates)
    for step in range(3):
        for part in range(2 if step == 1 else 1):
            loss = compiled.train_step(**case.batch(step + part))
            expected = case.eager(alone, case.batch(step + part))
            expected.backward()
            found.losses.append(loss.item())
            found.loss_error = max(found.loss_error, abs(loss.item() - expected.item()))
        if step == 1:
            evaluated, _ = compiled.eval_step(**case.batch(step + 2))
            found.evaluation_error = abs(evaluated.item() - case.eager(alone, case.batch(step + 2)).item())
        norm = compiled.clip_grad_norm_(0.05)
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        found.norms.append(norm.item())
        found.norm_error = max(found.norm_error, abs(norm.item() - expected.item()))
        largest = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None], float("inf")).item()
        found.norm_error = max(found.norm_error, abs(compiled.grad_norm(float("inf")).item() - largest))
        gradients = dict(alone.named_parameters())
        for name, p in compiled.named_parameters():
            error = whole(p.grad) - pieces[name].of(gradients[name].grad)
            found.gradients[name] = max(found.gradients.get(name, 0.0), _largest(error) / largest)
        for stepped in (optimizer, reference, *schedulers):
            stepped.step()
        optimizer.zero_grad()
        reference.zero_grad()
        assert all(p.grad is None for p in compiled.parameters())
    for name, p in compiled.named_parameters():
        found.parameters[name] = _largest(whole(p) - pieces[name].of(gradients[name].detach()))
    return found


def captures(case: Case, compiled: Compiled) -> Found:
    """Two captures of one model in turn: trained, evaluated, and called as an ordinary module where there is no pipeline."""
    alone, found = turning(), Found(compiled.program().coordinates)
    short, long = labelled(length=7), labelled(length=10, seed=1)
    pieces, named = compiled.program().parameters, dict(alone.named_parameters())
    optimizer, reference = compiled.optimizer(torch.optim.SGD, lr=LR), torch.optim.SGD(alone.parameters(), lr=LR)
    for again in (False, True):
        for rows in (short, long, short):
            expected = alone(**rows)["loss"]
            if again and compiled.mesh.pp == 1:
                loss = compiled(**rows)["loss"]
                loss.backward()
            else:
                loss = compiled.train_step(**rows)
            expected.backward()
            found.losses.append(loss.item())
            found.loss_error = max(found.loss_error, abs(loss.item() - expected.item()))
            for other in (long, short):
                evaluated, _ = compiled.eval_step(**other)
                error = abs(evaluated.item() - alone(**other)["loss"].item())
                found.evaluation_error = max(found.evaluation_error, error)
        if compiled.mesh.pp == 1:
            assert compiled(**long)["logits"].requires_grad, "what this has gathered does not hide the gradients"
        largest = max(_largest(p.grad) for p in alone.parameters())
        for name, p in compiled.named_parameters():
            found.gradients[name] = _largest(whole(p.grad) - pieces[name].of(named[name].grad)) / largest
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    for name, p in compiled.named_parameters():
        found.parameters[name] = _largest(whole(p) - pieces[name].of(named[name].detach()))
    found.norms.append(len(compiled._compilations))
    return found


def run_captures(cases: tuple[Case, ...]) -> list[Found]:
    found, compiled = [], None
    for case in cases:
        compiled = case.compiled(turning(), compiled)
        found.append(captures(case, compiled))
    return found


def by_parameter(case: Case) -> list[tuple[str, float]]:
    """Optimizers whose update needs whole parameters, where ranks hold whole ones: the worst parameter after three steps."""
    found, compiled = [], None
    for kinds in ((torch.optim.Adafactor,), (torch.optim.Muon, torch.optim.AdamW)):
        alone = case.made()
        compiled, named = case.compiled(case.made(), compiled), list(alone.named_parameters())
        steppers: list[torch.optim.Optimizer] = []
        for place, kind in enumerate(kinds):
            if len(kinds) == 1:
                takes = [True for _ in named]
            else:
                takes = [(p.ndim == 2) == (place == 0) for _, p in named]
            chosen = {name for (name, _), taken in zip(named, takes, strict=True) if taken}
            settings: dict[str, Any] = {"lr": LR} | ({"eps": (EPS, 1e-3)} if kind is torch.optim.Adafactor else {})
            steppers.append(compiled.optimizer(kind, lambda name, p, chosen=chosen: name in chosen and None, **settings))  # type: ignore[misc]
            steppers.append(kind([p for name, p in named if name in chosen], **settings))
        for step in range(3):
            compiled.train_step(**case.batch(step))
            case.eager(alone, case.batch(step)).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        errors = (_largest(whole(p) - alone.get_parameter(name).detach()) for name, p in compiled.named_parameters())
        found.append((kinds[0].__name__, max(errors)))
    return found


@dataclass
class Narrow:
    """A rank that computed in 16 bits, beside one device that casts its parameters likewise; errors as parts of the largest."""

    losses: list[float] = field(default_factory=list)
    loss_error: float = 0.0
    norm_error: float = 0.0
    gradients: float = 0.0
    scales: list[float | None] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)  # whether the step of the optimizer changed parameters
    types: frozenset[torch.dtype] = frozenset()
    parameters: dict[str, Tensor] = field(default_factory=dict)


def narrow(case: Case, precision: Any) -> Narrow:
    """Three steps of AdamW; the reference takes on the compiled parameters before each."""
    dtype, found = TYPES[precision], Narrow()
    model, alone = case.made().float(), case.made().float()
    settings: dict[str, Any] = {"data_parallel": case.data_parallel, "recompute": case.recompute, "loss": MODELS[case.model][1]}
    compiled = tpcompile.compile(model, case.mesh, case.batch(0), precision=precision, **settings)
    optimizer, reference = compiled.optimizer(torch.optim.AdamW, lr=LR, eps=EPS), torch.optim.AdamW(alone.parameters(), lr=LR, eps=EPS)
    pieces, named = compiled.program().parameters, dict(alone.named_parameters())
    for step in range(3):
        loss = compiled.train_step(**case.batch(step))
        cast = {name: p.to(dtype) for name, p in named.items()}
        expected = functional_call(alone, cast, (), case.batch(step))["loss"]
        scale = found.scales[-1] if found.scales else START if precision == "fp16" else None
        (expected.float() * (scale or 1.0)).backward()
        for p in named.values():
            assert p.grad is not None
            p.grad /= scale or 1.0
        found.losses.append(loss.item())
        found.loss_error = max(found.loss_error, abs(loss.item() - expected.item()))
        norm, own = compiled.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        finite = bool(norm.isfinite())
        if finite:
            found.norm_error = max(found.norm_error, abs(norm.item() / own.item() - 1))
            largest = max(_largest(p.grad) for p in named.values())
            for name, p in compiled.named_parameters():
                error = _largest(whole(p.grad) - pieces[name].of(named[name].grad)) / largest
                found.gradients = max(found.gradients, error)
        before = [whole(p).clone() for p in compiled.parameters()]
        optimizer.step()
        found.moved.append(not all(torch.equal(whole(p), old) for p, old in zip(compiled.parameters(), before, strict=True)))
        if finite:
            reference.step()
        found.types |= {p.grad.dtype for p in compiled.parameters() if p.grad is not None}
        optimizer.zero_grad()
        reference.zero_grad()
        found.scales.append(compiled.loss_scale)
    found.parameters = {name: whole(p).clone() for name, p in compiled.named_parameters()}
    return found


def run_narrow(cases: tuple[tuple[Case, str], ...]) -> list[Narrow]:
    return [narrow(case, precision) for case, precision in cases]


def one_overflows() -> list[tuple[float, bool, bool]]:
    """Three rounds, in the second of which the second rank's gradient is infinite: scales, and whether a step changes the parameter."""
    groups = connect(Mesh(dp=2), None, "")
    scaler, found = Scaler(groups), []
    p = nn.Parameter(torch.ones(3))
    optimizers = [skipping(torch.optim.SGD, scaler)([p], lr=1.0) for _ in range(2)]  # type: ignore[call-arg]
    for round in range(3):
        p.grad = torch.full((3,), float("inf") if round == 1 and groups.rank == 1 else scaler.scale.item())
        scaler.unscale([p])
        before = p.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        found.append((scaler.scale.item(), bool(torch.equal(p, before)), bool(torch.equal(p, before - 2))))
    return found


@dataclass(frozen=True)
class Bytes:
    """Bytes of all tensors that a step of AdamW left alive on a rank: of its parameters, gradients and state, and of everything."""

    mode: str
    replica: int
    parameters: int
    gradients: int
    optimizer: int
    alive: int
    expected: Memory


def sizes(modes: tuple[str, ...]) -> list[Bytes]:
    """What a rank of two replicas holds between steps of a model of 1.2 million parameters, beside the formulas."""
    found = []
    model, rows = Llama(width=160, inner=427, vocabulary=2003, layers=2), causal_batch()
    first = tpcompile.compile(model, "dp=2", rows)
    for mode in modes:
        before = _alive()
        compiled = Compiled(model, first.mesh, replace(first.options, data_parallel=mode), None)
        compiled._compilations = list(first._compilations)
        optimizer = compiled.optimizer(torch.optim.AdamW, lr=LR)
        for _ in range(2):
            optimizer.zero_grad()
            compiled.train_step(**rows)
            optimizer.step()
        replica = compiled.program().coordinates["dp"]
        state = [value for kept in optimizer.state.values() for value in kept.values() if value.ndim]
        parameters, grads = list(compiled.parameters()), [p.grad for p in compiled.parameters()]
        held = inspect_memory.held(first.compilation, first.compilation.stages[0], 0)
        counted = (sum(_storages(tensors).values()) for tensors in (parameters, grads, state))
        alive = sum(size for place, size in _alive().items() if place not in before)
        found.append(Bytes(mode, replica, *counted, alive, memory(held, mode, 2, replica)))
        del compiled, optimizer, parameters, grads, state
    return found


def _storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """The bytes of the memory that tensors lie in, each part once."""
    plain = [local(tensor.detach()) for tensor in tensors if tensor is not None]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}


def _alive() -> dict[int, int]:
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _kinds(named: list[tuple[str, nn.Parameter]]) -> list[tuple[tuple[str, float], ...]]:
    return list(dict.fromkeys(tuple(no_decay(name, p).items()) for name, p in named))


def _largest(error: Tensor) -> float:
    return error.abs().max().item() if error.numel() else 0.0


def run(cases: tuple[Case, ...]) -> list[Found]:
    """Several cases of one mesh, in the same processes."""
    made: dict[Case, Compiled] = {}
    found = []
    for case in cases:
        alike = replace(case, data_parallel="ddp", recompute="none", schedule=KINDS.get(case.schedule, case.schedule))
        compiled = case.compiled(case.made(), made.get(alike))
        made.setdefault(alike, compiled)
        found.append(train(case, compiled))
    return found


def through_backends(cases: tuple[Case, ...]) -> list[tuple[Found, int, int]]:
    """Of each case what `train` finds, how many graphs torch.compile made of it, and how often a graph ended before its end."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        made = train(case, case.compiled(case.made()))
        counted = torch._dynamo.utils.counters
        found.append((made, counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())))
    return found
