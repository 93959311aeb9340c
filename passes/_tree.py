"""The modules of an emitted stage: original names, local shapes, and the constructor that makes them."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from tpcompile.ir import PerRank
from tpcompile.passes._chain import spelled


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of an emitted module, with the values that it starts with."""

    value: Tensor
    is_parameter: bool
    persistent: bool = True
    shape: tuple[int | PerRank, ...] = ()  # on all tensor ranks


@dataclass
class Numbers:
    """What differs between tensor ranks, as a table of the emitted source: on rank r, `N0[r]`."""

    stem: str = "N"
    rows: dict[str, str] = field(default_factory=dict)  # the values, printed → the row's name

    def name(self, number: PerRank) -> str:
        return self.rows.setdefault(repr(number.values), f"{self.stem}{len(self.rows)}")

    def lines(self) -> list[str]:
        """The table's statements."""
        return [f"{name} = {values}" for values, name in self.rows.items()]


@dataclass
class Tree:
    """A module under construction. `made` is the expression that makes a layer; an empty one is a plain container."""

    children: dict[str, Tree] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    made: str = ""
    _counted: tuple[int, int] = field(default=(-1, -1), init=False, compare=False)
    _kind: str = field(default="", init=False, compare=False)

    def at(self, path: str) -> Tree:
        """The module at a dotted path; None of its parents has to exist."""
        tree = self
        for name in filter(None, path.split(".")):
            tree = tree.children.setdefault(name, Tree())
        return tree

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Held]]:
        for name, held in self.held.items():
            yield prefix + name, held
        for name, child in self.children.items():
            yield from child.tensors(f"{prefix}{name}.")

    @property
    def kind(self) -> str:
        """How the module is printed: as a list, as a dictionary of numbered modules, or with attributes."""
        if self._counted != (counted := (len(self.children), len(self.held))):  # asked for every path that leads through a list
            self._counted, self._kind = counted, self._look()
        return self._kind

    def _look(self) -> str:
        numbered = bool(self.children) and not self.held and all(name.isdecimal() for name in self.children)
        if numbered and list(self.children) == [str(index) for index in range(len(self.children))]:
            return "list"
        return "dict" if numbered else "module"


def attribute(root: Tree, path: str, owner: str = "self") -> str:
    """The expression for what lies at a dotted path: self.transformer.h[0].attn.c_attn.weight."""
    tree: Tree | None = root
    for name in path.split("."):
        kind = tree.kind if tree and name in tree.children else "module"
        if kind == "list":
            owner = f"{owner}[{name}]"
        elif kind == "dict":
            owner = f"{owner}[{quoted(name)}]"
        else:
            owner = f"{owner}.{name}" if _is_name(name) else f"getattr({owner}, {quoted(name)})"
        tree = tree.children.get(name) if tree else None
    return owner


def assignment(root: Tree, path: str, value: str) -> str:
    """The statement that puts another tensor in a buffer's place."""
    owner, _, name = path.rpartition(".")
    where = attribute(root, owner) if owner else "self"
    return f"{where}.{name} = {value}" if _is_name(name) else f"setattr({where}, {quoted(name)}, {value})"


def quoted(name: str) -> str:
    """A name of the user's as a literal: whatever it holds, it is text."""
    return json.dumps(name)


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def constructor(tree: Tree, numbers: Numbers, owner: str = "self") -> list[str]:
    """The statements of __init__ that make a module's parameters, buffers and submodules."""
    lines = [_tensor(owner, name, held, numbers) for name, held in tree.held.items()]
    for name, child in tree.children.items():
        where = attribute(tree, name, owner)
        if tree.kind == "module":
            made = _module(child)
            lines.append(f"{where} = {made}" if _is_name(name) else f"{owner}.add_module({quoted(name)}, {made})")
        if not child.made:
            lines += constructor(child, numbers, where)
    return lines


def _module(tree: Tree) -> str:
    """The expression that makes a submodule; what lies in a plain container is filled in after."""
    if tree.made or tree.kind == "module":
        return tree.made or "nn.Module()"
    made = [_module(child) for child in tree.children.values()]
    if tree.kind == "dict":
        if len(set(made)) == 1 and len(made) > 3 and "\n" not in made[0] and (following := _following(list(tree.children))):
            return f"nn.ModuleDict({{str(i): {made[0]} for i in {spelled(following)}}})"
        return "nn.ModuleDict({" + ", ".join(f"{quoted(name)}: {child}" for name, child in zip(tree.children, made, strict=True)) + "})"
    if len(set(made)) == 1 and len(made) > 1 and "\n" not in made[0]:
        return f"nn.ModuleList({made[0]} for _ in range({len(made)}))"
    return "nn.ModuleList([" + ", ".join(made) + "])"


def _following(names: list[str]) -> range | None:
    """The numbers of which these names are, one after the other."""
    start = int(names[0]) if names[0].isdecimal() else 0
    found = range(start, start + len(names))
    return found if names == [str(number) for number in found] else None


def _tensor(owner: str, name: str, held: Held, numbers: Numbers) -> str:
    sizes = [f"{numbers.name(size)}[tp]" if isinstance(size, PerRank) else str(size) for size in held.shape]
    shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    empty = f"torch.empty({shape}, dtype={held.value.dtype}, device=device)"
    if not held.is_parameter:
        return f"{owner}.register_buffer({quoted(name)}, {empty}{'' if held.persistent else ', persistent=False'})"
    made = f"nn.Parameter({empty}{'' if held.value.requires_grad else ', requires_grad=False'})"
    return f"{owner}.{name} = {made}" if _is_name(name) else f"{owner}.register_parameter({quoted(name)}, {made})"


def fill(module: nn.Module, tensors: Mapping[str, Held]) -> None:
    """Put the values in place of the meta tensors that the constructor made."""
    for path, held in tensors.items():
        owner, _, name = path.rpartition(".")
        place = module.get_submodule(owner)
        if held.is_parameter:
            place.register_parameter(name, nn.Parameter(held.value, requires_grad=held.value.requires_grad))
        else:
            place.register_buffer(name, held.value, persistent=held.persistent)


def numbered(paths: Sequence[str]) -> str:
    """Paths for a docstring: "h.0, h.1, h.2" is "h.0 to h.2"."""
    if len(paths) < 3:
        return ", ".join(paths)
    return f"{paths[0]} to {paths[-1]}, {len(paths)} layers"
