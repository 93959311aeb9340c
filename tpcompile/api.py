"""The reference of everything public, as Markdown, from signatures and docstrings: `tpcompile inspect --api > docs/api.md`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import tpcompile
from tpcompile import collectives, errors
from tpcompile.export.load import Loaded
from tpcompile.history import History, Step
from tpcompile.passes.emit import Piece, RankProgram
from tpcompile.runtime.compiled import Compiled, Evaluated
from tpcompile.runtime.launch import ProcessError
from tpcompile.runtime.progress import Report as Progress
from tpcompile.simulate import Divergence, Report, Tolerance
from tpcompile.simulate.wire import Total

WIDTH = 100
"""A signature that is longer has a line for every argument."""

_INTRODUCTION = """# Reference

Every public name, with its types and defaults. Written by `tpcompile inspect --api` from the docstrings.

All errors are `tpcompile.TpcompileError`s, which say what is wrong, at which call, from which line of yours, and how to mend it.
"Collective" is said of what every rank must call; "whole" of a tensor as one device has it, beside the pieces that ranks hold."""


@dataclass(frozen=True)
class Entry:
    """A public function or class, and what it is called in the text."""

    name: str  # tpcompile.compile
    thing: Any
    called: str = ""  # compiled: what its methods are called on


@dataclass(frozen=True)
class Section:
    title: str
    entries: tuple[Entry, ...]


SECTIONS = (
    Section(
        "Compiling", (Entry("tpcompile.compile", tpcompile.compile), Entry("Compiled", Compiled, "compiled"), Entry("Evaluated", Evaluated))
    ),
    Section(
        "Checking",
        (
            Entry("tpcompile.check", tpcompile.check),
            Entry("Report", Report, "report"),
            Entry("Tolerance", Tolerance),
            Entry("Divergence", Divergence),
            Entry("Total", Total),
            Entry("tpcompile.testing.assert_parity", tpcompile.testing.assert_parity),
            Entry("tpcompile.testing.exact_dropout", tpcompile.testing.exact_dropout),
        ),
    ),
    Section("Programs on disk", (Entry("tpcompile.load", tpcompile.load), Entry("Loaded", Loaded, "loaded"))),
    Section(
        "Looking inside",
        (
            Entry("History", History, "compiled.history"),
            Entry("Step", Step, "step"),
            Entry("RankProgram", RankProgram, "program"),
            Entry("Piece", Piece),
        ),
    ),
    Section("Meshes and weights", (Entry("tpcompile.Mesh", tpcompile.Mesh, "mesh"), Entry("tpcompile.Initial", tpcompile.Initial))),
    Section(
        "Processes",
        (
            Entry("tpcompile.launch", tpcompile.launch),
            Entry("ProcessError", ProcessError),
            Entry("tpcompile.progress", tpcompile.progress),
            Entry("Progress", Progress, "report"),
        ),
    ),
    Section(
        "Errors",
        (
            Entry("tpcompile.TpcompileError", errors.TpcompileError),
            Entry("InputError", errors.InputError),
            Entry("CaptureError", errors.CaptureError),
            Entry("Refused", errors.Refused),
            Entry("VerifyError", errors.VerifyError),
        ),
    ),
)


def api() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.title}")
        for entry in section.entries:
            parts += _entry(entry)
    return "\n\n".join([*parts, *_collectives()]) + "\n"


def members(entry: Entry) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class states itself, in the order of its source."""
    if isinstance(entry.thing, type):
        for name, member in vars(entry.thing).items():
            written = isinstance(member, (property, staticmethod, classmethod)) or inspect.isfunction(member)
            if written and (not name.startswith("_") or name in ("__call__", "_repr_html_")):
                yield name, member


def function_of(member: Any) -> Callable[..., Any]:
    """What is written in the source: without decorators that make another thing of it."""
    found: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    made: Callable[..., Any] = inspect.unwrap(found)
    return made


def fields_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """The fields of a dataclass, or of a named tuple: name, type, and what the comment beside it says."""
    source = inspect.getsource(kind)
    if is_dataclass(kind):
        names = [field.name for field in fields(kind) if field.repr]
    else:
        names = list(getattr(kind, "_fields", ()))
    for name in names:
        if match := re.search(rf"^    {name}: (.*?)(?:  # (.*))?$", source, re.MULTILINE):
            yield (
                name,
                re.sub(r"field\(default(_factory)?=([\w.]+).*\)", lambda made: f"{made[2]}{'()' if made[1] else ''}", match[1]),
                match[2] or "",
            )


