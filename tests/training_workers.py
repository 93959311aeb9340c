"""What the training tests run in real processes: compiled models, beside the untouched model in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import captured_once
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.runtime.compiled import Compiled
from tpcompile.testing import exact_dropout

Batch = dict[str, Tensor]
VOCABULARY, LR = 91, 1e-2
transformers.logging.set_verbosity_error()


# --------------------------------------------------------------------------------------------- models and batches


def gpt2(dropout: float = 0.0, recomputes: bool = False, layers: int = 2) -> nn.Module:
    """Five heads and 91 words, so that nothing divides by two. The embedding and the head are one weight."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=40, n_layer=layers, n_head=5, **rates)
    model = _made(transformers.GPT2LMHeadModel, config)
    if recomputes:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def llama(layers: int = 2) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 91, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


def bert() -> nn.Module:
    sizes = {"hidden_size": 48, "intermediate_size": 71, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return _made(transformers.BertForMaskedLM, transformers.BertConfig(vocab_size=VOCABULARY, **sizes, **rates))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(Config(vocab_size=VOCABULARY, layers=2, heads=3, hidden=48, inner=95)).double()


class Turning(GPT):
    """Computes something else for long sequences, so that no single capture serves both."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if input_ids.shape[1] > 8:
            input_ids = input_ids.flip(1)
        return super().forward(input_ids, labels)


def turning() -> nn.Module:
    torch.manual_seed(0)
    return Turning(Config(vocab_size=VOCABULARY, layers=2, heads=3, hidden=48, inner=95)).double()


class Again(nn.Module):
    """One layer three times and no list of layers. What is chosen before it is used behind it: whole numbers and truths cross."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.score, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, 95), nn.Linear(95, hidden)
        self.head = nn.Linear(3, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.score(self.embed(input_ids))
        chosen, seen, x = scores.topk(3, -1).indices, scores < -0.2, scores.transpose(1, 2)
        for _ in range(3):
            x = x + self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)
        picked = x.transpose(1, 2).masked_fill(seen, 0.5).gather(-1, chosen)
        logits = self.head(picked)
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())})


def again() -> nn.Module:
    torch.manual_seed(0)
    return Again().double()


