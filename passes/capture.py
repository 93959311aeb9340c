"""capture: the model, and its loss, as one flat functional graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from tpcompile.errors import CaptureError, caller
from tpcompile.ir import Guards, Input, Program, Source, Type
from tpcompile.layout import Size
from tpcompile.passes import _binding as binding
from tpcompile.passes._binding import bind_example
from tpcompile.passes._export import Call, Exported, export
from tpcompile.passes._functional import functionalize, refuse_hidden_updates
from tpcompile.passes._gradients import connected, drop_copies, stop_gradients
from tpcompile.passes._guards import guards_of, matches
from tpcompile.passes._inline import Flattener
from tpcompile.passes._origin import ROOT, layers_of, source_of
from tpcompile.passes._symbols import name_symbols

__all__ = ["bind_example", "capture", "matches"]

aten = torch.ops.aten


def capture(model: nn.Module, batch: Mapping[str, Any], *, loss: Callable[..., Tensor] | None = None) -> Program:
    """Capture what a model computes for a batch, in its own train or eval mode, and the loss of it.

    before  model(input_ids=[4, 16], labels=[4, 16])
    after   %input_ids, %labels : i64[b, s]
            %embedding = embedding(%p_tokens_weight, %input_ids) : f32[b, s, 64]
            …

    The graph is functional: what the model does in place is spelled as new values. Entries of the batch that forward does not list
    are read by `loss(outputs, batch)` alone. Parameters may be on the meta device. Raises InputError where the batch does not fit
    forward, and CaptureError with a reason and the user's line for what cannot be captured faithfully.
    """
    _refuse_autocast()
    binding.check_names(model, batch, with_loss=loss is not None)
    found, spec = binding.leaves(batch)
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)]
    examples = _examples(model, [leaf for _, leaf in tensors])
    call = Call(model, spec, [leaf for _, leaf in found], lambda given: binding.arguments(model, given, with_loss=loss is not None), loss)
    exported = export(call, examples, [_dynamic(example) for example in examples])
    return _Build(model, exported, tuple(path for path, _ in tensors), examples).program(dict(found))


def _refuse_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise CaptureError(
                f"autocast is on for {device}: its casts would not be captured",
                source=caller(),
                fix="call this outside of autocast, with a model in the type that it should run in",
            )


def _examples(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Inputs to export with: on the model's device, and no two of them the same object."""
    device = next((parameter.device for parameter in model.parameters()), None)
    moved = [tensor.detach().to(device) if device is not None else tensor.detach() for tensor in tensors]
    apart = [tensor.clone() if tensor is given or tensor._is_view() else tensor for tensor, given in zip(moved, tensors, strict=True)]
    return [new.requires_grad_(given.requires_grad) for new, given in zip(apart, tensors, strict=True)]


def _dynamic(example: Tensor) -> frozenset[int]:
    """The dimensions that another batch may have in another size: all of ids and masks, rows and positions of features."""
    dims = range(min(example.ndim, 2) if example.is_floating_point() else example.ndim)
    return frozenset(dim for dim in dims if example.shape[dim] > 1)


@dataclass(frozen=True)
class _Holder:
    """What a placeholder stands for."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str  # in the user's model, in the batch, or export's own
    placeholder: str


class _Build:
    """From what export made to a Program."""

    def __init__(self, model: nn.Module, exported: Exported, paths: Sequence[str], examples: Sequence[Tensor]) -> None:
        self.model, self.exported, self.paths = model, exported, paths
        self.work = Flattener().flatten(exported.program.graph_module)
        self.holders = self._holders()
        self.aliases = self._merge_twins()
        self.symbols = name_symbols(examples, [node.meta["val"].shape for node in self._of("input")])
        self.layers = layers_of(model, self.work.nodes)
        self._simplify()
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.numbers: dict[Size, fx.Node] = {}  # size → the node that computes it
        self.types: dict[str, Type] = {}
        self.sources: dict[str, Source] = {}

    def program(self, leaves: Mapping[str, Any]) -> Program:
        for node in self.work.nodes:
            match node.op:
                case "placeholder":
                    if node.users or self.holders[node].kind == "input":
                        self._placeholder(node)
                case "call_function":
                    self._call(node)
        outputs = fx.node.map_arg(self.work.output_node().args[0], self.new.__getitem__)
        self.graph.output(outputs)
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        self.graph.lint()
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
            guards=guards_of(self.model, self.exported.program, self.symbols, leaves),
            notes=self.exported.notes,
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
                    raise CaptureError(f"the model holds {target}, an object that is no tensor and that torch.export lifts", source=caller())
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
            if not isinstance(value, Tensor) or value.is_meta:
                raise CaptureError(
                    f"forward reads {name.removeprefix(f'{ROOT}.')}, a tensor on the meta device that has no values",
                    source=caller(),
                    fix="make the model on a real device, or register this tensor as a buffer",
                )
            found[placeholder] = value.detach()
        return found

    # ----------------------------------------------------------------------------------------- nodes

    def _simplify(self) -> None:
        """In the working graph: no in-place operations, no_grad as detach, no copies of constants."""
        state = self._of("parameter") + [node for node in self._of("buffer") + self._of("input") if _requires_grad(node)]
        fixed = {node: f"{holder.kind} {holder.name}" for node, holder in self.holders.items() if holder.kind in ("parameter", "buffer")}
        refuse_hidden_updates(self.work)
        functionalize(self.work, fixed, connected(self.work, state))
        stop_gradients(self.work, state)
        drop_copies(self.work)

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
            place = self.symbols.places.get(size)
            if place is not None:
                index, dim = place
                measured = self._emit(node, aten.sym_size.int, (self._of("input")[index], dim), {})
            else:
                measured = self._emit(node, node.target, node.args, node.kwargs)
            self.numbers[size] = measured
        return self.numbers[size]

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A call in the new graph. Names come from operations alone, so that two captures give the same text."""
        name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else target.__name__
        args, kwargs = fx.node.map_arg((args, kwargs), self.new.__getitem__)
        self.new[node] = new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self._describe(node, new)
        return new

    def _describe(self, node: fx.Node, new: fx.Node) -> None:
        kind = self.symbols.type(node.meta.get("val"))
        if kind is not None:
            self.types[new.name] = kind
        if (source := source_of(node)) is not None:
            self.sources[new.name] = source


def _identifier(path: str) -> str:
    return re.sub(r"\W", "_", path)


def _requires_grad(node: fx.Node) -> bool:
    return bool(node.meta["val"].requires_grad)