def _entry(entry: Entry) -> Iterator[str]:
    yield f"### {entry.name}"
    if not isinstance(entry.thing, type):
        entered = hasattr(entry.thing, "__wrapped__") and inspect.isgeneratorfunction(function_of(entry.thing))
        yield _code(_signature(entry.name, function_of(entry.thing), entered=entered))
    elif entry.name.startswith("tpcompile.") or issubclass(entry.thing, Exception):
        yield _code(_signature(entry.name, inspect.getattr_static(entry.thing, "__init__"), own=True, returns=False))
    yield _markdown(inspect.getdoc(entry.thing) or "")
    if found := list(fields_of(entry.thing)) if isinstance(entry.thing, type) else []:
        rows = [("field", "type", ""), ("---", "---", "---"), *((f"`{name}`", f"`{kind}`", meaning) for name, kind, meaning in found)]
        yield "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    for name, member in members(entry):
        on = entry.name.removeprefix("tpcompile.") if isinstance(member, classmethod) else entry.called or entry.name
        shown = on if name == "__call__" else f"{on}.{name}"
        yield f"#### {shown}"
        yield _code(_signed(shown, member))
        yield _markdown(inspect.getdoc(function_of(member)) or "")


def _signed(shown: str, member: Any) -> str:
    function = function_of(member)
    if isinstance(member, property):
        return f"{shown}: {inspect.signature(function).return_annotation}"
    entered = hasattr(member, "__wrapped__") and inspect.isgeneratorfunction(function)
    return _signature(shown, function, own=not isinstance(member, staticmethod), entered=entered)


def _signature(shown: str, function: Any, *, own: bool = False, returns: bool = True, entered: bool = False) -> str:
    """On one line, or with a line for every argument; `own` leaves out self, `entered` is for what stands in a with statement."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if own else 0 :]
    arguments: list[str] = []
    for place, parameter in enumerate(parameters):
        starred = any(p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) for p in parameters[:place])
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            arguments.append("*")
        arguments.append(_argument(parameter))
    end = f" -> {signature.return_annotation}" if returns and not entered else ""
    shown = f"with {shown}" if entered else shown
    line = f"{shown}({', '.join(arguments)}){end}{':' * entered}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{shown}(", *(f"    {argument}," for argument in arguments), f"){end}{':' * entered}"])


def _argument(parameter: inspect.Parameter) -> str:
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}".replace("'", '"')
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}{kind}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}{kind}"
    if parameter.default is parameter.empty:
        return f"{parameter.name}{kind}"
    value = parameter.default
    shown = f"torch.optim.{value.__name__}" if isinstance(value, type) else repr(value).replace("'", '"')
    return f"{parameter.name}{kind}{' = ' if kind else '='}{shown}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _example(text: str) -> str:
    """Python, unless it is something that is printed."""
    try:
        ast.parse("" if text.startswith(">>> ") else text)
    except SyntaxError:
        return f"```\n{text}\n```"
    return _code(text)


def _markdown(text: str) -> str:
    """A docstring: what is indented, or has a prompt, is code; lists are lists."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        is_list = lines[0].startswith("- ") if lines else False
        place = next((i for i, line in enumerate(lines) if line.startswith(("  ", ">>> ")) and not is_list), len(lines))
        if lines[:place]:
            blocks.append("\n".join(lines[:place]))
        if lines[place:]:
            blocks.append(_example(inspect.cleandoc("\n" + "\n".join(lines[place:]))))
    return "\n\n".join(blocks)


def _collectives() -> Sequence[str]:
    """The table of the module's own docstring, with the operators' arguments."""
    text = inspect.getdoc(collectives) or ""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"    \w+\s{2,}\S.*\s{2,}\S", line)]
    table = ["| operator | forward | backward | stands where |", "|---|---|---|---|"]
    for name, *cells in rows[1:]:
        schema = str(getattr(collectives.ops, name).default._schema)
        shown = re.sub(r"^tpcompile::", "", schema).rpartition(" -> ")[0]
        table.append("| " + " | ".join([f"`{shown}`", *cells]).replace("|", "\\|").replace("\\|", "|") + " |")
    said = "What emitted sources import beside torch: operators of torch, `torch.ops.tpcompile`, with gradients. `axis` names the ranks."
    return ["## tpcompile.collectives", said, "\n".join(table)]
