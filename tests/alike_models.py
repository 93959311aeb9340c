"""Models whose layers are alike, and models whose layers look alike and are not, for the tests of capture."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, LAYERS = 6, 5


class Layer(nn.Module):
    """A norm, two linears, a residual sum; what is special about it, `more` does."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(SIZE)
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.down = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        return x + self.down(self.more(torch.relu(self.up(self.norm(x))), *given, **named))

    def more(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        return x


class Model(nn.Module):
    """Layers one after the other."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(SIZE))  # so that all layers are given what gradients flow to
        self.layers = nn.ModuleList(layer(index) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.shift)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(Layer):
    """By a number that depends on the index, and that export writes into the graph."""

    def more(self, x: Tensor) -> Tensor:
        return x / (self.index + 1)


class ScaledInTheMiddle(Layer):
    """All but one layer are alike, and neither the first nor the last is the other one."""

    def more(self, x: Tensor) -> Tensor:
        return x * (3 if self.index == 2 else 2)


class Dropping(Layer):
    """A rate of dropout for every layer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.dropout = nn.Dropout(0.1 * index)

    def more(self, x: Tensor) -> Tensor:
        return self.dropout(x)  # type: ignore[no-any-return]


class Constant(Layer):
    """A buffer with other values in every layer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("scale", torch.full((2 * SIZE,), float(index)))

    def more(self, x: Tensor) -> Tensor:
        return x * self.scale


class Plain(Layer):
    """A tensor that is a plain attribute: export takes it for a constant."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = torch.full((2 * SIZE,), float(index))

    def more(self, x: Tensor) -> Tensor:
        return x * self.scale


class Listed(Layer):
    """Modules in a Python list that a function encloses: they are no part of the layer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        hidden = [lambda x: x * index]
        self.apply_hidden = lambda x: hidden[0](x)

    def more(self, x: Tensor) -> Tensor:
        return self.apply_hidden(x)  # type: ignore[no-any-return]


class Enclosed(Layer):
    """A method made for the layer, with a number that it encloses."""

    def __init__(self, index: int) -> None:
        super().__init__(index)

        def more(x: Tensor) -> Tensor:
            return x + index

        self.more = more  # type: ignore[method-assign]


class Counting(Layer):
    """What one layer writes to an object that all share, the next one reads."""

    state = {"calls": 0}  # noqa: RUF012 (that is the point)

    def more(self, x: Tensor) -> Tensor:
        self.state["calls"] = self.state["calls"] % LAYERS + 1
        return x * self.state["calls"]


CALLS = [0]


class CountingOutside(Layer):
    """The same in a variable of the module."""

    def more(self, x: Tensor) -> Tensor:
        CALLS[0] = CALLS[0] % LAYERS + 1
        return x * CALLS[0]


class Iterating(Layer):
    """A number from an iterator that all layers share."""

    numbers = itertools.cycle(range(1, LAYERS + 1))

    def more(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


class Shares(Layer):
    """A module that all layers have."""

    def __init__(self, index: int, shared: nn.Module) -> None:
        super().__init__(index)
        self.shared = shared

    def more(self, x: Tensor) -> Tensor:
        return self.shared(x)  # type: ignore[no-any-return]


class Tied(Layer):
    """In every second layer, both linears have one bias."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.first, self.second = (nn.Parameter(torch.randn(2 * SIZE)) for _ in range(2))
        if index % 2:
            self.second = self.first

    def more(self, x: Tensor) -> Tensor:
        return x * self.first + self.second


class Reading(Layer):
    """All of its attributes at once, through the object's dictionary."""

    def more(self, x: Tensor) -> Tensor:
        return x * vars(self)["index"]


class Writing(Layer):
    """In place, to a value that it is given and that the model reads afterwards."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        return super().forward(x) * seen  # type: ignore[no-any-return]


class Sum(Model):
    """The layers write to one tensor."""

    def run(self, x: Tensor) -> Tensor:
        seen = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, seen)
        return x + seen


class Counter(Layer):
    """A counter of its calls, which is a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def more(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return x * self.calls


class Given(Model):
    """An argument that depends on the index."""

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, factor=index)
        return x


class TakesFactor(Layer):
    def more(self, x: Tensor, factor: int) -> Tensor:
        return x * factor


class TakesMask(Layer):
    def more(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x * mask


class Masked(Model):
    """Every second layer gets a mask, which comes in two kinds: sliding and full attention."""

    def run(self, x: Tensor) -> Tensor:
        full, sliding = torch.ones(2 * SIZE), torch.zeros(2 * SIZE)
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=None if index % 3 == 0 else (full, sliding)[index % 2])
        return x


class Alternating(Layer):
    """Two kinds of layers, by an attribute."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.sliding = bool(index % 2)

    def more(self, x: Tensor) -> Tensor:
        return x.cumsum(-1) if self.sliding else x


class Frozen(Model):
    """Some layers run without gradients."""

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with torch.no_grad() if index in (1, 3) else contextlib.nullcontext():
                x = layer(x)
        return x


class Telling(Model):
    """The model tells each layer its index through an object that all share, and takes it back."""

    def __init__(self) -> None:
        super().__init__(Told)
        self.told = {"index": 0}
        for layer in self.layers:
            layer.told = self.told  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.told["index"] = index if index not in (0, LAYERS - 1) else 7
            x = layer(x)
        self.told["index"] = 7
        return x


class Told(Layer):
    told: dict[str, int]

    def more(self, x: Tensor) -> Tensor:
        return x * self.told["index"]


class Collecting(Model):
    """The layers add what they make to a list that they are given."""

    def run(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return x + torch.stack(seen).sum(0)


class Adding(Layer):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x * 2)
        return super().forward(x)  # type: ignore[no-any-return]


class Passing(Layer):
    """Returns what it is given, a new value, and one without a gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Any]:
        return super().forward(x) * mask, mask, {"none": None}


