"""Custom autograd.Functions: what a graph keeps of them, which of their dimensions may be cut, and what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import custom_functions as custom
import pytest
import torch
from one_call import Example, Operand, e, f
from test_rules import test_every_letter_may_be_cut_or_is_refused as every_letter
from torch import Tensor, nn
from torch.autograd import Function

import tpcompile
from tpcompile import functions
from tpcompile.driver import Options, lower_captured
from tpcompile.errors import CaptureError, InputError, Refused
from tpcompile.functions import Kept, kept, operator
from tpcompile.mesh import Mesh
from tpcompile.passes import _traced as traced
from tpcompile.passes._letters import proved
from tpcompile.passes.capture import capture
from tpcompile.simulate import compare
from tpcompile.text import text


class Work(nn.Module):
    """`work` between two linears, with a parameter for it to use."""

    def __init__(self, work: Callable[[Tensor, nn.Parameter], Tensor], inner: int = 12) -> None:
        super().__init__()
        self.work = work
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)
        self.weight = nn.Parameter(torch.randn(inner))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.work(self.up(x), self.weight))


def batch(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 5, 6, dtype=torch.float64)}


def made(work: Callable[[Tensor, nn.Parameter], Tensor]) -> Work:
    torch.manual_seed(1)
    return Work(work).double()


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Attention over three heads of four, with batch and heads in one dimension."""
    rows, length, _ = x.shape
    query, key, value = (part.reshape(rows, length, 3, 4).transpose(1, 2).reshape(rows * 3, length, 4) for part in (x, x * 2, x + 1))
    out: Tensor = custom.Attend.apply(query, key, value)
    return out.reshape(rows, 3, length, 4).transpose(1, 2).reshape(rows, length, 12)


WORKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "numbers": lambda x, w: custom.Wave.apply(x, 2.0),
    "text": lambda x, w: custom.Wave.apply(x, 2, "sine"),
    "setup_context": lambda x, w: custom.Bend.apply(x, {"scale": 1.5, "rest": [1, None]}),
    "keyword": lambda x, w: custom.Bend.apply(x, settings={"scale": 1.5}, power=3),
    "parameter": lambda x, w: custom.Gate.apply(x, w),
    "detached parameter": lambda x, w: custom.Gate.apply(x, w.detach()),
    "outputs": lambda x, w: sum(part * (n + 1) for n, part in enumerate(custom.Halves.apply(x)) if n != 1),  # type: ignore[misc]
    "one of the outputs": lambda x, w: custom.Halves.apply(x)[3],
    "outputs without gradient": lambda x, w: custom.Halves.apply(x)[0] * custom.Halves.apply(x)[2],
    "heads": heads,
    "its operand": lambda x, w: custom.Reverse.apply(x).exp(),
}
FUNCTIONS = {"numbers": "wave", "text": "wave", "setup_context": "bend", "parameter": "gate", "heads": "attend", "its operand": "reverse"}


def squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", WORKS)
def test_numbers_are_the_users_own(name: str) -> None:
    """Both linears are cut, rows are divided, and loss and gradients are those of the untouched model."""
    model = made(WORKS[name])
    program = capture(model, batch(2), loss=squares)
    assert any(kept(node.target) for node in program.graph.nodes)
    for mesh in ("tp=2", "tp=3", "dp=2"):
        compilation = lower_captured(program, model, Mesh.of(mesh), batch(2), Options(squares))
        assert mesh == "dp=2" or (len(compilation.plan.regions) == 1 and not compilation.plan.whole)
        report = compare(model, compilation, batch(4 if mesh == "dp=2" else 2))
        assert report.ok, f"{mesh}\n{report}"


def test_what_a_graph_shows() -> None:
    program = capture(made(WORKS["numbers"]), batch())
    assert re.search(r"  %wave = tpcompile_functions\.wave_x\w{6}\(%linear\) : f64\[b, s, 12\]\n", text(program))
    (node,) = (node for node in program.graph.nodes if kept(node.target))
    way = kept(node.target)
    assert way is not None and way.rule == "z0 z1 z2 -> z0 z1 z2" and way.function is custom.Wave
    assert str(program.sources[node.name]).startswith("test_functions.py:")


