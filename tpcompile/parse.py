"""Read the text of a graph back: `text(parse(text(value))) == text(value)`, and the graph that is read computes the same numbers.

`parse` takes what `tpcompile.text` prints of a program, a sharded one, or a local one. Lines that begin with # are the user's source
lines, and are passed over. What a graph is fed with (parameters, buffers, constants) is not in its text: placeholders are names.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tpcompile.errors import TpcompileError
from tpcompile.ir import PerRank, Type
from tpcompile.layout import Layout, TensorType, parse_size, size_of
from tpcompile.text import DTYPES, Written

_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_CONSTANTS = {"None": None, "True": True, "False": False}
_MODULES = ("builtins", "math", "operator", "torch", "tpcompile")
"""Where functions that are no operators may come from."""

_HEADER = re.compile(r"over (\w+)=(\d+)")
_PLACEHOLDER, _CALL = re.compile(r"  %(\w+)"), re.compile(r"[ !] %(\w+) = ([\w.]+)\(")
_ENDING = re.compile(r"(?: : (.+?))?( grad \+\w+)?")
_KEY = re.compile(r"\s*(\w+)=")
_RETURN = re.compile(r"  return (.+)")
_UPDATE = re.compile(r"  ([\w.]+) = %(\w+)")
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<node>%\w+)
      | (?P<text>"(?:[^"\\]|\\.)*")
      | (?P<number>-?(?:inf|nan|\d[\w.]*(?:(?<=e)[+-]\d+)?)(?!\w))
      | (?P<word>[A-Za-z_][\w.]*(?::\d+)?)
      | (?P<sign>[\[\](),|=])
    )""",
    re.VERBOSE,
)


def parse(text: str) -> Written:
    """The graph that a text spells, with its types and layouts. Raises TpcompileError for what is none, with the line."""
    read = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            read.line(line)
        except (TpcompileError, ValueError, KeyError, AttributeError, ImportError, SyntaxError) as error:
            raise TpcompileError(f"not a line of a graph's text: {line.strip()!r}", at=f"line {number}", fix=str(error)) from error
    return read.done()


def parse_type(text: str, parts: int = 0) -> tuple[Type, Layout | tuple[Layout, ...] | None]:
    """`f32[b, 4@tp·16]` as the type and the layout of a value; a size has no layout. `parts` are the ranks of an axis."""
    if text.startswith("(") and (inside := _pieces(text)) is not None:
        made = [parse_type(piece, parts) for piece in inside]
        kinds = tuple(kind for kind, _ in made if isinstance(kind, TensorType))
        return kinds, tuple(layout for _, layout in made if isinstance(layout, Layout))
    match = re.fullmatch(r"([a-z][\w.]*)(\[.*)", text)
    if match is None:
        return parse_size(text), None
    layout = Layout.parse(match[2], parts=parts)
    return TensorType(_dtype(match[1]), tuple(size_of(dim) for dim in layout.dims)), layout


def _pieces(text: str) -> list[str] | None:
    """The types of "(f32[b], i64[b])"; None for an expression in parentheses."""
    if not re.match(r"\([a-z][\w.]*\[", text) or not text.endswith(")"):
        return None
    return re.split(r", (?=[a-z][\w.]*\[)", text[1:-1])


def _dtype(name: str) -> torch.dtype:
    found = _TYPES.get(name) or getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


