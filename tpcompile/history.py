"""What each pass did: the text before and after, what changed, how long it took.

print(compiled.history)                       a line for every pass
print(compiled.history["rewrite"].diff())     what it changed; diff(color=True) for a terminal
compiled.history["rewrite"].layer("3").text   of one layer
"""

from __future__ import annotations

import difflib
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import fx

from tpcompile import colours
from tpcompile.errors import InputError
from tpcompile.ir import Cone, Local, Plan, Program, Sharded, Stage
from tpcompile.layout import Layout
from tpcompile.rules import op_name
from tpcompile.text import program_of, text, written

Made = TypeVar("Made")

WIDTH = 120
_KINDS = 4
"""Kinds of operations that a pass is said to have added or taken away, or reasons for what it did, at most."""


@dataclass(frozen=True)
class Step:
    """One pass as it ran: its time in seconds, and what went in and came out, printed when it is asked for."""

    name: str  # of the pass
    given: object  # what went in; None for capture
    made: object  # what came out: a program, a plan, stages
    seconds: float  # that it took
    program: Program | None = field(default=None, repr=False)  # that the names in it belong to
    only: str = ""  # the layer that is shown, by its module's path; "" for everything

    @property
    def before(self) -> str:
        """The text of what went in."""
        return self.text_of(self.given)

    @property
    def after(self) -> str:
        """The text of what came out, of which `tpcompile.parse.parse` reads a graph back."""
        return self.text_of(self.made)

    @property
    def text(self) -> str:
        """The same as `after`."""
        return self.after

    def text_of(self, value: object, *, sources: bool = False) -> str:
        """The text of `value`, which is `given` or `made`; with `sources`, under the user's lines."""
        within = value if program_of(value) is not None else self.given if isinstance(self.given, Local) else self.program
        assert within is None or isinstance(within, (Program, Sharded, Local))
        only = None if not self.only else _names(value, within, self.only)
        return text(value, only=only, sources=sources, within=within)

    def layer(self, name: str | int) -> Step:
        """The same, of one layer alone: `name` is its module's path, or its number where one list of layers has it.

        Raises InputError for a layer that there is not.
        """
        layers = self.program.layers if self.program is not None else ()
        found = [layer for layer in layers if str(name) in (layer, layer.rpartition(".")[2])]
        if len(found) != 1:
            what = f"{len(found)} layers are named {str(name)!r}" if found else f"no layer is named {str(name)!r}"
            known = found or ([layers[0], "…", layers[-1]] if len(layers) > 2 else list(layers))
            fix = f"the layers are {', '.join(known)}" if known else "the model has no list of layers: leave it out"
            raise InputError(what, at=f"history[{self.name!r}].layer({str(name)!r})", fix=fix)
        return replace(self, only=found[0])

    def diff(self, *, color: bool = False, sources: bool = False) -> str:
        """The lines that the pass changed; all that it found, where it makes no graph.

        With `color`, as a terminal shows them; with `sources`, under the user's lines.
        """
        new = self.text_of(self.made, sources=sources).splitlines()
        old = self.text_of(self.given, sources=sources).splitlines() if _graphs(self.given) and _graphs(self.made) else []
        changed = "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=1))
        return colours.terminal(colours.diff(changed)) if color else changed

    @property
    def nodes(self) -> tuple[int | None, int | None]:
        """How many operations and inputs went in and came out; None where there is no graph."""
        return tuple(sum(len(graph.nodes) for graph in found) if (found := _graphs(value)) else None for value in (self.given, self.made))  # type: ignore[return-value]

    @property
    def says(self) -> str:
        """What it did, in a line."""
        return _says(self)

    def __str__(self) -> str:
        before, after = (f"{count:,}" if count is not None else "–" for count in self.nodes)
        return f"{self.name}: {before} → {after} nodes, {self.seconds:.2f} s, {self.says}"

    __repr__ = __str__

    def __rich__(self) -> Text:
        return colours.diff(self.diff())


class History(Mapping[str, Step]):
    """All passes of a compilation, by name, in the order in which they ran: a mapping of `Step`s, which prints as a table.

    KeyError, with the names that there are, for another.

        print(compiled.history)                        # a line for every pass
        print(compiled.history["rewrite"].diff())      # what it changed
        compiled.history["rewrite"].layer("3").text    # of one layer
    """

    def __init__(self, steps: Mapping[str, Step]) -> None:
        self._steps = dict(steps)

    def __getitem__(self, name: str) -> Step:
        if name not in self._steps:
            raise KeyError(f"no pass is named {name!r}: the passes are {', '.join(self._steps)}")
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __rich__(self) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for place, column in enumerate(("pass", "nodes", "", "", "seconds", "what it did")):
            made.add_column(column, justify="right" if place in (1, 3, 4) else "left", no_wrap=place < 5)
        for step in self.values():
            before, after = ("–" if count is None else f"{count:,}" for count in step.nodes)
            made.add_row(step.name, before, "→", after, f"{step.seconds:.2f}", Text(step.says))
        return made

    def __str__(self) -> str:
        made = io.StringIO()
        Console(file=made, width=WIDTH, color_system=None, force_terminal=False, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in made.getvalue().splitlines())

    __repr__ = __str__


