"""What a rank keeps for backward: counted on tensors without data, and measured on those that have some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import parity_models
import pytest
import torch
from ranks import one_of
from torch import Tensor, nn

from tpcompile import collectives
from tpcompile.driver import Compilation
from tpcompile.inspect import activations
from tpcompile.inspect.activations import Kept
from tpcompile.ir import Stage
from tpcompile.layout import TensorType
from tpcompile.runtime.recompute import recompute
from tpcompile.schedules import Run, actions


def measured(compilation: Compilation, stage: Stage) -> int:
    """The bytes that autograd keeps of a stage's forward, run as it is emitted, without parameters and buffers."""
    model, batch, _ = parity_models.made("gpt" if "blocks.0" in compilation.program.layers else "llama")
    program = compilation.rank_program(model, compilation.step.place_of(stage.index) * compilation.mesh.tp)
    module = next(made for made, own in zip(program.modules, program.stages, strict=True) if own.index == stage.index)
    recompute(module, stage.layers, compilation.options.recompute, borrows=False, draws=False)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with one_of(compilation.mesh.tp) as name:
        collectives.bind(module, {"tp": name})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = module(**given(compilation, stage, batch))
        assert outputs
    return sum(size for place, size in found.items() if place not in own)


def given(compilation: Compilation, stage: Stage, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a stage takes, of a micro-batch's size."""
    rows = parity_models.ROWS // (compilation.mesh.dp * compilation.options.microbatches)
    made: dict[str, Tensor] = {}
    for boundary in stage.receives:
        shape = [int(size if isinstance(size, int) else size.subs(dict(compilation.sizes))) for size in boundary.shape(0)]
        made[boundary.name] = torch.ones(shape, dtype=boundary.type.dtype, requires_grad=boundary.requires_grad)
    for name in stage.inputs:
        kind = compilation.program.types[name]
        assert isinstance(kind, TensorType)
        made[name] = batch[name][:rows] if name in batch else torch.ones([], dtype=kind.dtype)
    return made


@pytest.mark.parametrize("along", [True, False, "regather"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_autograd_keeps(name: str, along: Any) -> None:
    compilation = parity_models.compiled(name, "pp=2,tp=2", sequence_parallel=along)
    for stage in compilation.stages:
        expected = activations.of_stage(compilation, stage)
        assert expected.unknown == "" and expected.flops > 0
        assert measured(compilation, stage) == expected.bytes, stage.index


def test_one_device_keeps_what_the_model_keeps() -> None:
    """All that the untouched model keeps, or less: it is the same mathematics, written out by the passes."""
    model, batch, _ = parity_models.made("gpt")
    part = {name: value[: parity_models.ROWS // 2] for name, value in batch.items()}
    own, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**part)
    eager = sum(size for place, size in found.items() if place not in own)
    assert activations.of_one_device(parity_models.compiled("gpt", "pp=2,tp=2")).bytes == pytest.approx(eager, rel=0.05)


def test_layers_that_run_again_keep_less() -> None:
    """What a layer of two is given and the rest of the stage keep. When the last layer runs again, what comes after it has been freed."""
    none, full, selective = (
        activations.of_stage(made := parity_models.compiled("gpt", "tp=1", recompute=how), made.stages[0])
        for how in ("none", "full", "selective")
    )
    assert none.most == none.bytes and full.bytes < selective.bytes < none.bytes
    assert full.bytes < full.most < selective.most <= none.most
    assert full.flops == selective.flops == none.flops > 0


def test_what_runs_without_data_only() -> None:
    """An operation that torch cannot run so is named, and nothing is said to be known."""
    compilation = parity_models.compiled("gpt", "tp=1")
    recording = activations._Recording({}, frozenset(), "tp:0/1", 0)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.nonzero.default, (x,))
    found = recording.of([node], graph, {"x": (torch.float32, (3,))}, [])
    assert found.unknown.startswith("DynamicOutputShapeException: ") and found.bytes == 0
    assert activations.of_stage(compilation, compilation.stages[0]).unknown == ""


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "dualpipev"])
def test_micro_batches_in_flight(schedule: str) -> None:
    """The most that a rank has at once, counted from the schedule's table by hand: 1F1B has as many as there are stages to go."""
    per_rank = 1 if schedule in ("1f1b", "gpipe") else 2
    stages = [SimpleNamespace(index=index, unhalved="") for index in range(2 * per_rank)]
    step: Any = SimpleNamespace(schedule=schedule, mesh=SimpleNamespace(pp=2), per_rank=per_rank, microbatches=4, stages=stages)
    compilation: Any = SimpleNamespace(step=step)
    kept = {index: Kept(bytes=size, most=size, half=size) for index, size in enumerate(10**i for i in range(2 * per_rank))}
    for place in range(2):
        alive: set[tuple[int, int]] = set()
        most = 0
        halved = any(isinstance(one, Run) and one.work == "weight" for one in actions(schedule, place, 2, per_rank, 4))
        for action in actions(schedule, place, 2, per_rank, 4):
            if isinstance(action, Run) and action.work == "forward":
                alive.add((action.stage, action.microbatch))
            elif isinstance(action, Run) and action.work in ("backward", "weight"):
                alive.discard((action.stage, action.microbatch))
            most = max(most, sum(kept[stage].bytes for stage, _ in alive))
        found = activations.in_flight(compilation, place, kept)
        assert found == most > 0, (place, halved)
        if schedule == "1f1b":
            assert found == (2 - place) * 10**place
        if schedule == "gpipe":
            assert found == 4 * 10**place


def test_the_first_half_of_a_backward() -> None:
    """It leaves all but what is saved after the last weight is used: of the last stage, what its loss saves; of the first, everything."""
    first, last = (activations.of_stage(made := parity_models.compiled("gpt", "pp=2"), made.stages[index]) for index in range(2))
    scores = 8 * parity_models.VOCABULARY * parity_models.ROWS // 2 * parity_models.LENGTH
    assert first.half == first.bytes and scores <= last.bytes - last.half <= 1.2 * scores
    stages = [SimpleNamespace(index=index, unhalved="") for index in range(4)]
    step: Any = SimpleNamespace(schedule="interleaved_zero_bubble", mesh=SimpleNamespace(pp=2), per_rank=2, microbatches=4, stages=stages)
    compilation: Any = SimpleNamespace(step=step)
    whole, half = ({index: Kept(100, 100, left) for index in range(4)} for left in (100, 10))
    smaller = [activations.in_flight(compilation, place, half) < activations.in_flight(compilation, place, whole) for place in range(2)]
    assert smaller == [False, True]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(x)))
        return made


def test_flops_of_linears() -> None:
    """2 for every multiply-add, 1 for every element of an activation, a tensor rank's share of these; and of the sum over ranks."""
    import tpcompile

    for ranks in (1, 2, 4):
        compilation = tpcompile.compile(Layer(), f"tp={ranks}", torch.ones(3, 8), sequence_parallel=False).compilation
        found = activations.of_stage(compilation, compilation.stages[0])
        summed = 3 * 8 if ranks > 1 else 0
        assert found.flops == (2 * 2 * 3 * 8 * 32 + 3 * 32) // ranks + summed
