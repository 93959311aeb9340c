"""What the tests of checkpoints run in real processes: steps on one mesh, and the steps that follow on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import captured_once
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from training_workers import Batch, Worst, batch, double_loss, plain, worst

import tpcompile
from tpcompile.passes.emit import Piece
from tpcompile.runtime.checkpoint.boxes import parts
from tpcompile.runtime.compiled import Compiled

VOCABULARY = 91
ADAMW = {"lr": 1e-2, "eps": 1e-4}  # rounding errors of gradients that are zero by mathematics do not become directions
transformers.logging.set_verbosity_error()


def fused() -> nn.Module:
    """q, k and v stacked, embedding and head tied, five heads and 91 words: nothing divides by two or four."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=20, n_layer=4, n_head=5, **rates)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()


def shared() -> nn.Module:
    """One key/value head for four query heads: every tensor rank has it. The head is a weight of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = transformers.Starcoder2Config(
        vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, residual_dropout=0.0, embedding_dropout=0.0, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    return transformers.Starcoder2ForCausalLM(config).double()


MODELS: dict[str, Callable[[], nn.Module]] = {"fused": fused, "shared": shared}


def data(step: int) -> Batch:
    return batch(seed=step, labels="targets")


@dataclass
class Trainer:
    """A compiled model, or the model itself, with AdamW and a schedule of learning rates."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    losses: list[float] = field(default_factory=list)

    def steps(self, first: int, last: int) -> list[float]:
        for step in range(first, last):
            if isinstance(self.model, Compiled):
                loss = self.model.train_step(**data(step))
            else:
                loss = double_loss(self.model(input_ids=data(step)["input_ids"]), data(step))
                loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self.losses

    @property
    def everything(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}


def settings(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Any]:
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)


def on_mesh(name: str, mesh: str) -> Trainer:
    """`mesh` may end in a mode of data parallelism, and a schedule: "dp=4 zero3", "dp=2,pp=2 zero2 zbv"."""
    axes, mode, schedule, *_ = [*mesh.split(), *("ddp", "1f1b")[mesh.count(" ") :]]
    compiled = tpcompile.compile(MODELS[name](), axes, data(0), loss=double_loss, data_parallel=mode, schedule=schedule)
    return Trainer(compiled, *settings(compiled.optimizer(torch.optim.AdamW, **ADAMW)))


def alone(name: str) -> Trainer:
    model = MODELS[name]()
    return Trainer(model, *settings(torch.optim.AdamW(model.parameters(), **ADAMW)))


@dataclass
class Found:
    """Of one rank, after the steps that follow a load: losses, and how far its parameters are from an uninterrupted run's."""

    losses: list[float]
    parameters: Worst
    step: int


def compared(trainer: Trainer, reference: dict[str, Tensor]) -> Worst:
    pieces = trainer.model.program().parameters
    return worst((name, piece(p.detach()) - pieces[name].of(reference[name])) for name, p in trainer.model.named_parameters())


def piece(held: Tensor) -> Tensor:
    """The rank's piece, of which replicas may hold a shard each. Collective over these."""
    return held.full_tensor() if isinstance(held, DTensor) else held


