"""The module that holds this rank's parameters, and runs whichever capture is asked for with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from tpcompile.errors import Refused


class StageRoot(nn.Module):
    """One pipeline stage. The first capture's module owns the parameters; later captures borrow them by name at every call.

    Data-parallel wrappers go around this module, once: they may replace its parameters, and later captures still find them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.program = module
        self._others: list[tuple[nn.Module]] = []  # in tuples: not submodules, so that their own parameters count nowhere
        self.capture = 0
        self.first_only = False  # while a schedule runs: the loss alone is what the schedule handles
        self.collected: list[tuple[Tensor, ...]] | None = None

    def adopt(self, module: nn.Module) -> int:
        """Another capture of the same stage; returns its number. Raises Refused if its parameters are not the first's."""
        own = {name: p.shape for name, p in self.named_own_parameters()}
        for name, p in module.named_parameters():
            if own.get(name) != p.shape:
                held = f"of local shape {list(own[name])}" if name in own else "absent"
                raise Refused(
                    f"parameter {name} of local shape {list(p.shape)} was {held} when the model was first captured",
                    fix="compile with example_inputs that use every parameter, or compile a second object for these inputs",
                )
        self._others.append((module,))
        return len(self._others)

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the user's model."""
        return self.program.named_parameters()

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self._run(*received, **inputs)
        if self.collected is not None:
            self.collected.append(tuple(output.detach() for output in outputs))
        return outputs[:1] if self.first_only else outputs

    def _run(self, *received: Tensor, **inputs: Tensor) -> Any:
        if self.capture == 0:
            return self.program(*received, **inputs)
        (module,) = self._others[self.capture - 1]
        borrowed = {name: p for name, p in self.named_own_parameters()}
        wanted = {name: borrowed[name] for name, _ in module.named_parameters()}
        return functional_call(module, wanted, received, inputs)
