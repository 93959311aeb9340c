"""What cannot be captured faithfully is refused: the whole message, with the reason, the line and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import predispatch
from torch.utils.checkpoint import checkpoint

from tpcompile.errors import CaptureError, InputError, TpcompileError
from tpcompile.passes.capture import bind_example, capture


class Model(nn.Module):
    """Two linears, a buffer and tensors that are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("twin", self.mean)
        self.hidden = [nn.Parameter(torch.ones(6))]
        self.plain = torch.zeros(6)


class Branch(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y if y.sum() > 0 else -y  # here


class Fault(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.plain = torch.ones(5)
        self.norm(torch.randn(3, 6))
        return self.a(x) + torch.ones(5)  # here


class VmapWithoutGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        def scale(row: Tensor) -> Tensor:
            with torch.no_grad():
                size = row.norm()
            return row / size

        return torch.vmap(scale)(self.a(x))  # here


class Tangent(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(torch.sin, (self.a(x),), (x,))[1]  # here


class AutocastInside(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x) @ x.mT  # here
        return y.float()


class MeanWithGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.steps.mul_(0.9).add_(y.mean())  # here
        return y


class Growing(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.a(x)[:, 0].sum(0).detach()  # here
        return self.a(x)


class PlainInPlace(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.plain += 1  # here
        return self.a(x) * self.plain


class PlainReplaced(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.plain = self.plain + 1  # here
        return self.a(x) * self.plain


class NewBuffer(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("cache", x.mean(0))
        return self.a(x)


class Parted(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        return self.a(x)


class Shared(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.mean[0]
        return self.a(x)


class Resized(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = x.new_empty(0)
        torch.mul(x, 2, out=y)  # here
        return self.a(y)


class NormRunTwice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, self.a(x).mT, use_reentrant=False)  # here


class AssignedTwice(Model):
    def count(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x * self.steps

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.count, self.a(x), use_reentrant=True)  # here


class NativeNorm(Model):
    def forward(self, x: Tensor) -> Tensor:
        y, *_ = torch.native_batch_norm(self.a(x), None, None, self.norm.running_mean, self.norm.running_var, True, 0.1, 1e-5)  # here
        return y


class ClampWithoutGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y.clamp_(min=0)  # here
        return y


class WriteDetached(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.detach().mul_(2)  # here
        return y * y


class Sorted(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.diagonal(dim1=1, dim2=2).unfold(1, 2, 1).mul_(2)  # here
        return self.a(x) + y


class Stranger(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.hidden[0]  # here


X = {"x": torch.ones(4, 6, 6)}


def line(model: type) -> str:
    """ "test_capture_errors.py:31", where a model's source says so."""
    lines, start = inspect.getsourcelines(model)
    return f"{Path(__file__).name}:{start + next(i for i, text in enumerate(lines) if text.rstrip().endswith('# here'))}"


def code(model: type) -> str:
    return next(text for text in inspect.getsource(model).splitlines() if text.endswith("# here")).strip()


def refusal(kind: type[TpcompileError], run: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        run()
    return str(caught.value)


REASONS: list[tuple[type[Model], str, str]] = [
    (
        Branch,
        "torch.export cannot capture Branch: Could not guard on data-dependent expression Eq(u0, 1)",
        "choose with torch.where instead of a Python branch, so that the graph is the same for all values",
    ),
    (
        AutocastInside,
        "autocast to bfloat16 is turned on for cpu in forward: its casts cannot be captured",
        "cast with .to(dtype) where it is needed, and leave autocast out",
    ),
    (
        VmapWithoutGradient,
        "forward uses torch.vmap around a change of grad mode or autocast",
        "write this part with a batch dimension of its own",
    ),
    (Tangent, "forward uses torch.func: _jvp_increment_nesting cannot be captured", "write this part with a batch dimension of its own"),
    (
        MeanWithGradient,
        "the new value of steps carries a gradient from one step to the next",
        "compute it under torch.no_grad(), or from detached values",
    ),
    (
        Growing,
        "forward gives steps another type or size: float32 [], float32 [6]",
        "keep what a buffer holds in one type and size",
    ),
    (
        PlainInPlace,
        "forward changes plain, which is a plain attribute: it would be taken for a constant",
        "register it with register_buffer, so that it is a part of the model's state",
    ),
    (
        PlainReplaced,
        "forward reads plain and puts another tensor in its place, and it is a plain attribute, no buffer",
        "register it with register_buffer, so that it is a part of the model's state",
    ),
    *(
        (
            model,
            f"forward changes {name} under activation checkpointing, which runs it twice",
            "change it outside, or turn the model's own checkpointing off",
        )
        for model, name in ((NormRunTwice, "norm.num_batches_tracked"), (AssignedTwice, "steps"))
    ),
    (Resized, "mul changes the size of a tensor that it is given", "write it without out="),
    (
        NativeNorm,
        "the model updates its running statistics in forward, by aten::native_batch_norm",
        "use torch.nn.functional.batch_norm",
    ),
    (
        ClampWithoutGradient,
        "clamp_ writes under no_grad to a value that gradients flow through",
        "write it without changing a tensor in place",
    ),
    (WriteDetached, "mul_ writes to a detached value that gradients flow through", "write it without changing a tensor in place"),
    (Sorted, "mul_ writes through a view that unfold made", "write it without changing a tensor in place"),
    (
        Stranger,
        "a tensor that requires a gradient is no parameter of the model: it would be taken for a constant",
        "keep it as an nn.Parameter attribute, or in an nn.ParameterList; a loss with parameters belongs into the model",
    ),
]


@pytest.mark.parametrize(("model", "reason", "fix"), REASONS, ids=[model.__name__ for model, _, _ in REASONS])
def test_refused(model: type[Model], reason: str, fix: str) -> None:
    message = refusal(CaptureError, lambda: capture(model(), X))
    assert message == f"{reason}\n  at   {code(model)}\n  from {line(model)}\n  fix  {fix}"


@pytest.mark.parametrize(
    ("model", "reason", "fix"),
    [
        (NewBuffer, "forward registers a buffer, cache", "register it when the model is made"),
        (Parted, "forward parts mean and twin, which are one buffer", "change the buffer in place, under torch.no_grad()"),
        (Shared, "forward makes the buffers steps and mean share memory", "clone what is assigned to steps"),
    ],
)
def test_what_forward_does_to_the_list_of_buffers(model: type[Model], reason: str, fix: str) -> None:
    """No operation shows it, so there is no line of the model to give: it is the call's."""
    first, *middle, last = refusal(CaptureError, lambda: capture(model(), X)).splitlines()
    assert (first, last) == (reason, f"  fix  {fix}")
    assert [text.split()[0] for text in middle] == ["from"] and Path(__file__).name in middle[0]


def test_a_refused_write_leaves_the_model_as_it_is() -> None:
    model = PlainInPlace()
    refusal(CaptureError, lambda: capture(model, X))
    assert model.plain.equal(torch.zeros(6))


def test_a_model_that_does_not_run() -> None:
    """Its own error, with its line, and nothing of torch.export's. The attempt to run it leaves its buffers and random numbers alone."""
    model = Fault()
    generator = torch.get_rng_state()
    assert refusal(InputError, lambda: capture(model, X)) == (
        "Fault does not run on this batch: RuntimeError: The size of tensor a (6) must match the size of tensor b (5) at non-singleton "
        "dimension 2\n"
        "  at   return self.a(x) + torch.ones(5)  # here\n"
        f"  from {line(Fault)}\n"
        "  fix  give it a batch that model(**batch) takes, or mend this line; nothing was compiled"
    )
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.norm.num_batches_tracked == 0 and model.steps == 0 and model.plain.equal(torch.zeros(6))


def test_ids_that_are_no_whole_numbers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids)  # here

    message = refusal(InputError, lambda: capture(Words(), {"ids": torch.ones(2, 3)}))
    assert message.startswith("Words does not run on this batch: RuntimeError: Expected tensor for argument #1 'indices' to have one")
    assert f"  at   return self.words(ids)  # here\n  from {line(Words)}" in message


def test_a_loss_that_does_not_run() -> None:
    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["labels"]).mean()  # here

    batch = {"input_ids": torch.ones(4, 3), "labels": torch.ones(4, 2)}
    message = refusal(InputError, lambda: capture(Named(), batch, loss=loss))
    assert message.startswith("Named does not run on this batch: RuntimeError: The size of tensor a (3) must match")
    assert f"  from {line(loss)}" in message  # type: ignore[arg-type]


def test_a_model_without_values_is_not_run() -> None:
    message = refusal(CaptureError, lambda: capture(Fault().to("meta"), X))
    assert message.startswith("torch.export cannot capture Fault: ")


def test_failures_leave_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    refusal(CaptureError, lambda: capture(Branch(), X))
    assert torch.autograd.Function.__dict__["apply"] is before
    assert predispatch._remove_batch_dim_impl is torch._C._functorch._remove_batch_dim
    assert capfd.readouterr() == ("", "")


def here() -> str:
    """The line of the call."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{Path(__file__).name}:{frame.f_back.f_lineno}"


def test_autocast_around_the_call() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        place, message = here(), refusal(CaptureError, lambda: capture(Branch(), X))
    assert message == (
        "autocast is on for cpu: its casts would not be captured\n"
        f"  from {place}\n"
        "  fix  call this outside of autocast, with a model in the type that it should run in"
    )


class Named(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return input_ids.float()


def test_what_forward_needs() -> None:
    place, message = here(), refusal(InputError, lambda: capture(Named(), {"labels": torch.ones(4)}))
    assert message == (
        "forward needs 'input_ids', which the batch does not have\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  add 'input_ids' to the batch"
    )


def test_what_forward_does_not_take() -> None:
    batch = {"input_ids": torch.ones(4), "lables": torch.ones(4)}
    place, message = here(), refusal(InputError, lambda: capture(Named(), batch))
    assert message == (
        "forward takes no 'lables'\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  rename it to 'labels', or leave it out"
    )
    capture(Named(), batch, loss=lambda outputs, batch: (outputs * batch["lables"]).mean())


def test_all_problems_at_once() -> None:
    place, message = here(), refusal(InputError, lambda: capture(Named(), {"weights": torch.ones(4), "labels": object()}))
    assert message == (
        "3 problems\n"
        "forward takes no 'weights'\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  leave it out, or pass loss= that reads it\n"
        "'labels' is a object, which may hold tensors\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  pass tensors, or make its type known with torch.utils._pytree.register_pytree_node\n"
        "forward needs 'input_ids', which the batch does not have\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  add 'input_ids' to the batch"
    )


def test_too_many_positional_examples() -> None:
    place, message = here(), refusal(InputError, lambda: bind_example(Named(), (1, 2, 3)))
    assert message == (
        "3 example inputs for 2 positional arguments\n"
        "  at   Named.forward(input_ids, labels=None)\n"
        f"  from {place}\n"
        "  fix  pass at most 2, or a dict"
    )


def test_a_loss_that_is_no_number() -> None:
    batch = {"input_ids": torch.ones(4, 3)}
    place, message = here(), refusal(InputError, lambda: capture(Named(), batch, loss=lambda outputs, _: outputs))
    assert message == (
        "the loss is a tensor of 2 dimensions, float32\n"
        "  at   loss(outputs, batch)\n"
        f"  from {place}\n"
        "  fix  return one floating-point number"
    )


def test_a_loss_with_parameters() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return (outputs * self.weight).mean()  # here

    message = refusal(CaptureError, lambda: capture(Named(), {"input_ids": torch.ones(4, 3)}, loss=Learned()))
    assert message == (
        "a tensor that requires a gradient is no parameter of the model: it would be taken for a constant\n"
        "  at   return (outputs * self.weight).mean()  # here\n"
        f"  from {line(Learned)}\n"
        "  fix  keep it as an nn.Parameter attribute, or in an nn.ParameterList; a loss with parameters belongs into the model"
    )


def test_a_tensor_without_values() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, device="meta")
            self.plain = torch.ones(6, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.plain

    place, message = here(), refusal(CaptureError, lambda: capture(Plain(), X))
    assert message == (
        "forward reads plain, a tensor on the meta device that has no values\n"
        f"  from {place}\n"
        "  fix  make the model on a real device, or register this tensor as a buffer"
    )