class PassingOn(Model):
    def run(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for layer in self.layers:
            x, mask, _ = layer(x, mask)
        return x * mask


class Drawing(Layer):
    """Dropout, and random numbers."""

    def more(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training) * torch.rand_like(x)


class Unrolled(Model):
    """Each layer on a line of its own, one of them twice."""

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[2](x)
        x = self.layers[2](x)
        x = self.layers[3](x)
        return self.layers[4](x)  # type: ignore[no-any-return]


class Skipping(Model):
    """The last layer that looks alike never runs."""

    def run(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return x


def hooked() -> Model:
    """A hook on one layer."""
    model = Model()
    model.layers[2].register_forward_hook(lambda module, given, made: made * 2)
    return model


def hooked_inside() -> Model:
    """A hook on a module of one layer."""
    model = Model()
    model.layers[2].down.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return model


def patched() -> Model:
    """One layer has a forward of its own."""
    model = Model()
    layer = model.layers[2]
    layer.forward = lambda x: x * 2  # type: ignore[method-assign]
    return model


def frozen_weight() -> Model:
    """A weight of one layer is not trained."""
    model = Model()
    model.layers[2].up.weight.requires_grad_(False)
    return model


def in_eval() -> Model:
    """One layer is in eval mode."""
    model = Model(Drawing)
    model.layers[2].eval()
    return model


def sharing() -> Model:
    shared = nn.Linear(2 * SIZE, 2 * SIZE)
    return Model(lambda index: Shares(index, shared))


def one_linear() -> Model:
    """All layers have one weight."""
    model = Model()
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    return model


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class Applies(Layer):
    """A custom autograd.Function."""

    def more(self, x: Tensor) -> Tensor:
        return Twice.apply(x)  # type: ignore[no-any-return]


class Encoder(Model):
    """torch's own layers, whose code is torch's."""

    def __init__(self) -> None:
        super().__init__(lambda index: nn.TransformerEncoderLayer(SIZE, 2, 2 * SIZE, batch_first=True))


class Again(Model):
    """One layer, called again and again."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer, times: int = 6) -> None:
        super().__init__(layer, layers=1)
        self.times = times

    def run(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layers[0](x)
        return x


class AgainOnAttribute(Again):
    """The same, of a layer that is in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.layers[0]
        del self.layers

    def run(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


class AgainAndAgain(Again):
    """Called as often, each time with another number."""

    def run(self, x: Tensor) -> Tensor:
        for step in range(self.times):
            x = self.layers[0](x, step)
        return x


class AgainChanged(Again):
    """An attribute that the layer reads is another one at each call."""

    def run(self, x: Tensor) -> Tensor:
        for step in range(self.times):
            self.layers[0].index = step
            x = self.layers[0](x)
        return x


class Stage(nn.Module):
    """Layers, then a scale: of stages with as many parameters, some are alike."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * 2


class Stages(Model):
    """Lists of layers, of which each is a layer of a list."""

    def __init__(self, *layers: int) -> None:
        super().__init__(lambda index: Stage(layers[index]), len(layers))


class TwoPasses(Model):
    """All layers, twice: what is called again has layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(4)
        del self.layers

    def run(self, x: Tensor) -> Tensor:
        return self.stage(self.stage(x))  # type: ignore[no-any-return]


ALIKE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Model, 3),
    "another buffer": (lambda: Model(Constant), 3),
    "passing on": (lambda: PassingOn(Passing), 3),
    "random": (lambda: Model(Drawing), 3),
    "one weight": (one_linear, 3),
    "unread index": (lambda: Model(layers=7), 5),
    "no masks, sliding, full": (lambda: Masked(TakesMask, layers=9), 5),
    "alternating": (lambda: Model(Alternating, layers=8), 4),
    "function": (lambda: Model(Applies), 3),
    "torch's encoder": (Encoder, 3),
    "one line each": (Unrolled, 4),
    "without gradients": (lambda: Frozen(layers=8), 2),
    "the last never runs": (lambda: Skipping(), 2),
    "one layer again and again": (Again, 3),  # a second call shows that it is one
    "one layer of no list": (AgainOnAttribute, 3),
    "alike stages": (lambda: Stages(2, 2, 2, 2), 2),
    "stages of layers": (lambda: Stages(2, 5, 4), 7),  # of one list or of another
    "all layers twice": (TwoPasses, 5),  # the last of the list is traced each time
}
"""Models, and how many of their layers are copies: of every kind, all but the first and the last."""

UNLIKE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "again with another number": (lambda: AgainAndAgain(TakesFactor), 0),
    "again after a change": (lambda: AgainChanged(Scaled), 0),
    "again with dropout": (lambda: Again(Dropping), 3),
    "again, and counts": (lambda: Again(CountingOutside), 0),
    "scaled by the index": (lambda: Model(Scaled), 0),
    "scaled in the middle": (lambda: Model(ScaledInTheMiddle), 0),
    "rates of dropout": (lambda: Model(Dropping), 0),
    "plain tensor": (lambda: Model(Plain), 0),
    "a list in a closure": (lambda: Model(Listed), 0),
    "a method that encloses": (lambda: Model(Enclosed), 0),
    "counts in a class": (lambda: Model(Counting), 0),
    "counts outside": (lambda: Model(CountingOutside), 0),
    "iterates": (lambda: Model(Iterating), 0),
    "a shared module": (sharing, 0),
    "tied in every second": (lambda: Model(Tied), 1),
    "reads its dictionary": (lambda: Model(Reading), 0),
    "writes in place": (lambda: Sum(Writing), 0),
    "counts in a buffer": (lambda: Model(Counter), 0),
    "given an index": (lambda: Given(TakesFactor), 0),
    "told an index": (Telling, 0),
    "adds to a list": (lambda: Collecting(Adding), 0),
    "a hook": (hooked, 2),
    "a hook inside": (hooked_inside, 2),
    "a forward of its own": (patched, 2),
    "a frozen weight": (frozen_weight, 2),
    "in eval mode": (in_eval, 2),
}
"""The same of models whose layers look alike; those that are copies stand between layers that are."""