def _made(kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(config).double()


def batch(rows: int = 8, length: int = 7, seed: int = 0, labels: str = "labels") -> Batch:
    """Row i has i - 2 labels, as far as there are columns: the first three have none."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, VOCABULARY, (2, rows, length), generator=generator)
    kept = torch.arange(length)[None] < torch.arange(rows)[:, None] - 2
    return {"input_ids": ids, labels: targets.where(kept, -100)}


def double_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A mean loss in the logits' own type, of targets that the model's forward does not know."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch["targets"].flatten())


def several_losses(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Means over labels, over all places and over rows, a sum by rows, and a number: terms of four counts."""
    scores, labels = outputs.logits, batch["targets"]
    mask = labels != -100
    each = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    by_row = (each.sum(1) / mask.sum(1).clamp(min=1)).mean() + (scores.logsumexp(-1) * mask).sum() / scores.shape[0]
    return double_loss(outputs, batch) + 1e-2 * scores.logsumexp(-1).square().mean() + 0.1 * by_row + 0.5


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    mesh: str
    schedule: str = "1f1b"
    microbatches: int | None = None
    exact: bool = True  # float64 throughout; else the model casts to float32 somewhere
    loss: Callable[..., Tensor] | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    lengths: tuple[int, ...] = (7, 7, 10)
    dropout: str = "local"
    rows: int = 8

    def __str__(self) -> str:
        name = self.model.func.__name__ if isinstance(self.model, partial) else self.model.__name__
        exact = " exact dropout" if self.dropout == "exact" else ""
        return f"{name} {self.mesh}{exact}" + (f" m={self.microbatches}" if self.microbatches else "")

    def batches(self) -> list[Batch]:
        labels = "targets" if self.loss else "labels"
        return [batch(self.rows, length=length, seed=seed, labels=labels) for seed, length in enumerate(self.lengths)]

    def compiled(self, model: nn.Module, mesh: Any = None) -> Compiled:
        settings = {"loss": self.loss, "microbatches": self.microbatches, "schedule": self.schedule, "overrides": dict(self.overrides)}
        settings["dropout"] = self.dropout
        return tpcompile.compile(model, mesh or self.mesh, self.batches()[0], **settings)


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(order=True)
class Worst:
    """The largest error, and where it was."""

    error: float = 0.0
    name: str = ""

    def __truediv__(self, scale: float) -> Worst:
        return Worst(self.error / scale, self.name)


@dataclass
class Found:
    """How far a rank was from one device: losses at each step, gradients as parts of the model's largest, parameters in learning rates."""

    place: dict[str, int]
    losses: list[float] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    spacing: float = 0.0  # between neighbouring numbers of the losses' size and type
    gradients: list[Worst] = field(default_factory=list)  # of each step
    parameters: Worst = field(default_factory=Worst)  # after the last step
    skipped: int = 0  # elements whose gradients are so small that AdamW turns rounding into direction
    compared: int = 0
    names: frozenset[str] = frozenset()
    captures: int = 1


def worst(errors: Iterable[tuple[str, Tensor]]) -> Worst:
    return max((Worst(error.abs().max().item(), name) for name, error in errors if error.numel()), default=Worst())


def spacing(value: Tensor) -> float:
    """The distance to the next number of the same type."""
    value = value.detach().abs()
    return (torch.nextafter(value, torch.full_like(value, float("inf"))) - value).item()


def plain(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def drawn(case: Case, step: int) -> AbstractContextManager[None]:
    """How the untouched model drops in a step; models are made after `torch.manual_seed(0)`, so that 0 is the seed."""
    return exact_dropout(0, step=step) if case.dropout == "exact" else nullcontext()


def eager_loss(case: Case, model: nn.Module, rows: Batch) -> Tensor:
    if case.loss is None:
        loss: Tensor = model(**rows)["loss"]
        return loss
    return case.loss(model(**{name: value for name, value in rows.items() if name != "targets"}), rows)


def train(case: Case) -> Found:
    """Steps of AdamW on the mesh and on one device; every gradient of this rank's stage before each step."""
    model = case.model()
    return steps(case, case.compiled(model))


def train_both_schedules(case: Case) -> list[Found]:
    """The same under 1F1B and GPipe. The schedule is the runtime's alone: what the compiler made serves both."""
    return [steps(case, compiled) for compiled in both_schedules(case)]


def both_schedules(case: Case) -> list[Compiled]:
    compiled = case.compiled(case.model())
    other = Compiled(compiled.model, compiled.mesh, replace(compiled.options, schedule="gpipe"), None)
    other._compilations = list(compiled._compilations)
    return [compiled, other]


SEVERAL = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
"""The schedules with two stages on a rank."""


def train_schedules(case: Case) -> list[Found]:
    """The same under every schedule with two stages on a rank; stages are cut once, and placed as each schedule needs."""
    first = case.compiled(case.model())
    (made,) = first._compilations
    found = []
    for schedule in SEVERAL:
        options = replace(first.options, schedule=schedule)
        compiled = Compiled(first.model, first.mesh, options, None)
        compiled._compilations = [replace(made, options=options, step=replace(made.step, schedule=schedule))]
        found.append(steps(case, compiled))
    return found


def steps(case: Case, compiled: Compiled) -> Found:
    alone = case.model()
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=LR)
    reference = torch.optim.AdamW(alone.parameters(), lr=LR)
    pieces, whole = compiled.program().parameters, dict(alone.named_parameters())
    found = Found(compiled.program().coordinates, names=frozenset(name for name, _ in compiled.named_parameters()))
    small = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in whole.items()}
    for step, rows in enumerate(case.batches()):
        loss = compiled.train_step(**rows)
        with drawn(case, step):
            expected = eager_loss(case, alone, rows)
            expected.backward()
        found.losses.append(loss.item())
        found.loss_errors.append(abs(loss.item() - expected.item()))
        found.spacing = max(found.spacing, spacing(expected))
        largest = max(p.grad.abs().max().item() for p in whole.values())
        for name, p in whole.items():
            small[name] |= p.grad.abs() < 1e-6 * largest
        errors = ((name, plain(p.grad) - pieces[name].of(whole[name].grad)) for name, p in compiled.named_parameters())
        found.gradients.append(worst(errors) / largest)
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    for name, p in compiled.named_parameters():
        skip = pieces[name].of(small[name])
        error = (plain(p) - pieces[name].of(whole[name].detach())).masked_fill(skip, 0.0)
        found.parameters = max(found.parameters, worst([(name, error)]) / LR)
        found.skipped, found.compared = found.skipped + int(skip.sum()), found.compared + skip.numel()
    found.captures = len(compiled._compilations)
    return found


