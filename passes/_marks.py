"""Private to capture: the operators by which the calls of layers stand in an exported graph. They compute nothing, and are never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

LIBRARY = torch.library.Library("tpcompile_layers", "DEF")  # type: ignore[no-untyped-call]
SCHEMAS = (
    "begin(int call, Tensor[] operands) -> ()",
    "end(int call, Tensor[] results) -> ()",
    "again(int call, Tensor[] operands, Tensor[] like) -> Tensor[]",
)


def _nothing(call: int, tensors: Sequence[Tensor]) -> None:
    return None


def _fresh(call: int, operands: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same sizes, strides and types."""
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in like]


def _no_backward(context: Any, gradients: Any) -> Any:
    raise NotImplementedError("an operator that stands for a layer is never run")


for _schema in SCHEMAS:
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _name in ("begin", "end"):
    LIBRARY.impl(_name, _nothing, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("again", _fresh, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("tpcompile_layers::again", _fresh, lib=LIBRARY)
torch.library.register_autograd("tpcompile_layers::again", _no_backward, lib=LIBRARY)

BEGIN = torch.ops.tpcompile_layers.begin.default
END = torch.ops.tpcompile_layers.end.default
AGAIN = torch.ops.tpcompile_layers.again.default
for _operator in (BEGIN, END, AGAIN):
    fx.node.has_side_effect(_operator)
