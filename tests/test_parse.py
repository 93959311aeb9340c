"""The text of a graph, read back: the same text, the same types and layouts, and the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import parity_models
import pytest
import sympy
import torch
from torch import Tensor, fx, nn

import tpcompile
from tpcompile.collectives import held_by, take
from tpcompile.driver import Compilation
from tpcompile.errors import TpcompileError
from tpcompile.ir import Local, PerRank, Program, Sharded
from tpcompile.layout import TensorType, symbol
from tpcompile.parse import parse, parse_type
from tpcompile.simulate import lockstep
from tpcompile.text import Written, text, written

MODELS = ("gpt", "llama", "neox", "bert", "encoder")


def read(value: Program | Sharded | Local) -> Written:
    """What the text of a value is read as, which has the same text, and as much as the text says."""
    printed, original = text(value), written(value)
    made = parse(printed)
    assert original is not None and text(made) == printed
    names = [node.name for node in original.graph.nodes]
    assert [node.name for node in made.graph.nodes] == names
    assert made.types == {name: kind for name, kind in original.types.items() if name in names}
    if isinstance(value, Program):
        assert not made.layouts
    else:
        kept = {name: layout for name, layout in original.layouts.items() if name in made.types and name in names}
        assert {name: str(layout) for name, layout in made.layouts.items()} == {name: str(layout) for name, layout in kept.items()}
        assert (made.axis, made.parts) == (value.axis, value.parts)
    assert made.updates == original.updates and made.marks == {name: mark for name, mark in original.marks.items() if name in names}
    return made


def state(program: Program, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A value for every placeholder; counts of the whole batch are some number."""
    given: dict[str, Tensor] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        name = node.name
        if name in program.parameters:
            given[name] = model.get_parameter(program.parameters[name]).detach()
        elif name in program.buffers:
            given[name] = model.get_buffer(program.buffers[name])
        elif name in program.constants:
            given[name] = program.constants[name]
        elif name in program.inputs:
            given[name] = batch[program.inputs[name].path]
        else:
            kind = program.types[name]
            assert isinstance(kind, TensorType)
            given[name] = torch.full([int(size) for size in kind.shape], 3, dtype=kind.dtype)
    return given


def run(graph: fx.Graph, given: Mapping[str, Tensor]) -> Any:
    torch.manual_seed(0)
    placed = [given[node.name] for node in graph.find_nodes(op="placeholder")]
    return fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*placed)


def same(made: Any, expected: Any) -> None:
    assert type(made) is type(expected)
    if isinstance(expected, (tuple, list)):
        assert len(made) == len(expected)
        for pair in zip(made, expected, strict=True):
            same(*pair)
    elif isinstance(expected, Tensor):
        assert made.dtype == expected.dtype and torch.equal(made, expected)
    else:
        assert made == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_program(name: str) -> None:
    model, batch, _ = parity_models.made(name)
    compilation = parity_models.compiled(name, "tp=2")
    for program in (compilation.captured, compilation.program):
        given = state(program, model, batch)
        same(run(read(program).graph, given), run(program.graph, given))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": "regather"}, {"sequence_parallel": False, "vocab_parallel": False}], ids=str)
def test_what_tensor_ranks_run(name: str, options: dict[str, Any]) -> None:
    model, batch, _ = parity_models.made(name)
    compilation = parity_models.compiled(name, "tp=3", **options)
    read(compilation.sharded)
    given = pieces(compilation, state(compilation.program, model, batch))
    made, expected = (lockstep.run(graph, given, 3) for graph in (read(compilation.local).graph, compilation.local.graph))
    assert made.keys() == expected.keys()
    for key, values in expected.items():
        same(made[key], values)


