"""Checkpoints of one process: what is on the disk, what is refused, and what a kill leaves."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tpcompile.errors import InputError, TpcompileError
from tpcompile.passes.emit import Piece
from tpcompile.runtime.checkpoint import files
from tpcompile.runtime.checkpoint.boxes import Box, parts, shared_out
from tpcompile.runtime.checkpoint.plain import decode, encode
from tpcompile.runtime.compiled import Compiled

# ------------------------------------------------------------------------------------------------------- boxes


def test_what_is_left_of_a_box() -> None:
    generator = random.Random(0)
    for _ in range(200):
        one, other = (Box(tuple(generator.randint(0, 4) for _ in range(3)), tuple(generator.randint(1, 4) for _ in range(3))) for _ in "ab")
        seen = torch.zeros(9, 9, 9)
        for box in [*one.without(other), *([shared] if (shared := one.meet(other)) else [])]:
            box.of(seen).add_(1)
        expected = torch.zeros(9, 9, 9)
        one.of(expected).add_(1)
        assert torch.equal(seen, expected)


def test_strips_of_a_fused_weight() -> None:
    value = torch.arange(24.0).reshape(2, 12)
    piece = Piece(1, ((2, 4), (6, 8), (10, 12)))
    found = parts(piece, (2, 12), piece.of(value))
    assert [str(part.box) for part in found] == ["[0:2, 2:4]", "[0:2, 6:8]", "[0:2, 10:12]"]
    assert all(torch.equal(part.box.of(value), part.local(part.box).of(piece.of(value))) for part in found)
    with pytest.raises(TpcompileError, match=r"local shape \[2, 5\] is held for the piece \[0:2, 0:6\] of \[2, 12\]"):
        parts(piece, (2, 12), torch.zeros(2, 5))


def test_every_element_has_one_writer() -> None:
    """Replicas, uneven cuts and ranges that overlap: all is written once, and by more than one rank where several have it."""
    cuts = {"even": [(0, 4), (4, 8)], "uneven": [(0, 3), (3, 8)], "shared": [(0, 5), (3, 8)], "whole": [(0, 8), (0, 8)]}
    held = [{name: [Box((0, a), (3, b - a)) for a, b in [ranges[rank % 2]]] for name, ranges in cuts.items()} for rank in range(4)]
    writes = shared_out(held, dict.fromkeys(cuts, 4))
    for name in cuts:
        seen = torch.zeros(3, 8)
        for own in writes:
            for other, box in own:
                if other == name:
                    box.of(seen).add_(1)
        assert torch.equal(seen, torch.ones(3, 8)), name
    loads = [sum(box.numel for _, box in own) for own in writes]
    assert sum(loads) == 4 * 24 and min(loads) > 0
    for own, boxes in zip(writes, held, strict=True):
        assert all(any(box.meet(mine) == box for mine in boxes[name]) for name, box in own)


# ----------------------------------------------------------------------------------------------------- settings


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    kinds = torch.optim.lr_scheduler
    return [
        kinds.MultiStepLR(optimizer, [2, 5]),
        kinds.OneCycleLR(optimizer, 1.0, 10),
        kinds.ReduceLROnPlateau(optimizer),
        kinds.SequentialLR(optimizer, [kinds.ConstantLR(optimizer), kinds.CosineAnnealingLR(optimizer, 3)], [2]),
    ]


def test_states_of_schedulers_as_text() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    for scheduler in schedulers(optimizer):
        state = scheduler.state_dict()
        found = decode(json.loads(json.dumps(encode(state, "scheduler"))))
        assert str(found) == str(state) and {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in state.items()}


def test_what_only_pickle_could_hold() -> None:
    with pytest.raises(InputError) as error:
        encode({"a": [1, object()]}, "data")
    assert str(error.value).split("\n") == [
        "data.a[1] is a object, which a checkpoint cannot hold without pickle",
        "  at   compiled.save",
        "  fix  keep numbers, texts, and lists, tuples and dictionaries of them",
    ]


# ------------------------------------------------------------------------------------------- saved and loaded


def made(model: nn.Module | None = None) -> tuple[Compiled, torch.optim.Optimizer]:
    compiled = handmade.compiled(model or handmade.Tied(), "tp=1", handmade.batch())
    return compiled, compiled.optimizer(torch.optim.AdamW, lr=0.1)


def steps(compiled: Compiled, optimizer: torch.optim.Optimizer, count: int) -> None:
    for seed in range(count):
        compiled.train_step(**handmade.batch(seed=seed))
        optimizer.step()
        optimizer.zero_grad()


def state(compiled: Compiled, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for own in optimizer.state.values() for value in own.values()]
    return [value.detach().clone() for value in (*compiled.parameters(), *kept)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    compiled, optimizer = made()
    steps(compiled, optimizer, 1)
    path = compiled.save(tmp_path, optimizer=optimizer, step=1)
    assert isinstance(path, Path)
    return path


def test_what_is_on_the_disk(saved: Path) -> None:
    assert sorted(path.name for path in saved.parent.iterdir()) == ["latest", "step_00000001"]
    assert (saved.parent / "latest").read_text() == "step_00000001\n"
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint.json", "rank_00000_0.safetensors"]
    names = set(json.loads((saved / "checkpoint.json").read_text())["tensors"])
    kept = {f"optimizer.{name}.{key}" for name in ("embed.weight", "mix.weight", "mix.bias") for key in ("step", "exp_avg", "exp_avg_sq")}
    model = {"model.embed.weight", "model.mix.weight", "model.mix.bias", "model.spare.weight"}  # the tied head is the embedding
    assert names == kept | model | {"generator.cpu.0"}


def test_the_newest_of_several(saved: Path) -> None:
    compiled, optimizer = made()
    steps(compiled, optimizer, 2)
    for step in (2, 2, 3):
        compiled.save(saved.parent, optimizer=optimizer, step=step, keep=3)
    names = sorted(path.name for path in saved.parent.iterdir())
    assert names == ["latest", "step_00000002", "step_00000002_2", "step_00000003"]
    expected = state(compiled, optimizer)
    steps(compiled, optimizer, 1)
    assert compiled.load(saved.parent / "step_00000002", optimizer=optimizer) == 2 and same(state(compiled, optimizer), expected)
    assert compiled.load(saved.parent, optimizer=optimizer) == 3


def test_nothing_there(tmp_path: Path) -> None:
    compiled, optimizer = made()
    assert compiled.load(tmp_path / "none", optimizer=optimizer, missing_ok=True) == 0
    with pytest.raises(InputError, match=f"there is no checkpoint in {tmp_path}/none"):
        compiled.load(tmp_path / "none")


def test_settings_of_groups_come_back(saved: Path) -> None:
    compiled, _ = made()
    names = dict(compiled.named_parameters())
    groups = [{"params": [names["mix.weight"], names["mix.bias"]], "lr": 1.0}, {"params": [names["embed.weight"]]}]
    optimizer = torch.optim.AdamW(groups, lr=2.0, betas=(0.1, 0.2))
    compiled.load(saved, optimizer=optimizer)
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [(0.1, (0.9, 0.999))] * 2
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    other = torch.optim.SGD(compiled.parameters(), lr=0.1)
    other.state[names["mix.bias"]]["row"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"optimizer.mix.bias.row has shape \[3\] for a parameter of local shape \[6\]"):
        compiled.save(saved.parent, optimizer=other)


def test_the_scale_of_losses_comes_back(saved: Path) -> None:
    """And a checkpoint without one serves."""
    compiled = handmade.compiled(handmade.Tied(), "tp=1", handmade.batch(), precision="fp16")
    compiled.load(saved)
    assert compiled.loss_scale == 65536.0
    scaler = compiled._running("").scaler
    assert scaler is not None
    scaler.scale.fill_(8.0)
    compiled.save(saved.parent, step=2)
    scaler.scale.fill_(4.0)
    assert compiled.load(saved.parent) == 2 and compiled.loss_scale == 8.0
    made()[0].load(saved.parent)


# -------------------------------------------------------------------------------------------- bad checkpoints


def cut_short(path: Path) -> str:
    file = path / "rank_00000_0.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 100)
    return f"{file} has {size - 100} bytes, and {size} were written"


def lost(path: Path) -> str:
    file = path / "rank_00000_0.safetensors"
    file.unlink()
    return f"{file} is missing"


def undescribed(path: Path) -> str:
    (path / "checkpoint.json").unlink()
    return f"{path}/checkpoint.json is missing"


def half_described(path: Path) -> str:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text[: len(text) // 2])
    return f"{path}/checkpoint.json is damaged: "


def rewritten(change: Callable[[dict[str, Tensor]], str]) -> Callable[[Path], str]:
    def rewrite(path: Path) -> str:
        file = path / "rank_00000_0.safetensors"
        tensors = load_file(file)
        message = change(tensors)
        save_file(tensors, file)
        description = json.loads((path / "checkpoint.json").read_text())
        description["files"][file.name] = file.stat().st_size
        (path / "checkpoint.json").write_text(json.dumps(description))
        return f"{file} {message}"

    return rewrite


def without(tensors: dict[str, Tensor]) -> str:
    del tensors["model.mix.bias:0"]
    return "has no model.mix.bias:0"


def narrower(tensors: dict[str, Tensor]) -> str:
    tensors["optimizer.mix.bias.exp_avg:0"] = tensors["optimizer.mix.bias.exp_avg:0"].float()
    return "has optimizer.mix.bias.exp_avg:0 in float32, and float64 was written"


def shorter(tensors: dict[str, Tensor]) -> str:
    tensors["model.mix.bias:0"] = tensors["model.mix.bias:0"][:2].clone()
    return "has model.mix.bias:0 in shape [2], and [6] was written"


DAMAGE = [cut_short, lost, undescribed, half_described, rewritten(without), rewritten(narrower), rewritten(shorter)]


@pytest.mark.parametrize("damage", DAMAGE, ids=["cut_short", "lost", "undescribed", "half_described", "without", "narrower", "shorter"])
def test_a_damaged_checkpoint_changes_nothing(saved: Path, damage: Callable[[Path], str]) -> None:
    compiled, optimizer = made()
    steps(compiled, optimizer, 2)
    before, clock = state(compiled, optimizer), compiled._running("").clock
    message = damage(saved)
    with pytest.raises(InputError) as error:
        compiled.load(saved, optimizer=optimizer)
    assert str(error.value).startswith(message)
    assert error.value.fix == "load another checkpoint; nothing in memory was changed" or "nothing in memory was changed" in str(
        error.value
    )
    assert same(state(compiled, optimizer), before) and compiled._running("").clock == clock


class Other(handmade.Tied):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2, bias=True, dtype=torch.float64)


def test_another_model(saved: Path) -> None:
    with pytest.raises(InputError) as error:
        made(handmade.Tied(torch.float32))[0].load(saved)
    lines = str(error.value).split("\n")
    assert lines[0] == "4 problems" and lines[1] == f"{saved} has model.embed.weight in float64, and the model in float32"
    other = Other()
    compiled, _ = made()
    compiled.model = other
    with pytest.raises(InputError) as error:
        compiled.load(saved)
    lines = [line for line in str(error.value).split("\n") if line.startswith(str(saved))]
    assert lines == [f"{saved} has no model.spare.bias", f"{saved} has model.spare.weight in shape [2, 2], and the model in [2, 3]"]


class Picky:
    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.value == 2:
            raise ValueError("not two")


def test_an_object_that_does_not_take_its_state(tmp_path: Path) -> None:
    compiled, optimizer = made()
    thing = Picky()
    thing.value = 2
    compiled.save(tmp_path, objects={"thing": thing})
    steps(compiled, optimizer, 1)
    before = state(compiled, optimizer)
    thing.value = 1
    with pytest.raises(InputError, match="thing does not take its state from the checkpoint: not two"):
        compiled.load(tmp_path, objects={"thing": thing})
    assert thing.value == 1 and same(state(compiled, optimizer), before)
    with pytest.raises(InputError, match="was saved without an optimizer"):
        compiled.load(tmp_path, optimizer=optimizer)
    with pytest.raises(InputError, match="was saved without scheduler"):
        compiled.load(tmp_path, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))


# -------------------------------------------------------------------------------------------------------- kills

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def child(work: Callable[[], None], directory: Path, last: int | None) -> tuple[int, int]:
    """Run in a forked process that is killed at the event with this number; how it ended, and how many events it had."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = itertools.count()

        def event() -> None:
            os.write(writing, b".")
            if next(count) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(name: str, given: tuple[Any, ...]) -> None:
            if name in EVENTS and str(given[0]).startswith(str(directory)):
                event()

        def half(tensors: dict[str, Tensor], path: Path, *rest: Any) -> None:
            save_file(tensors, path, *rest)
            whole_file = path.read_bytes()
            path.write_bytes(whole_file[: len(whole_file) // 2])
            event()
            path.write_bytes(whole_file)

        files.save_file, files.FILE_BYTES = half, 600  # several files
        sys.addaudithook(audit)
        try:
            work()
        finally:
            os._exit(0)
    os.close(writing)
    seen = b""
    while more := os.read(reading, 4096):
        seen += more
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    return status, len(seen)


def test_no_kill_in_a_save_loses_the_last_good_checkpoint(saved: Path) -> None:
    compiled, optimizer = made()
    compiled.load(saved, optimizer=optimizer)
    states = {1: state(compiled, optimizer)}
    steps(compiled, optimizer, 1)
    states[2] = state(compiled, optimizer)

    def killed(last: int | None) -> tuple[Path, int, int]:
        directory = saved.parent.with_name(f"{saved.parent.name}_{last}")
        shutil.copytree(saved.parent, directory)
        return directory, *child(lambda: _save(directory), directory, last)

    def _save(directory: Path) -> None:
        compiled.save(directory, optimizer=optimizer, step=2, keep=1)

    found = []
    directory, status, events = killed(None)
    assert status == 0 and events > 20
    for point in random.Random(0).sample(range(events), k=20):
        directory, status, _ = killed(point)
        assert os.WTERMSIG(status) == signal.SIGKILL
        fresh, other = made()
        found.append(fresh.load(directory, optimizer=other))
        assert same(state(fresh, other), states[found[-1]]), point
        compiled.save(directory, optimizer=optimizer, step=3, keep=1)
        assert sorted(path.name for path in directory.iterdir()) == ["latest", "step_00000003"], "what killed saves left is gone"
    assert set(found) == {1, 2}
