"""Emission: what the modules compute, what they are called, and what their source looks like."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import emit_models
import pytest
import ranks
import torch
from emit_models import batch, emitted, tiny, tiny_program
from exported import copied, program_of, stage_of, two_stages
from torch import Tensor, fx, nn

import tpcompile
from tpcompile import collectives
from tpcompile.errors import TpcompileError, VerifyError
from tpcompile.ir import Source
from tpcompile.layout import Layout
from tpcompile.mesh import Mesh
from tpcompile.passes.emit import Piece, RankProgram, emit


def compare(model: nn.Module, program: RankProgram, inputs: dict[str, Tensor]) -> None:
    """Outputs, every gradient, and the names of the state dict equal the eager model's."""
    made, eager = program.module(**inputs), model(**inputs)
    made[0].backward()
    eager[0].backward()
    for a, b in zip(made, eager, strict=True):
        assert torch.equal(a, b)
    assert list(program.module.state_dict()) == list(model.state_dict())
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (program.module, model))
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert ours[name].requires_grad == parameter.requires_grad and ours[name] is not parameter
        assert (ours[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(ours[name].grad, parameter.grad), name  # type: ignore[arg-type]


def test_one_rank_equals_eager() -> None:
    model = tiny()
    for layer in model.h:
        layer.norm.bias.requires_grad_(False)
    program = tiny_program(model)
    made = emit([stage_of(program, program.graph)], program, model, {}, Mesh(), 0)
    compare(model, made, batch())
    assert made.module.head.weight is made.module.embed.weight
    assert made.unused == ("h.0.unused", "h.1.unused")
    assert made.coordinates == {"dp": 0, "pp": 0, "tp": 0} and set(made.parameters.values()) == {Piece()}
    assert type(made.module.h[0]) is type(made.module.h[1]) and isinstance(made.module.h, nn.ModuleList)


@pytest.mark.processes
def test_two_ranks_equal_eager() -> None:
    ranks.run(emit_models.agrees_with_eager, 2)


def test_source(golden: Callable[..., None]) -> None:
    golden(emitted(tiny(), 1).source)


def test_a_rank_has_its_pieces_and_its_numbers() -> None:
    model = tiny()
    for rank, size in ((0, 3), (1, 2)):
        made = emitted(model, rank)
        own = slice(0, 3) if rank == 0 else slice(3, 5)
        assert torch.equal(made.module.h[0].up.weight, model.h[0].up.weight[own])
        assert torch.equal(made.module.h[1].down.weight, model.h[1].down.weight[:, own])
        assert made.parameters["h.1.down.weight"] == Piece(1, ((own.start, own.stop),)) and made.parameters["embed.weight"] == Piece()
        assert [node.args[1][2] for node in made.graph.nodes if node.target is torch.ops.aten.view.default] == [size, size]
    assert emitted(model, 0).source == emitted(model, 1).source and "N0 = (3, 2)" in emitted(model, 1).source


def test_the_table_of_numbers_does_not_take_a_name_of_the_models() -> None:
    class N0(nn.Linear):
        pass

    model = tiny()
    model.h[0].up.__class__ = N0
    assert "N_0 = (3, 2)" in emitted(model, 1).source


def test_source_runs_alone(tmp_path: Path) -> None:
    made = emitted(tiny(), 0)
    imports = {line for line in made.source.splitlines() if line.startswith(("import", "from"))}
    assert imports == {"import torch", "from torch import nn", "from tpcompile import collectives"}
    file = tmp_path / "stage_0.py"
    file.write_text(made.source)
    namespace: dict[str, type[nn.Module]] = {}
    exec(file.read_text(), namespace)
    again = namespace["Stage"]()
    assert again.state_dict().keys() == made.module.state_dict().keys()
    assert {n: v.shape for n, v in again.named_parameters()} == {n: v.shape for n, v in made.module.named_parameters()}
    assert {n for n, _ in again.named_buffers()} == {"scale", "hidden"}


def test_bind_reaches_the_layers_that_communicate() -> None:
    module = emitted(tiny(), 0).module
    collectives.bind(module, {"tp": "5"})
    assert [layer.tp for layer in module.h] == ["tp:0/2=5", "tp:0/2=5"] and not hasattr(module, "tp")


def test_traceback_shows_the_emitted_line() -> None:
    with pytest.raises(TpcompileError) as error:
        emitted(tiny(), 0).module(**batch())
    lines = "".join(traceback.format_exception(error.value))
    assert "layer_norm_enter = collectives.enter(layer_norm, self.tp)" in lines


def test_meta_parameters_stay_there() -> None:
    model = tiny().to("meta")
    program = tiny_program(tiny())
    made = emit([stage_of(program, program.graph)], program, model, {}, Mesh(), 0)
    assert all(parameter.is_meta for parameter in made.module.parameters())


class TestStages:
    def stages(self) -> tuple[nn.Module, list[RankProgram]]:
        model = tiny(layers=3)
        program = tiny_program(model)
        stages = two_stages(program, "add")  # after h.0
        return model, [emit(stages, program, model, {}, Mesh(pp=2), rank) for rank in range(2)]

    def test_numbers(self) -> None:
        model, (first, second) = self.stages()
        inputs = batch()
        crossing = first.module(**{name: inputs[name] for name in first.stages[0].inputs})
        assert isinstance(crossing, tuple) and len(crossing) == 1
        loss, logits = second.module(*crossing, **{name: inputs[name] for name in second.stages[0].inputs})
        eager_loss, eager_logits = model(**inputs)
        assert torch.equal(loss, eager_loss) and torch.equal(logits, eager_logits)

    def test_names(self) -> None:
        model, (first, second) = self.stages()
        block = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
        assert list(first.module.state_dict()) == ["embed.weight", "h.0.unused", *(f"h.0.{name}" for name in block), "head.weight"]
        layers = [f"h.{index}.{name}" for index in (1, 2) for name in ["unused", *block]]
        assert list(second.module.state_dict()) == ["scale", *layers, "head.weight"]
        assert {*first.module.state_dict(), *second.module.state_dict()} == {*model.state_dict()}
        assert first.module.embed.weight is first.module.head.weight  # the name that the graph uses is on every stage that uses it
        assert first.parameters.keys() == set(first.module.state_dict())
        assert 'self.h["1"]' in second.source and "nn.ModuleDict" in second.source

    def test_a_rank_may_hold_several(self) -> None:
        model = tiny(layers=3)
        program = tiny_program(model)
        made = emit(two_stages(program, "add"), program, model, {}, Mesh(), 0)
        assert [stage.index for stage in made.stages] == [0, 1] and len(made.modules) == len(made.graphs) == len(made.sources) == 2
        with pytest.raises(TpcompileError) as error:
            made.module  # noqa: B018
        assert str(error.value) == "rank 0 holds 2 stages\n  at   program.module\n  fix  use program.modules"


class Sequence(nn.Module):
    """Submodules called in the given order; a parameter list, a shared layer and a constant beside them."""

    def __init__(self, *order: int, kinds: int = 2) -> None:
        super().__init__()
        self.order = order
        self.steps = nn.Sequential(*(nn.Linear(2, 2) for _ in range(kinds)))
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 3.0))])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for step in self.order:
            x = torch.tanh(self.steps[step](x)) * self.gains[1]
        return x.square().sum() * torch.tensor([2.0])[0], x


