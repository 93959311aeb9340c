"""From what export made to a Program: functional, with canonical symbols and names, and its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from tpcompile.errors import CaptureError
from tpcompile.functions import kept
from tpcompile.graphs import add_node, drop_dead
from tpcompile.ir import Input, Program, Source, Type
from tpcompile.layout import Size
from tpcompile.passes._call import no_parameter
from tpcompile.passes._dropout import draws
from tpcompile.passes._export import Exported
from tpcompile.passes._functional import functionalize
from tpcompile.passes._functions import prove_rules, refuse_shared_memory
from tpcompile.passes._given import spell_copies
from tpcompile.passes._gradients import connected, drop_copies, stop_gradients
from tpcompile.passes._guards import guards_of
from tpcompile.passes._inline import Flattener
from tpcompile.passes._origin import ROOT, layers_of, source_of
from tpcompile.passes._reasons import user_line
from tpcompile.passes._statistics import spell_statistics
from tpcompile.passes._symbols import name_symbols
from tpcompile.passes._updates import Updates

aten = torch.ops.aten


@dataclass(frozen=True)
class _Holder:
    """What a placeholder stands for."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str  # in the user's model, in the batch, or export's own
    placeholder: str


class Builder:
    """From what export made to a Program."""

    def __init__(
        self, model: nn.Module, exported: Exported, paths: Sequence[str], examples: Sequence[Tensor], loss: Source | None = None
    ) -> None:
        self.model, self.exported, self.paths, self.loss = model, exported, paths, loss
        self.work = Flattener(exported.layers.calls).flatten(exported.program.graph_module)
        self.holders = self._holders()
        self.aliases = self._merge_twins()
        self.symbols = name_symbols(examples, [node.meta["val"].shape for node in self._of("input")])
        self.layers = layers_of(model, self.work.nodes)
        self.updates = self._simplify()
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.numbers: dict[Size, fx.Node] = {}  # size → the node that computes it
        self.types: dict[str, Type] = {}
        self.sources: dict[str, Source] = {}
        self.sites: dict[str, int] = {}

    def program(self, leaves: Mapping[str, Any]) -> Program:
        for node in self.work.nodes:
            match node.op:
                case "placeholder":
                    if node.users or self.holders[node].kind == "input":
                        self._placeholder(node)
                case "call_function":
                    self._call(node)
                    if draws(node):
                        self.sites[self.new[node].name] = len(self.sites)
        outputs: Any = fx.node.map_arg(self.work.output_node().args[0], self.new.__getitem__)
        self.graph.output(outputs)
        drop_dead(self.graph)
        alive = {node.name for node in self.graph.nodes}
        found, inputs = self.exported.found, self._of("input")
        return Program(
            graph=self.graph,
            types={name: kind for name, kind in self.types.items() if name in alive},
            sources={name: source for name, source in self.sources.items() if name in alive},
            parameters=self._table("parameter"),
            buffers=self._table("buffer"),
            constants=self._constants(),
            inputs={
                self.new[node].name: Input(path, dim) for node, path, dim in zip(inputs, self.paths, self.symbols.batch_dims, strict=True)
            },
            aliases=self.aliases,
            symbols={s: (self.new[inputs[index]].name, dim) for s, (index, dim) in self.symbols.places.items()},
            layers=self.layers,
            out_spec=found.spec,
            loss=None if found.loss is None else outputs[found.loss].name,
            outputs=tuple(None if place is None else outputs[place].name for place in found.places),
            output_constants=dict(found.constants),
            updates=self.updates,
            guards=guards_of(self.model, self.exported.program, self.symbols, leaves),
            notes=self.exported.notes,
            sites=self.sites,
            repeated=self.exported.layers.report(),
        )

    # ------------------------------------------------------------------------------------ placeholders

    def _holders(self) -> dict[fx.Node, _Holder]:
        """What every placeholder of the working graph stands for, by export's signature."""
        found: dict[fx.Node, _Holder] = {}
        paths = iter(self.paths)
        placeholders = self.work.find_nodes(op="placeholder")
        for node, spec in zip(placeholders, self.exported.program.graph_signature.input_specs, strict=True):
            target = str(spec.target).removeprefix(f"{ROOT}.")
            match spec.kind:
                case InputKind.PARAMETER:
                    found[node] = _Holder("parameter", target, _identifier(f"p_{target}"))
                case InputKind.BUFFER:
                    found[node] = _Holder("buffer", target, _identifier(f"b_{target}"))
                case InputKind.CONSTANT_TENSOR:
                    found[node] = _Holder("constant", str(spec.target), _identifier(f"c_{target}"))
                case InputKind.USER_INPUT:
                    path = next(paths)
                    found[node] = _Holder("input", path, _identifier(path))
                case _:
                    raise CaptureError(f"the model holds {target}, which is no tensor and which torch.export lifts", source=user_line())
        return found

    def _of(self, kind: str) -> list[fx.Node]:
        return [node for node, holder in self.holders.items() if holder.kind == kind]

    def _merge_twins(self) -> dict[str, str]:
        """Give all uses of a tied parameter or buffer to the first of its names. Returns the other names."""
        held = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers(remove_duplicate=False))}
        first: dict[int, fx.Node] = {}
        aliases = {}
        for node in [*self._of("parameter"), *self._of("buffer")]:
            name = self.holders[node].name
            canonical = first.setdefault(id(held[name]), node)
            if canonical is not node:
                node.replace_all_uses_with(canonical)
                aliases[name] = self.holders[canonical].name
        return {name: kept for name, kept in aliases.items() if kept in {self.holders[node].name for node in first.values() if node.users}}

    def _placeholder(self, node: fx.Node) -> None:
        holder = self.holders[node]
        self.new[node] = new = self.graph.create_node("placeholder", holder.placeholder, name=holder.placeholder)
        new.target = new.name
        self._describe(node, new)

    def _table(self, kind: str) -> dict[str, str]:
        return {self.new[node].name: self.holders[node].name for node in self._of(kind) if node in self.new}

    def _constants(self) -> dict[str, Tensor]:
        found = {}
        for placeholder, name in self._table("constant").items():
            value = self.exported.program.constants[name]
            if not isinstance(value, Tensor) or value.is_meta or isinstance(value, FakeTensor):
                raise CaptureError(
                    f"forward reads {name.removeprefix(f'{ROOT}.')}, a tensor on the meta device that has no values",
                    source=user_line(),
                    fix="make the model on a real device, or register this tensor as a buffer",
                )
            found[placeholder] = value.detach()
            if value.requires_grad:
                raise no_parameter()
        return found

    # ----------------------------------------------------------------------------------------- nodes

    def _simplify(self) -> tuple[str, ...]:
        """In the working graph: no in-place operations, no_grad as detach, no copies of constants. Returns the buffers that are updated."""
        state = self._of("parameter") + [node for node in self._of("buffer") + self._of("input") if _requires_grad(node)]
        fixed = {
            node: f"{h.kind} {h.name.removeprefix(f'{ROOT}.')}" for node, h in self.holders.items() if h.kind in ("parameter", "constant")
        }
        spell_statistics(self.work)
        spell_copies(self.work)
        refuse_shared_memory(self.work)
        written = functionalize(self.work, fixed, connected(self.work, state))
        updates = Updates(self.model, self.work, {node: self.holders[node].name for node in self._of("buffer")}, self.exported.found)
        updates.refuse_exchanged({node: self.holders[node].name.removeprefix(f"{ROOT}.") for node in self._of("constant")})
        names = updates.collect(written)
        stop_gradients(self.work, state)
        flowing = connected(self.work, state)
        updates.refuse_gradients(flowing)
        prove_rules(self.work, flowing)
        drop_copies(self.work)
        return names

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int | float | bool):
            self.new[node] = self._number(node, self.symbols.size(value))
            return
        self._emit(node, node.target, node.args, node.kwargs)

    def _number(self, node: fx.Node, size: Size) -> Any:
        """A size: one node for each of its values; a symbol is measured where `symbols` says."""
        if not isinstance(size, sympy.Basic):
            return size
        if size not in self.numbers:
            if isinstance(size, sympy.Symbol) and size in self.symbols.places:
                index, dim = self.symbols.places[size]
                measured = self._emit(node, aten.sym_size.int, (self._of("input")[index], dim), {})
            else:
                measured = self._emit(node, node.target, node.args, node.kwargs)
            self.numbers[size] = measured
        return self.numbers[size]

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A call in the new graph. Names come from operations alone, so that two captures give the same text."""
        way = kept(target)
        name = way.stem if way else target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else target.__name__
        args, kwargs = fx.node.map_arg((args, kwargs), self.new.__getitem__)
        self.new[node] = new = add_node(self.graph, "call_function", target, args, kwargs, name)
        self._describe(node, new)
        return new

    def _describe(self, node: fx.Node, new: fx.Node) -> None:
        kind = self.symbols.type(node.meta.get("val"))
        if kind is not None:
            self.types[new.name] = kind
        if (source := source_of(node, self.loss)) is not None:
            self.sources[new.name] = source


def _identifier(path: str) -> str:
    return re.sub(r"\W", "_", path)


def _requires_grad(node: fx.Node) -> bool:
    return bool(node.meta["val"].requires_grad)