def test_without_gradient_it_is_its_forward() -> None:
    def frozen(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            scale = custom.Wave.apply(x, 2.0)
        return x * scale

    assert "aten.tanh" in str(capture(made(frozen), batch()).graph)


# --- rules


def rule_of(function: type[Function], *args: Any) -> Kept:
    """What is proved of a call, whose operands are dynamic in all dimensions."""
    example = Example(args)
    operands = [arg for arg in args if isinstance(arg, Operand)]
    places = iter(range(len(operands)))
    given = tuple(functions.Operand(next(places)) if isinstance(arg, Operand) else arg for arg in example.args)
    values = [operand.make(number) for number, operand in enumerate(operands)]
    returned = functions.apply(function, *(values[arg.index] if isinstance(arg, functions.Operand) else arg for arg in given))
    outputs = tuple(n for n, value in enumerate(returned) if isinstance(value, Tensor)) if isinstance(returned, tuple) else None
    examples = [traced.Example.of(value, value.is_floating_point()) for value in values]
    return proved(Kept(function, given, {}, (False,) * len(values), outputs), examples)


RULES: list[tuple[type[Function], tuple[Any, ...], str]] = [
    (custom.Wave, (f(3, 4), 2.0), "z0 z1 -> z0 z1"),
    (custom.Wave, (f(3, 1), 2.0), "z0 1 -> z0 1"),
    (custom.Gate, (f(3, 4, 5), f(5)), "z0 z1 z2, z2 -> z0 z1 z2"),
    (custom.Halves, (f(3, 4),), "z0 z1 -> z0 z1, z0 z1, z0 z1"),
    (custom.Attend, (f(2, 3, 4), f(2, 5, 4), f(2, 5, 6)), "z0 z1 z2!, z0 z3! z2!, z0 z3! z4 -> z0 z1 z4"),
    (custom.Reverse, (f(3, 4),), "z0 z1 -> z0 z1"),
    (custom.Softened, (f(3, 4),), "z0 z1! -> z0 z1!"),
    (custom.Averaged, (f(3, 4),), "z0 z1! -> z0 z1!"),
    (custom.AveragedGradient, (f(3, 4),), "z0 z1! -> z0 z1!"),
    (custom.Asks, (f(3, 8),), "z0 z1! -> z0 z1!"),
    (custom.Single, (f(3, 4),), "z0 z1! -> z0 z1!"),
    (custom.MeanToWeight, (f(3, 4), f(4)), "z0! z1, z1 -> z0! z1"),
    (custom.Counts, (f(3, 4),), "z0 z1! -> z0 z1!"),
]


@pytest.mark.parametrize(("function", "args", "rule"), RULES, ids=[f"{function.__name__} {rule}" for function, _, rule in RULES])
def test_which_dimensions_may_be_cut(function: type[Function], args: tuple[Any, ...], rule: str) -> None:
    """By the trace, and then by arithmetic: of pieces, the outputs and the gradients put together are the whole's."""
    way = rule_of(function, *args)
    assert way.rule == rule
    every_letter(str(operator(way)), e(*(arg for arg in args if isinstance(arg, Operand))))


NOT_LINEAR = "its backward is not known to be linear in the gradient: aten.clamp.default"
CONSTANT = "its backward makes a gradient that does not depend on the one it is given"


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [(custom.Clips, (f(3, 4),), f"Clips: {NOT_LINEAR}"), (custom.Ignores, (f(3, 4), f(4)), f"Ignores: {CONSTANT}")],
    ids=["Clips", "Ignores"],
)
def test_a_gradient_that_is_no_linear_map(function: type[Function], args: tuple[Any, ...], reason: str) -> None:
    """Exact on whole values; where a batch is divided its gradients would be scaled before they get there."""
    way = rule_of(function, *args)
    assert (way.rule, way.reason) == ("", reason)
    model = made(lambda x, w: function.apply(x, *[w][: len(args) - 1]))
    assert tpcompile.check(model, "tp=2", batch(), loss=squares).ok
    with pytest.raises(Refused, match=re.escape(reason)):
        tpcompile.check(model, "dp=2", batch(), loss=squares)


