"""A model on the meta device is captured as the CPU would run it: what it asks of a device has the answers of one that has values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def as_on_cpu(model: nn.Module) -> Iterator[FakeTensorMode | None]:
    """While inside, the model's tensors on the meta device are fake ones that say they are on the CPU; tied ones stay tied.

    Yields the mode that they belong to, or None where all have values.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        yield None
        return
    # as torch.export makes its own for a module that has none
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True), allow_non_fake_inputs=True, export=True)
    made: dict[int, Tensor] = {}
    cpu = torch.device("cpu")

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new: Any = FakeTensor(mode, tensor.detach(), cpu)
            if isinstance(tensor, nn.Parameter):  # what nn.Parameter makes of a tensor with a class of its own, without another copy
                new._is_param = True
                new.requires_grad_(tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    def restore(held: dict[str, Any], name: str, tensor: Tensor) -> None:
        held[name] = tensor

    with ExitStack() as stack:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for held in tables:
                for name, tensor in list(held.items()):
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        stack.callback(restore, held, name, tensor)
                        held[name] = fake(tensor)
        stack.enter_context(tracing(TracingContext(mode)))
        yield mode
