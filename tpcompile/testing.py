"""For test suites of models: one line that fails when a compiled model would not train to the same numbers.

    def test_my_model_trains_the_same_in_parallel():
        tpcompile.testing.assert_parity(MyModel(), "pp=2,tp=2", batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.mesh import Mesh
from tpcompile.simulate import check
from tpcompile.simulate.eager import exact_dropout

__all__ = ["assert_parity", "exact_dropout"]


def assert_parity(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare every rank's program with the untouched model: loss, outputs, every gradient, every parameter after a step.

    Runs in this process; needs no launcher and no GPU. `model`, `mesh`, `example_inputs` and `options` are those of `tpcompile.check`.
    Raises AssertionError with the table of what differs and the first value that does, and what `tpcompile.check` raises: InputError,
    CaptureError, Refused.
    """
    __tracebackhide__ = True
    report = check(model, mesh, example_inputs, **options)
    if not report.ok:
        raise AssertionError(f"the compiled model differs on {Mesh.of(mesh)}\n{report}")
