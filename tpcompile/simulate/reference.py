"""The untouched model on one device: what everything is compared with."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tpcompile.errors import Refused
from tpcompile.ir import Program
from tpcompile.passes._binding import arguments
from tpcompile.rules import op_name
from tpcompile.simulate.eager import exact_dropout

DROPS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
)


POSITIONS = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
"""Where functions that drop inside take their `dropout_p`."""


class NoDropout(TorchFunctionMode):
    """Nothing is dropped, whatever the model's probabilities are."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func in DROPS:
            return args[0] if args else given["input"]
        if "dropout_p" in given:
            given["dropout_p"] = 0.0
        elif (position := POSITIONS.get(func, len(args))) < len(args):
            args = (*args[:position], 0.0, *args[position + 1 :])
        return func(*args, **given)


def refuse_numbers(program: Program) -> None:
    """Dropout can be left out on both sides; other random numbers cannot."""
    for node in program.graph.nodes:
        if op_name(node) == "tpcompile.uniform.default":
            raise Refused(
                "the model draws random numbers beside dropout, and no single device draws the same",
                at="check",
                source=str(program.sources.get(node.name, "")),
                fix='use dropout="exact", which draws the same everywhere',
            )


class Reference:
    """A copy of the user's model, trained beside the compiled one: with dropout by global index, or with none."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None, *, dropout: bool = False, seed: int = 0) -> None:
        self.model = copy.deepcopy(model)
        self.model.zero_grad()
        self._loss, self._dropout, self._seed, self._steps = loss, dropout, seed, 0

    def step(self, batch: Mapping[str, Any]) -> tuple[Tensor, list[Any]]:
        """One `loss.backward()` over the whole batch: the loss, and the output's leaves."""
        args, kwargs = arguments(self.model, batch, with_loss=self._loss is not None)
        with exact_dropout(self._seed, step=self._steps) if self._dropout else NoDropout():
            outputs = self.model(*args, **kwargs)
            loss = self._loss(outputs, batch) if self._loss else own_loss(outputs)
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        return loss.detach(), [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(outputs)]

    def parameters(self) -> dict[str, nn.Parameter]:
        """By every name, tied ones too."""
        return dict(self.model.named_parameters(remove_duplicate=False))


def own_loss(outputs: Any) -> Tensor | None:
    """The scalar that an output holds as its loss, or is."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return found if isinstance(found, Tensor) and found.dim() == 0 else None


def weighted_sum(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A loss for models without one: of all floating-point outputs times fixed weights, the mean over each row, summed over rows."""
    terms = [_per_row(leaf * _weights(leaf)).sum() for leaf in _floating(pytree.tree_leaves(outputs))]
    return reduce(operator.add, terms)


def _floating(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]


def _per_row(output: Tensor) -> Tensor:
    return output.mean(list(range(1, output.dim()))) if output.dim() > 1 else output


def _weights(output: Tensor) -> Tensor:
    """cos(0), cos(1), … over the last dimension: irregular, and the same wherever they are computed."""
    return torch.cos(torch.arange(output.shape[-1], device=output.device, dtype=output.dtype)) if output.dim() else output.new_ones(())