def test_what_draws_random_numbers_is_said_to() -> None:
    way = rule_of(custom.Drops, f(3, 4))
    assert (way.rule, way.reason, way.random) == ("", "Drops draws random numbers", True)
    model = made(lambda x, w: custom.Drops.apply(x))
    tpcompile.compile(model, "tp=1", batch())
    with pytest.raises(Refused, match=r"draws random numbers that ranks would not share\n.*\n  from test_functions.py"):
        tpcompile.compile(model, "tp=2", batch())


def test_a_region_that_it_stops_says_why() -> None:
    compiled = tpcompile.compile(made(lambda x, w: custom.Averaged.apply(x)), "tp=2", batch())
    plan = compiled.history["plan"].made
    assert not plan.regions
    reasons = [left.reason for left in plan.whole]
    assert any(reason.startswith("tpcompile_functions.averaged") and "needs this dimension whole" in reason for reason in reasons)


# --- refused


class Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Wraps(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, [x]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        return grad * 2


class Branches(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 if grad.sum() > 0 else grad


class Reads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.module.weight, None


class Spoils(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.mul_(grad)


class Mapped(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


SOMEWHERE = nn.LayerNorm(12).double()
TORCH = "write its forward and backward with torch operations on what they are given"
TENSORS = "write it so that it takes and returns tensors, numbers and strings"
REFUSED: list[tuple[Callable[[Tensor, Any], Any], str, str]] = [
    (lambda x, w: Writes.apply(x), "Writes writes to a tensor that it is given", "return a new tensor"),
    (lambda x, w: Wraps.apply(x)[0], "Wraps returns a list", TENSORS),
    (
        lambda x, w: Branches.apply(x),
        "Branches is an autograd.Function that cannot be traced: Could not guard on data-dependent expression Eq(u0, 1)",
        TORCH,
    ),
    (
        lambda x, w: Reads.apply(x, SOMEWHERE),
        "Reads is an autograd.Function that cannot be traced: it reads a tensor that it is not given",
        TORCH,
    ),
    (
        lambda x, w: Spoils.apply(x),
        "Spoils is an autograd.Function that cannot be traced: its backward writes to a tensor that forward was given",
        TORCH,
    ),
    (lambda x, w: torch.vmap(Mapped.apply)(x), "Mapped is an autograd.Function under torch.vmap", "apply it to the whole tensor"),
    (
        lambda x, w: custom.Wave.apply(x, x.shape[0] / 2),
        "Wave is given a number that is computed from sizes",
        "give it the size, and compute inside",
    ),
]


@pytest.mark.parametrize(("work", "what", "fix"), REFUSED, ids=[what.split()[0] for _, what, _ in REFUSED])
def test_refused(work: Callable[[Tensor, Any], Tensor], what: str, fix: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(made(work), batch())
    place = work if fix != TORCH else Work.forward  # a graph knows the lines of modules
    line = inspect.getsourcelines(place)[1] + (fix == TORCH)
    assert torch.autograd.Function.__dict__["apply"] is functions._APPLY
    assert str(caught.value).splitlines()[0] == what
    assert caught.value.source == f"{Path(__file__).name}:{line}" and caught.value.fix == fix and caught.value.at


def test_forward_that_depends_on_data() -> None:
    class Depends(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x  # here

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    with pytest.raises(CaptureError, match=r"data-dependent.*\n  at   return x if x.sum\(\) > 0 else -x  # here\n  from test_functions.py"):
        capture(made(lambda x, w: Depends.apply(x)), batch())


# --- memory


class Shares(Function):
    """Returns its operand's memory, as autograd does not notice; beside another value if it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, both: bool) -> Any:
        return (x.detach(), x * 2) if both else x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor | None = None) -> Any:  # type: ignore[override]
        return grad if other is None else grad + other * 3, None


def test_a_result_in_the_memory_of_an_operand() -> None:
    """What is written to the operand later would be seen in the result, but its gradient would go another way."""

    def later(x: Tensor, weight: Tensor, *, both: bool, written: bool = True) -> Tensor:
        y = x * 1
        made = Shares.apply(y, both)
        if written:
            y.add_(weight)
        return sum(made) + y if both else made * 2 + y  # type: ignore[no-any-return]

    for both in (False, True):
        assert tpcompile.check(made(partial(later, both=both, written=False)), "tp=2", batch(), loss=squares).ok
        with pytest.raises(CaptureError, match=r"^Shares returns a tensor that it is given, which is then changed in place\n"):
            capture(made(partial(later, both=both)), batch())


def test_torch_refuses_a_write_to_a_view_that_it_knows_of() -> None:
    with pytest.raises(InputError, match="Output 0 of Reverse is a view and is being modified inplace"):
        capture(made(lambda x, w: custom.Reverse.apply(x * 1).add_(1)), batch())


# --- programs


def emitted(work: Callable[[Tensor, Any], Tensor]) -> tuple[Work, str]:
    model = made(work)
    return model, tpcompile.compile(model, "tp=2", batch()).program(0).source


def test_source_imports_and_applies_it() -> None:
    _, source = emitted(lambda x, w: custom.Bend.apply(custom.Wave.apply(x, 2.0), {"scale": 1.5, "rest": [1, None]}))
    assert "\nfrom custom_functions import Bend\nfrom custom_functions import Wave\n" in source
    assert "wave = Wave.apply(linear, 2.0)" in source
    assert "bend = Bend.apply(wave, {'scale': 1.5, 'rest': [1, None]}, 2)" in source or "Bend.apply(wave, {" in source
    assert "torch.ops" not in source.replace("torch.ops.aten", "")


def test_source_takes_tensors_from_what_it_returns() -> None:
    _, source = emitted(lambda x, w: custom.Halves.apply(x)[3])
    assert "operator.itemgetter(0, 2, 3)(Halves.apply(linear))" in source and "import operator" in source


def test_a_function_that_no_file_can_import_is_called_by_its_operator() -> None:
    class Local(custom.Wave):
        pass

    model, source = emitted(lambda x, w: Local.apply(x, 2.0))
    assert not functions.importable(Local) and functions.importable(custom.Wave)
    assert "Operators of tpcompile_functions have to be registered before." in source
    assert "local = torch.ops.tpcompile_functions.local_x" in source and "import Local" not in source
    whole = tpcompile.compile(model, "tp=1", batch()).program(0).module
    ours, theirs = whole(**batch())[0], model(**batch())
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(ours, theirs)
    for name, parameter in model.named_parameters():
        other = whole.get_parameter(name).grad
        assert (other is None and parameter.grad is None) or torch.equal(other, parameter.grad)


def test_an_operator_traces_into_another_compiler() -> None:
    """Where its result is its operand, what traces it sees a copy."""
    call = operator(rule_of(custom.Reverse, f(3, 4)))
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.compile(lambda x: call(x * 2).exp(), backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(y, (x * 2).exp()) and torch.equal(x.grad, -4 * y)


def test_a_class_that_is_defined_anew_is_another_operator() -> None:
    def define(factor: int) -> type[Function]:
        class Same(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * factor

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad * factor

        return Same

    first, second = (operator(Kept(define(n), (functions.Operand(0),), {}, (False,), None)) for n in (2, 3))
    assert first is not second and second._opname == f"{first._opname}_1"
    assert torch.equal(second(torch.ones(2)), torch.full((2,), 3.0))
    again = kept(first)
    assert again is not None and operator(Kept(again.function, again.args, {}, (False,), None)) is first


def test_names_of_operators() -> None:
    names = {"GeLUFunction": "ge_lu_function", "Lambda": "lambda_function", "_Act2": "act2", "Élan": "lan", "X": "x"}
    for given, expected in names.items():
        made_up: Any = type(given, (custom.Wave,), {})
        assert operator(Kept(made_up, (functions.Operand(0), 1.0), {}, (False,), None))._opname.startswith(f"{expected}_x")