@pytest.mark.parametrize(
    ("order", "called"),
    [((0, 1), [0, 1]), ((0, 1, 0), [1]), ((0, 0, 1), [0, 1]), ((0, 1, 0, 1), [])],
    ids=["one after another", "used around another", "used twice in a row", "by turns"],
)
def test_layers_that_are_called_again(order: tuple[int, ...], called: list[int]) -> None:
    """A layer becomes a submodule that is called where its operations can run in one go; else they stay in the root."""
    torch.manual_seed(0)
    model = Sequence(*order)
    inputs = {"x": torch.randn(3, 2)}
    program = program_of(model, inputs, ["steps.0", "steps.1"])
    made = emit([stage_of(program, program.graph)], program, model, {}, Mesh(), 0)
    compare(model, made, inputs)
    assert [index for index in range(2) if f"self.steps[{index}](" in made.source] == called


def test_what_several_layers_need_is_made_once_in_the_root() -> None:
    """A mask that the first layer made does not make it unlike the others, and no layer hands it on."""
    model = tiny()
    program = tiny_program(model)
    first = {name: Source("model.py", 1, "", "h.0") for name in ("arange", "remainder", "ne", "unsqueeze", "to")}
    program = replace(program, sources={**program.sources, **first})
    made = emit([stage_of(program, program.graph)], program, model, {}, Mesh(), 0)
    compare(model, made, batch())
    assert made.source.count("class ") == 2 and "add = self.h[0](mul, to)" in made.source