class Log:
    """Runs passes one after the other and remembers what they made."""

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self._program: Program | None = None

    def run(self, name: str, before: object, work: Callable[[], Made]) -> Made:
        start = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - start
        self._program = program_of(made) or self._program
        self.steps[name] = Step(name, before, made, seconds, self._program)
        return made


# ------------------------------------------------------------------------------------------------- one layer


def _names(value: object, within: Program | Sharded | Local | None, layer: str) -> frozenset[str]:
    """The values of a layer: those that come from its lines, its parameters, and what passes put beside them; of a plan, modules."""
    if isinstance(value, Plan):
        modules = [*(region.name for region in value.regions), *(left.name for left in value.whole)]
        return frozenset(name for name in modules if _inside(name, layer))
    if (program := program_of(within)) is None:
        return frozenset()
    origins = within.origins if isinstance(within, Local) else {}
    known = {name: _inside(source.path, layer) for name, source in program.sources.items()}
    known |= {name: _inside(owner, layer) for table in (program.parameters, program.buffers) for name, owner in table.items()}
    whole = written(within)
    assert whole is not None
    own = {node.name: known.get(node.name, known.get(origins.get(node.name, ""))) for node in whole.graph.nodes}
    found = {name for name, inside in own.items() if inside}
    added = [node for node in whole.graph.nodes if node.op == "call_function" and own[node.name] is None]
    for node in reversed(added):  # what prepares a value for the layer alone
        if node.users and all(user.name in found for user in node.users):
            found.add(node.name)
    for node in added:  # what is done to a value that the layer makes
        if node.all_input_nodes and node.all_input_nodes[0].name in found:
            found.add(node.name)
    return frozenset(found)


def _inside(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.")


# ------------------------------------------------------------------------------------------------- what a pass did


def _graphs(value: object) -> list[fx.Graph]:
    if isinstance(value, (tuple, list)):
        return [part.graph for part in value if isinstance(part, Stage)]
    one = written(value)
    return [one.graph] if one is not None else []


def _says(step: Step) -> str:
    match step.made:
        case Plan(regions, whole):
            return f"{len(regions)} regions cut, {len(whole)} left whole"
        case Program() if step.name == "divide_loss" and step.made.undivided:
            return f"a batch must stay in one piece: {step.made.undivided}"
        case Program() if step.name == "attend":
            return "; ".join(step.made.attention) or _changed(step)
        case tuple() if _all(step.made, Cone):
            ends = sum(bool(cone.columns) or (cone.kind == "vocabulary" and bool(cone.layouts)) for cone in step.made)
            return f"{ends} of {len(step.made)} places may end a region"
        case tuple() if _all(step.made, Stage):
            return f"{len(step.made)} stages of {', '.join(str(len(stage.graph.nodes)) for stage in step.made)}"
        case Program() if step.given is None:
            made = step.made
            said = f"{len(made.parameters)} parameters, {len(made.inputs)} inputs, {len(made.layers)} layers"
            more = ["…"] if len(made.repeated) > _KINDS else []
            return "; ".join((said, *made.repeated[:_KINDS], *more))
        case Sharded():
            return _laid_out(step.given, step.made)
    return _changed(step)


def _all(values: Sequence[object], kind: type) -> bool:
    return bool(values) and all(isinstance(value, kind) for value in values)


def _laid_out(given: object, made: Sharded) -> str:
    layouts = [layout for layout in made.layouts.values() if isinstance(layout, Layout)]
    cut, partial = sum(layout.is_cut for layout in layouts), sum(bool(layout.partial) for layout in layouts)
    text = f"{cut} values cut, {partial} partial sums"
    if isinstance(given, Sharded):
        text += f"; {sum(given.layouts.get(name) != layout for name, layout in made.layouts.items())} layouts changed"
    return text


def _changed(step: Step) -> str:
    """+252 tpcompile.seq_gather, -2 aten.add.Tensor"""
    old, new = (
        Counter(op_name(node).removesuffix(".default") for graph in _graphs(value) for node in graph.nodes if node.op == "call_function")
        for value in (step.given, step.made)
    )
    changes = {name: new[name] - old[name] for name in {**new, **old} if new[name] != old[name]}
    ordered = sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0]))
    shown = [f"{count:+d} {name}" for name, count in ordered[:_KINDS]]
    shown += [f"{len(ordered) - _KINDS} kinds more"] if len(ordered) > _KINDS else []
    return ", ".join(shown) or ("other arguments" if step.before != step.after else "nothing changed")