def train_on_own_mesh(case: Case) -> Found:
    """The user's own DeviceMesh, whose tensor axis is the outer one."""
    return steps(case, case.compiled(case.model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))))


def run(jobs: tuple[tuple[Callable[..., Any], Case], ...]) -> list[Any]:
    """Several cases of one mesh, in the same processes: starting these is what costs."""
    captured_once.begin()
    return [function(case) for function, case in jobs]


# ------------------------------------------------------------------------------------------- as an ordinary module


@dataclass(frozen=True)
class Called:
    kind: str
    loss_error: float
    spacing: float
    logits_error: float
    gradients: Worst


def called(case: Case) -> Called:
    """`compiled(**batch).loss.backward()`."""
    model, alone, rows = case.model(), case.model(), case.batches()[0]
    compiled = case.compiled(model)
    output, expected = compiled(**rows), alone(**rows)
    output.loss.backward()
    expected.loss.backward()
    pieces, whole = compiled.program().parameters, dict(alone.named_parameters())
    largest = max(p.grad.abs().max().item() for p in whole.values())
    gradients = worst((name, plain(p.grad) - pieces[name].of(whole[name].grad)) for name, p in compiled.named_parameters())
    logits = worst([("logits", output.logits - expected.logits)]).error
    error = abs(output.loss.item() - expected.loss.item())
    return Called(type(output).__name__, error, spacing(expected.loss), logits, gradients / largest)


@dataclass(frozen=True)
class Relabelled:
    """The worst error of logits and gradients; elements of the head that a rank holds after a capture with labels, and without."""

    logits: float
    gradient: float
    cut: int
    whole: int


def with_and_without_labels(case: Case) -> Relabelled:
    """A step, then a forward of the ids alone; and with a second object the other way round."""
    alone, rows = case.model(), case.batches()[0]
    ids = {"input_ids": rows["input_ids"]}
    expected = alone(**ids).logits
    alone(**rows).loss.backward()
    whole = dict(alone.named_parameters())
    largest = max(p.grad.abs().max().item() for p in whole.values())
    *_, head = (name for name, p in whole.items() if p.shape[:1] == (VOCABULARY,) and p.dim() == 2)
    logits, gradient, held = 0.0, 0.0, []
    for first in (rows, ids):
        compiled = tpcompile.compile(case.model(), case.mesh, first)
        if first is rows:
            compiled.train_step(**rows)
        logits = max(logits, (compiled(**ids).logits - expected).abs().max().item())
        if first is ids:
            compiled.train_step(**rows)
        pieces = compiled.program().parameters
        errors = ((name, plain(p.grad) - pieces[name].of(whole[name].grad)) for name, p in compiled.named_parameters())
        gradient = max(gradient, worst(errors).error / largest)
        held.append(dict(compiled.named_parameters())[head].numel())
    return Relabelled(logits, gradient, *held)


# ---------------------------------------------------------------------------------------------------------- dropout


@dataclass(frozen=True)
class Masked:
    """What a rank had after steps with dropout."""

    place: dict[str, int]
    losses: list[float]
    whole: dict[str, Tensor]  # the parameters that are whole on every tensor rank
    logits: Tensor | None


def dropout(case: Case) -> Masked:
    """Five steps on the same batch, in training mode."""
    compiled = case.compiled(case.model())
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=LR)
    rows, losses = case.batches()[0], []
    for _ in range(5):
        losses.append(compiled.train_step(**rows).item())
        optimizer.step()
        optimizer.zero_grad()
    pieces = compiled.program().parameters
    whole = {name: plain(p).clone() for name, p in compiled.named_parameters() if pieces[name].dim is None}
    logits = compiled(**rows).logits.detach() if compiled.mesh.pp == 1 else None
    return Masked(compiled.program().coordinates, losses, whole, logits)


def dropout_of_schedules(case: Case) -> list[list[Tensor]]:
    """The loss and all gradients of two steps on the same batch, under 1F1B and under GPipe."""
    found = []
    for compiled in both_schedules(case):
        losses = [compiled.train_step(**case.batches()[0]) for _ in range(2)]
        found.append([*losses, *(plain(p.grad).clone() for _, p in compiled.named_parameters() if p.grad is not None)])
    return found