def pieces(compilation: Compilation, given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The same on every coordinate, but for parameters that are cut."""
    parts, cuts = compilation.mesh.tp, compilation.pieces()
    found = {}
    for name, value in given.items():
        cut = cuts.get(compilation.program.parameters.get(name, ""))
        found[name] = [value if cut is None else take(value, cut[0], held_by(cut[1], place, parts)) for place in range(parts)]
    return found


class Averaged(nn.Module):
    """Forward changes buffers, draws numbers, and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        made = self.down(self.drop(torch.relu(self.up(x - self.mean)))).to(torch.float64)
        return made.masked_fill(made > 2, float("inf")).clamp(min=-1.0).sum()


def test_buffers_that_change_dropout_and_casts() -> None:
    compilation = tpcompile.compile(Averaged(), "tp=2", torch.randn(4, 8), dropout="exact").compilation
    for value in (compilation.captured, compilation.program, compilation.sharded, compilation.local):
        made = read(value)
        assert set(made.updates) == {"mean", "steps"}


def test_every_kind_of_argument() -> None:
    """Nested lists, tuples, slices, numbers for each rank, what has no number, types and what else torch names."""
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    given = [
        None, True, False, 0, -7, 1.0, -2.5e-07, 1e22, float("inf"), float("-inf"), complex(1, -2), "tp", 'a "quoted" line\n', "%x, [1]",
        [1, [2, [], (x,)], (n, 3)], (), slice(None, n, 2), PerRank((1, -2)), [PerRank(([1, 2], [])), 4], torch.float16, torch.bool,
        torch.float8_e5m2, torch.strided, torch.channels_last, torch.device("cpu"), torch.device("cuda:1"), torch.device("meta"), x,
    ]  # fmt: skip
    for value in given:
        graph.call_function(torch.ops.aten.add.Tensor, (value,), {"alpha": value})
    graph.call_function(torch.sym_max, (n, 2))
    graph.output((graph.call_function(__import__("operator").getitem, (x, (slice(1, None), None))), None))
    value = Written(graph, {})
    made = parse(text(value))
    assert text(made) == text(value)
    for before, after in zip(graph.nodes, made.graph.nodes, strict=True):
        assert before.op == "placeholder" or before.target == after.target
        assert repr(after.args) == repr(before.args) and repr(after.kwargs) == repr(before.kwargs)
    calls = made.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    for node, value_given in zip(calls, given, strict=True):
        if not isinstance(value_given, (fx.Node, list, tuple, slice)):
            assert type(node.args[0]) is type(value_given) and node.args[0] == value_given


def test_not_a_number() -> None:
    made = parse("  %x\n  %add = aten.add.Tensor(%x, nan)\n  return [%add]")
    (node,) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert node.args[1] != node.args[1]


def test_types() -> None:
    b, s = symbol("b"), symbol("s")
    assert parse_type("f32[b, 2*s + 1]")[0] == TensorType(torch.float32, (b, 2 * s + 1))
    kind, layout = parse_type("(f64[b, 4@tp·16] +tp, i64[b])", 2)
    assert isinstance(kind, tuple) and kind[0] == TensorType(torch.float64, (b, sympy.Integer(64))) and str(layout[0]) == "[b, 4@tp·16] +tp"  # type: ignore[index]
    assert parse_type("b*s") == (b * s, None)
    assert parse_type("(b + 1)*s") == ((b + 1) * s, None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("  %y = aten.relu(%z)", "'z'"),
        ("  %x", "a second value is named %x"),
        ("  %y = aten.no_such_thing(%x)", "there is no operator aten.no_such_thing"),
        ('  %y = os.system("true")', "there is no operator os.system"),
        ("  %y = aten.relu(%x", "is no argument"),
        ("  %y = aten.relu(%x) : f31[2]", "f31"),
        ("  %y = aten.relu(%x, torch.load)", "torch.load is no argument"),
        ("y = x", "write a value, what is returned, or the new value of a buffer"),
    ],
)
def test_what_is_no_text_of_a_graph(line: str, why: str) -> None:
    with pytest.raises(TpcompileError) as error:
        parse(f"  %x : f32[2]\n{line}\n  return [%x]")
    said = str(error.value)
    assert said.startswith(f"not a line of a graph's text: {line.strip()!r}\n  at   line 2\n  fix  ") and why.lower() in said.lower()


def test_source_lines_are_passed_over() -> None:
    program = parity_models.compiled("gpt", "tp=2").local
    shown = text(program, sources=True)
    assert "  # model.py:" in shown and text(parse(shown)) == text(program)