def test_sites_of_dropout_do_not_make_layers_unequal() -> None:
    model = tiny()
    program = tiny_program(model)
    sites = iter(range(10))

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name == "ids":
            made[key] = graph.placeholder("rng_key")
        if node.target is not torch.ops.aten.relu.default:
            return None
        return graph.call_function(collectives.dropout, (made[node.args[0]], 0.5, made[key], next(sites), 1))  # type: ignore[index]

    key = fx.Graph().placeholder("rng_key")
    made = emit([stage_of(program, copied(program.graph, change))], program, model, {}, Mesh(), 0)
    assert "[Block(tp, device, sites=(0,)), Block(tp, device, sites=(1,))]" in made.source
    assert made.module.h[1].sites == (1,) and type(made.module.h[0]) is type(made.module.h[1])
    one, other, same = (made.module(**batch(), rng_key=torch.tensor(key))[0] for key in ([1, 0, 0], [2, 0, 0], [1, 0, 0]))
    assert torch.equal(one, same) and not torch.equal(one, other)


class Odd(nn.Module):
    """Arguments of every kind that a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.full((3, 4), float("-inf"), device=x.device, dtype=x.dtype).where(x > 0, self.weight)
        parts = torch.split(self.weight, [1, 2], dim=0)
        z = x.to(memory_format=torch.contiguous_format).clamp(max=2, min=None)[..., None, 1:3].permute(2, 0, 1)
        picked = x[torch.tensor([0, 2]), :][:, [1, 0]]
        return (parts[1] * x[1:]).sum() + z.std(), y, picked, torch.cat([parts[0], x], 0), torch.zeros(2, dtype=torch.bfloat16)


def test_every_kind_of_argument() -> None:
    torch.manual_seed(0)
    model, inputs = Odd(), {"x": torch.randn(3, 4)}
    program = program_of(model, inputs, [])
    compare(model, emit([stage_of(program, program.graph)], program, model, {}, Mesh(), 0), inputs)


def test_in_place_operations_are_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    model = Odd()
    program = program_of(model, {"x": torch.randn(3, 4)}, [])
    with pytest.raises(VerifyError) as error:
        emit([stage_of(program, graph)], program, model, {}, Mesh(), 0)
    assert str(error.value) == "add__tensor changes its input in place, so the order of operations is not free\n  at   aten.add_.Tensor"


def test_comments_show_layouts() -> None:
    model = tiny(layers=1)
    program = tiny_program(model)
    stage, pieces = emit_models.cut_in_two(program)
    layouts = {
        "linear": Layout.parse("[2, 3, 5@tp{0:3, 3:5}]"),
        "linear_1": Layout.parse("[2, 3, 4]"),
        "linear_1_partial": Layout.parse("[2, 3, 4] +tp"),
    }
    made = emit([stage], program, model, pieces, Mesh(tp=2), 0, layouts=layouts, origins={"linear_1_partial": "linear_1"})
    for comment in (
        "self.up.bias)  # f64[2, 3, 5@tp{0:3, 3:5}]\n        del layer_norm_enter\n",
        "linear_partial = aten.linear.default(relu, self.down.weight); del relu  # f64[2, 3, 4] +tp",
        "linear_1 = collectives.reduce(linear_partial, self.tp); del linear_partial  # f64[2, 3, 4]\n",
    ):
        assert comment in made.source


def test_exports() -> None:
    """An emitted module is an ordinary one for torch.export; a group is not needed for it."""
    made = emitted(tiny(), 1)
    exported = torch.export.export(made.module, (), batch(), strict=False)
    assert [node.target for node in exported.graph.nodes].count(collectives.reduce) == 2


def test_names_are_text_and_never_code() -> None:
    """Modules, parameters, buffers and classes whose names would end a literal, or are no names in Python."""
    torch.manual_seed(0)
    odd = 'x"); raise SystemExit("'
    layers = []
    for _ in range(2):
        layer = type('class "\\', (nn.Module,), {"forward": lambda self, x: x * self.get_parameter(odd) + self.get_buffer("new\nline")})()
        layer.register_parameter(odd, nn.Parameter(torch.randn(4)))
        layer.register_buffer("new\nline", torch.randn(4))
        layers.append(layer)
    model = nn.Sequential()
    for number, layer in enumerate(layers):
        model.add_module(f'"""{number}\\', layer)
    x = torch.randn(2, 4)
    program = tpcompile.compile(model, "tp=1", (x,)).program()
    assert torch.equal(program.module(x)[0], model(x))
    assert program.module.state_dict().keys() == model.state_dict().keys()