class _Reader:
    """The lines of a text, one after the other."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.types: dict[str, Type] = {}
        self.layouts: dict[str, Any] = {}
        self.marks: dict[str, str] = {}
        self.updates: dict[str, fx.Node] = {}
        self.returned: Any = None
        self.axis, self.parts = "", 0

    def line(self, line: str) -> None:
        if not line.strip() or line.lstrip().startswith("#"):
            return
        if match := _HEADER.fullmatch(line):
            self.axis, self.parts = match[1], int(match[2])
        elif match := _RETURN.fullmatch(line):
            self.returned = _Arguments(match[1], self.nodes).one()
        elif match := _UPDATE.fullmatch(line):
            self.updates[match[1]] = self.nodes[match[2]]
        elif match := _CALL.match(line):
            arguments = _Arguments(line, self.nodes, match.end())
            args, kwargs = arguments.all()
            self._value(
                self.graph.create_node("call_function", _function(match[2]), args, kwargs, match[1]), match[1], line[arguments.at :]
            )
        elif match := _PLACEHOLDER.match(line):
            self._value(self.graph.create_node("placeholder", match[1], name=match[1]), match[1], line[match.end() :])
        else:
            raise ValueError("write a value, what is returned, or the new value of a buffer")

    def _value(self, node: fx.Node, name: str, ending: str) -> None:
        match = _ENDING.fullmatch(ending)
        if node.name != name or match is None:
            raise ValueError(f"a second value is named %{name}" if match else f"{ending!r} is no type")
        kind, mark = match.groups()
        self.nodes[name] = node
        if kind is not None:
            self.types[name], layout = parse_type(kind, self.parts)
            if layout is not None and self.axis:
                self.layouts[name] = layout
        if mark is not None:
            self.marks[name] = mark.strip()

    def done(self) -> Written:
        values = self.returned
        if self.updates:
            values = [*values, *self.updates.values()]
        self.graph.output(tuple(values) if isinstance(values, list) else values)
        self.graph.lint()
        return Written(self.graph, self.types, self.layouts, self.marks, tuple(self.updates), self.axis, self.parts)


def _function(name: str) -> Callable[..., Any]:
    """aten.linear, aten.add.Tensor, tpcompile.reduce: an operator; operator.getitem: a function of Python, of math or of torch."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    operators = getattr(torch.ops, namespace) if namespace not in ("torch", *_MODULES[:3]) else None
    if operators is not None and hasattr(operators, packet):
        found: Callable[..., Any] = getattr(getattr(operators, packet), overload or "default")
        return found
    module, _, own = name.rpartition(".")
    if module.partition(".")[0] not in _MODULES:
        raise ValueError(f"there is no operator {name}")
    function: Callable[..., Any] = getattr(importlib.import_module(module), own)
    return function


class _Arguments:
    """The arguments of a call, read from left to right; `at` is how far."""

    def __init__(self, text: str, nodes: dict[str, fx.Node], at: int = 0) -> None:
        self.text, self.nodes, self.at = text, nodes, at

    def all(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those up to the end of the parentheses, by position and by name."""
        args, kwargs = list[Any](), dict[str, Any]()
        while not self._peek(")"):
            if key := _KEY.match(self.text, self.at):
                self.at = key.end()
                kwargs[key[1]] = self._value()
            else:
                args.append(self._value())
            if not self._peek(")"):
                self._sign(",")
        self._sign(")")
        return tuple(args), kwargs

    def one(self) -> Any:
        value = self._value()
        if self.text[self.at :].strip():
            raise ValueError(f"{self.text[self.at :]!r} is left over")
        return value

    def _value(self) -> Any:
        """One argument, or a number for each rank."""
        values = [self._item()]
        while self._peek("|"):
            self._sign("|")
            values.append(self._item())
        return values[0] if len(values) == 1 else PerRank(tuple(values))

    def _item(self) -> Any:
        kind, token = self._token()
        match kind:
            case "node":
                return self.nodes[token[1:]]
            case "text":
                return json.loads(token)
            case "number":
                return int(token) if re.fullmatch(r"-?\d+", token) else float(token)
            case "word":
                return self._word(token)
        if token == "[":
            return self._list("]")
        if token == "(":
            return tuple(self._list(")"))
        raise ValueError(f"no argument begins with {token!r}")

    def _word(self, word: str) -> Any:
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if word in _TYPES:
            return _TYPES[word]
        if word in ("slice", "complex"):
            self._sign("(")
            return {"slice": slice, "complex": complex}[word](*self._list(")"))
        if word.startswith("torch."):
            found = getattr(torch, word.removeprefix("torch."))
            if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                raise ValueError(f"{word} is no argument")
            return found
        return torch.device(word)

    def _list(self, end: str) -> list[Any]:
        values = []
        while not self._peek(end):
            values.append(self._value())
            if not self._peek(end):
                self._sign(",")
        self._sign(end)
        return values

    def _peek(self, sign: str) -> bool:
        return self.text[self.at :].lstrip().startswith(sign)

    def _sign(self, sign: str) -> None:
        if self._token()[1] != sign:
            raise ValueError(f"{sign!r} is missing in {self.text!r}")

    def _token(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{self.text[self.at :]!r} is no argument")
        self.at = match.end()
        return match.lastgroup, match[match.lastgroup]
