"""Private to capture: of layers that are alike, export traces the first and the last; each one between is a single operation.

    x = layers[0](x, mask)      begin(0, [%x, %mask, weights]), all operations, end(0, [%y])
    x = layers[1](x, mask)      %y = again(1, [%x, %mask, weights], like [%y])
    …
    x = layers[31](x, mask)     begin(31, …), all operations, end(31, …)

A module that is called again and again is such layers from its second call on, which shows that it is.

A layer is like an earlier one if nothing that its code can see differs: the classes of its modules, the types of its parameters and
buffers, the values of all attributes that were read while the first was traced, variables outside, the types of its arguments and which
of them are the same, and the modes of gradients and autocast. What is not seen through makes a layer unlike all others, which is then
traced. Afterwards the last one's operations are compared with the first one's, one by one, and the copies are put in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from tpcompile.passes._likeness import Globals, has_hooks, kind_of
from tpcompile.passes._marks import AGAIN, BEGIN, END
from tpcompile.passes._repeats import lone_in, siblings_in
from tpcompile.passes._sight import (
    Reads,
    Sight,
    changed,
    containers,
    differs,
    generators,
    incomparable,
    is_ordinary,
    looks_like,
    memory,
    reading,
    see,
)


class Different(Exception):
    """What makes the captured layers no copies of each other, after all."""


@dataclass(frozen=True)
class Call:
    """One call of a layer, as the graph has it."""

    path: str
    role: Literal["first", "again", "last"]
    first: int  # the number of the call that it is like


@dataclass
class Template:
    """A layer that was traced in full."""

    call: int
    path: str
    sight: Sight
    reads: Reads = field(default_factory=Reads)
    spec: Any = None
    results: tuple[Any, ...] = ()  # a number for what it returns of what it is given, else a new tensor
    last: int = 0  # the identity of the member that is expected last
    again: list[int] = field(default_factory=list)  # the calls that are copies
    checked: bool = False


class Layers:
    """The layers of a model, while it is exported."""

    def __init__(self, model: nn.Module, last: frozenset[int] = frozenset()) -> None:
        """`last` are calls that are traced, by their numbers, whatever they are like."""
        self.last = last
        self.calls: list[Call] = []
        self.notes: dict[str, None] = {}
        self.templates: list[Template] = []
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._siblings = siblings_in(model)
        self._lone = lone_in(model, self._siblings)
        self._called: set[int] = set()
        self._inside = False
        self._globals: dict[tuple[type, ...], Globals] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every call of a layer."""
        call: Any = nn.Module._call_impl

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._is_layer(module):
                return call(module, *args, **kwargs)
            self._inside = True
            try:
                return self._call(module, call, args, kwargs)
            finally:
                self._inside = False

        if not (self._siblings or self._lone) or _hooks_everywhere():
            yield
            return
        nn.Module._call_impl = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module._call_impl = call  # type: ignore[method-assign]

    def _is_layer(self, module: nn.Module) -> bool:
        """Whether others are like it, or it has been called before."""
        number = id(module)
        if number in self._lone and number in self._called:
            return True
        self._called.add(number)
        return number in self._siblings

    def unchecked(self) -> frozenset[int]:
        """Of the layers that others were copied from and that none was compared with, the last copies, by the numbers of their calls."""
        return frozenset(template.again[-1] for template in self.templates if template.again and not template.checked)

    def report(self) -> tuple[str, ...]:
        """Which layers are copies of which, and why others are not."""
        found = []
        for template in self.templates:
            paths = list(dict.fromkeys(self.calls[number].path for number in template.again))
            shown = ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, {paths[1]} … {paths[-1]}"
            found += [f"copies of {template.path}, {len(template.again)}: {shown}"] if paths else []
        return (*found, *self.notes)

    # ------------------------------------------------------------------------------------------------ a call

    def _call(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        path = self._paths[id(module)]
        tree = dict(module.named_modules(remove_duplicate=False))
        if reason := self._reason(module, tree, path):
            return self._whole(module, call, args, kwargs, path, reason)
        classes = tuple(dict.fromkeys(type(each) for each in tree.values()))
        found = self._globals.get(classes) or Globals(classes)
        self._globals[classes] = found
        with torch._C.DisableTorchFunction():  # export's modes would see every look at a tensor
            sight = see(tree, found, args, kwargs)
        if isinstance(sight, str):
            return self._whole(module, call, args, kwargs, path, sight)
        for template in self.templates:
            if not differs(template.sight, template.reads, sight, tree):
                if id(module) == template.last or len(self.calls) in self.last:
                    return self._last(template, module, call, args, kwargs, sight)
                return self._again(template, path, sight, args, kwargs)
        return self._first(module, call, args, kwargs, path, tree, sight, found)

    def _reason(self, module: nn.Module, tree: Mapping[str, nn.Module], path: str) -> str:
        """Why a layer is not looked at any further; "" if it is."""
        if torch._C._are_functorch_transforms_active():
            return "it runs under torch.func"
        if any(has_hooks(each) for each in tree.values()):
            return "its modules have hooks"
        if any("__getattribute__" in vars(kind) for each in tree.values() for kind in type(each).__mro__ if kind is not object):
            return "its modules read attributes in a way of their own"
        for inner, each in tree.items():
            if self._paths.get(id(each)) != f"{path}.{inner}".rstrip("."):
                return f"its module {inner} is also {self._paths.get(id(each))}"
        return ""

    def _whole(self, module: nn.Module, call: Any, args: Any, kwargs: Any, path: str, reason: str) -> Any:
        self.notes[f"{path} is captured by itself: {reason}"] = None
        return call(module, *args, **kwargs)

    def _first(
        self, module: nn.Module, call: Any, args: Any, kwargs: Any, path: str, tree: Mapping[str, nn.Module], sight: Sight, outside: Globals
    ) -> Any:
        number = len(self.calls)
        template = Template(number, path, sight)
        self.calls.append(Call(path, "first", number))
        trace = _Trace()
        BEGIN(number, list(sight.tensors))
        drawn = generators()
        with reading(tree, sight) as template.reads:
            made = call(module, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            after = see(tree, outside, args, kwargs)
        reason = (
            "forward draws random numbers outside of the graph" if drawn != generators() else _settle(template, made, after, args, kwargs)
        )
        reason = reason or trace.reason()
        END(number, [leaf for leaf in template.results if isinstance(leaf, Tensor)])
        if reason:
            self.notes[f"{path} is captured by itself: {reason}"] = None
            return made
        siblings = self._siblings.get(id(module), [module])
        place = next(index for index, sibling in enumerate(siblings) if sibling is module)
        with torch._C.DisableTorchFunction():
            like = [sibling for sibling in siblings[place + 1 :] if looks_like(template.sight, template.reads, sibling)]
        template.last = id(like[-1]) if like else 0
        self.templates.append(template)
        return made

    def _last(self, template: Template, module: nn.Module, call: Any, args: Any, kwargs: Any, sight: Sight) -> Any:
        number = len(self.calls)
        self.calls.append(Call(self._paths[id(module)], "last", template.call))
        template.checked = True
        BEGIN(number, list(sight.tensors))
        made = call(module, *args, **kwargs)
        leaves, spec = pytree.tree_flatten(made)
        same = spec == template.spec and len(leaves) == len(template.results)
        for leaf, result in zip(leaves, template.results, strict=False):
            match result:
                case int():
                    same &= leaf is sight.tensors[result]
                case None:
                    same &= leaf is None
                case _:
                    same &= is_ordinary(leaf) and kind_of(leaf) == kind_of(result)
        new = [leaf for leaf, result in zip(leaves, template.results, strict=False) if isinstance(result, Tensor)]
        END(number, [leaf for leaf in new if isinstance(leaf, Tensor)])
        if not same:
            self.calls[-1] = Call(self._paths[id(module)], "last", -1)
        return made

    def _again(self, template: Template, path: str, sight: Sight, args: Any, kwargs: Any) -> Any:
        number = len(self.calls)
        self.calls.append(Call(path, "again", template.call))
        template.again.append(number)
        like = [result for result in template.results if isinstance(result, Tensor)]
        made = iter(AGAIN(number, list(sight.tensors), like))
        leaves = [next(made) if isinstance(r, Tensor) else sight.tensors[r] if isinstance(r, int) else None for r in template.results]
        return pytree.tree_unflatten(leaves, template.spec)


def _hooks_everywhere() -> bool:
    return any(getattr(modules, name) for name in dir(modules) if name.startswith("_global_") and name.endswith("_hooks"))


def _settle(template: Template, made: Any, after: Sight | str, args: Any, kwargs: Any) -> str:
    """Note what a layer returns. Why it is no template for others; "" if it is."""
    before = template.sight
    if isinstance(after, str):
        return after
    if change := changed(before, after):
        return f"forward changes {change}"
    if unlike := incomparable(before, template.reads):
        return f"forward {unlike}, which cannot be compared"
    if containers((args, kwargs)) & containers(made):
        return "it returns a container that it is given"
    leaves, template.spec = pytree.tree_flatten(made)
    given, known = before.tensors[: before.given], {memory(tensor) for tensor in before.tensors}
    flows = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in before.tensors)
    results: list[int | Tensor | None] = []
    for leaf in leaves:
        place = next((index for index, tensor in enumerate(given) if tensor is leaf), None)
        if leaf is None or place is not None:
            results.append(place)
            continue
        if not is_ordinary(leaf):
            return f"it returns a {type(leaf).__name__}"
        if memory(leaf) in known:
            return "it returns tensors that share memory"
        if leaf.requires_grad != (flows and (leaf.is_floating_point() or leaf.is_complex())):
            return "it returns a tensor without a gradient"
        known.add(memory(leaf))
        results.append(leaf)
    template.results = tuple(results)
    return "" if any(isinstance(result, Tensor) for result in results) else "it returns no new tensor"


class _Trace:
    """The operations that are traced from now on."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self.tracer = mode.tracer
        self.before = self.tracer.graph._root.prev

    def reason(self) -> str:
        """Why they do not depend on what the layer is given and holds alone; "" if they do."""
        begin = self.before.next
        operands, inside = set(begin.all_input_nodes), {begin}
        node = begin.next
        while node.op != "root":
            value = node.meta.get("val")
            if node.op != "call_function":
                return "it makes a constant" if node.op == "get_attr" else f"a {node.op} is traced in it"
            if _new_symbols(value):
                return "its sizes depend on values"
            if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
                for operand in node.all_input_nodes:
                    if operand not in inside and operand not in operands and isinstance(operand.meta.get("val"), Tensor):
                        return f"it reads {operand.name}, which it is not given"
            inside.add(node)
            node = node.next
        return ""


def _new_symbols(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return any(
        isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and bool(free_unbacked_symbols(leaf)) for leaf in leaves
    )
