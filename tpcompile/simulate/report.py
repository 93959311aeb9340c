"""What a check found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tpcompile.simulate.wire import Total


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart. `loss` is relative for a loss above 1; `gradient` counts the model's largest gradient,
    and for outputs their own largest element.

    Where they come from: float64 leaves 1e-16 per operation, and a reduction over ranks adds in another order; a model that casts to
    float32 inside leaves 1e-7 of that.
    """

    loss: float  # 1e-10 in float64
    gradient: float  # 1e-9 in float64


@dataclass(frozen=True)
class Divergence:
    """The first value that differs from one device's, in the order of the program; a gradient in the order of backward."""

    kind: str  # "parameter", "value" or "gradient"
    name: str  # as compiled.history prints it; of a parameter its name in the model
    error: float  # of a value beside its largest element, of a gradient beside the model's largest
    stage: int  # where it is made
    source: str  # the model's line

    def __str__(self) -> str:
        return f"{self.kind} {self.name} in stage {self.stage}, off by {self.error:.1e}" + (f", from {self.source}" if self.source else "")


@dataclass(frozen=True)
class Report:
    """The compiled model beside the untouched one. Errors of gradients and parameters count the model's largest gradient."""

    mesh: str  # on which its ranks were run
    tolerance: Tolerance  # what is allowed
    loss: float  # of the untouched model
    loss_error: float  # relative, for a loss above 1
    output_error: float  # the largest of all outputs, beside its largest element
    grad_errors: Mapping[str, float]  # by the parameter's name
    parameter_errors: Mapping[str, float]  # after the steps, by name
    skipped: int = 0  # elements whose gradient is too small for the optimizer's step to be compared
    capture_error: float = 0.0  # the captured graph beside the untouched model, before anything is cut
    first_divergence: Divergence | None = None  # where to look, if the numbers differ
    notes: tuple[str, ...] = ()  # what was not compared, and why
    traffic: tuple[Total, ...] = ()  # what the ranks of one replica handed to each other in the first step
    traffic_errors: tuple[str, ...] = ()  # where the compiler's formulas say otherwise
    parameter_tolerance: float = field(default=0.0)  # what is allowed for parameter_errors
    buffer_errors: Mapping[str, float] = field(default_factory=dict)  # of those that forward updates; relative to their largest element

    @property
    def ok(self) -> bool:
        """Whether all errors are within their tolerances, and the traffic is what the formulas say."""
        worst = max([*self.grad_errors.values(), *self.buffer_errors.values(), self.capture_error], default=0.0)
        close = self.loss_error <= self.tolerance.loss and max(self.output_error, worst) <= self.tolerance.gradient
        return close and not self.traffic_errors and max(self.parameter_errors.values(), default=0.0) <= self.parameter_tolerance

    def to_json(self) -> str:
        """All figures, as JSON."""
        shown = {
            "ok": self.ok,
            "mesh": self.mesh,
            "tolerance": vars(self.tolerance) | {"parameter": self.parameter_tolerance},
            "loss": self.loss,
            "loss_error": self.loss_error,
            "output_error": self.output_error,
            "capture_error": self.capture_error,
            "grad_errors": dict(self.grad_errors),
            "parameter_errors": dict(self.parameter_errors),
            "buffer_errors": dict(self.buffer_errors),
            "skipped": self.skipped,
            "first_divergence": vars(self.first_divergence) if self.first_divergence else None,
            "notes": list(self.notes),
            "traffic": [vars(total) for total in self.traffic],
            "traffic_errors": list(self.traffic_errors),
        }
        return json.dumps(shown, indent=2)

    def __rich__(self) -> Table:
        table = Table(title=f"{'equal' if self.ok else 'DIFFERENT'} on {self.mesh}", title_justify="left")
        for heading in ("compared", "worst error", "tolerance", "where"):
            table.add_column(heading)
        rows = [
            ("captured graph, before it is cut", self.capture_error, self.tolerance.gradient, ""),
            ("loss", self.loss_error, self.tolerance.loss, ""),
            ("outputs", self.output_error, self.tolerance.gradient, ""),
            ("gradients", *_worst(self.grad_errors, self.tolerance.gradient)),
            ("parameters after the step", *_worst(self.parameter_errors, self.parameter_tolerance)),
        ]
        if self.buffer_errors:
            rows.append(("buffers after the step", *_worst(self.buffer_errors, self.tolerance.gradient)))
        for what, error, allowed, where in rows:
            table.add_row(what, f"{error:.1e}", f"{allowed:.0e}", where, style="" if error <= allowed else "bold red")
        if self.first_divergence:
            table.add_row("first that differs", f"{self.first_divergence.error:.1e}", "", str(self.first_divergence), style="bold red")
        for difference in self.traffic_errors:
            table.add_row("traffic", "", "", difference, style="bold red")
        for note in self.notes:
            table.add_row("note", "", "", note)
        return table

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def _worst(errors: Mapping[str, float], allowed: float) -> tuple[float, float, str]:
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), allowed, name