def reference(name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """An uninterrupted run of the untouched model on one device."""
    trainer = alone(name)
    losses = trainer.steps(0, steps)
    return losses, {key: p.detach().clone() for key, p in trainer.model.named_parameters()}


@dataclass
class First:
    found: Found  # without interruption
    again: Found  # after a load on the same mesh
    bitwise: bool
    whole: Worst  # of full_state_dict, on rank 0
    keys: list[str]


def first(names: list[str], mesh: str, directory: str) -> dict[str, First]:
    """Two steps, a checkpoint, two more; then the same two once more, from the checkpoint."""
    made = {}
    for name in names:
        _, expected = reference(name, 4)
        trainer, path = on_mesh(name, mesh), f"{directory}/{name}"
        trainer.steps(0, 2)
        trainer.model.save(path, **trainer.everything, step=2)
        found = Found(list(trainer.steps(2, 4)), compared(trainer, expected), 4)
        before = [plain(p).clone() for p in trainer.model.parameters()]
        step = trainer.model.load(path, **trainer.everything)
        trainer.losses.clear()
        again = Found(trainer.steps(2, 4), compared(trainer, expected), step)
        bitwise = all(torch.equal(plain(p), value) for p, value in zip(trainer.model.parameters(), before, strict=True))
        state = trainer.model.full_state_dict()
        whole = worst((key, state[key] - value) for key, value in expected.items() if state)
        trainer.model.save_pretrained(f"{path}_whole")
        made[name] = First(found, again, bitwise, whole, list(state))
    return made


def second(jobs: list[tuple[str, str]], directory: str, back: str) -> dict[tuple[str, str], Found]:
    """For each model and mesh: load, save under another name, two more steps."""
    captured_once.begin()
    made = {}
    for name, mesh in jobs:
        _, expected = reference(name, 4)
        trainer = on_mesh(name, mesh)
        step = trainer.model.load(f"{directory}/{name}", **trainer.everything)
        trainer.model.save(f"{back}/{name}_{mesh}", **trainer.everything, step=step)
        made[name, mesh] = Found(trainer.steps(2, 4), compared(trainer, expected), step)
    return made


def resumed(paths: dict[str, list[str]], mesh: str) -> dict[str, Found]:
    """The last two steps from each of these checkpoints of a model, on one compiled object."""
    made = {}
    for name, own in paths.items():
        _, expected = reference(name, 4)
        trainer = on_mesh(name, mesh)
        for path in own:
            step = trainer.model.load(path, **trainer.everything)
            trainer.losses.clear()
            made[path] = Found(list(trainer.steps(2, 4)), compared(trainer, expected), step)
    return made


@dataclass
class Broken:
    same: bool  # what a save in the background wrote is what was there when it was called
    untouched: bool  # after a load that failed
    error: str
    path: str


def in_background(directory: str) -> Broken:
    """Saved while training goes on, and then a file is lost that only one rank needs."""
    trainer = on_mesh("fused", "tp=2")
    trainer.steps(0, 1)
    before = state(trainer)
    future = trainer.model.save(directory, **trainer.everything, step=1, wait=False)
    trainer.steps(1, 2)
    path = future.result()
    trainer.model.load(directory)
    same = equal(state(trainer, optimizer=False), before)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "rank_00001_0.safetensors").unlink()
    dist.barrier()
    before = state(trainer)
    try:
        trainer.model.load(directory, **trainer.everything)
    except tpcompile.TpcompileError as error:
        return Broken(same, equal(state(trainer), before), str(error), str(path))
    return Broken(same, False, "", str(path))


def state(trainer: Trainer, optimizer: bool = True) -> list[Tensor]:
    found = [p.detach() for p in trainer.model.parameters()]
    found += [value for kept in trainer.optimizer.state.values() for value in kept.values()] if optimizer else []
    return [plain(value).clone() for value in found]


def equal(now: list[Tensor], before: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(now, before, strict=False))


def shards() -> list[tuple[list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], bool]]:
    """Which boxes this rank's shard over dp of a piece in strips is, and whether they hold the right elements."""
    mesh, whole, found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.arange(84.0).reshape(7, 12), []
    for piece in (Piece(1, ((0, 2), (6, 9))), Piece(0, ((0, 2), (3, 6))), Piece()):
        for dim in (0, 1):
            held = distribute_tensor(piece.of(whole), mesh, [Shard(dim)])
            own = parts(piece, whole.shape, held)
            right = all(torch.equal(part.box.of(whole), part.local(part.box).of(held.to_local())) for part in own)
            found.append(([(part.box.start, part.box.size, part.at) for part in own], right))
    return found
