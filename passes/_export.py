"""torch.export around a model's call: with dynamic sizes where it can, and with what its graph does not show noticed."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch import predispatch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from tpcompile.errors import CaptureError, TpcompileError
from tpcompile.passes._blank import as_on_cpu
from tpcompile.passes._call import Call, Found
from tpcompile.passes._eager import check_eager
from tpcompile.passes._functions import keep
from tpcompile.passes._layers import Layers
from tpcompile.passes._reasons import raised_at, reason_of, user_code, user_line

RECOMPUTES = "the model's own activation checkpointing is left out"


@dataclass(frozen=True)
class Exported:
    program: ExportedProgram
    found: Found
    notes: tuple[str, ...]
    layers: Layers


def export(call: Call, tensors: Sequence[Tensor], dynamic: Sequence[frozenset[int]], *, once: bool = True) -> Exported:
    """Export with these dimensions dynamic; if that fails with only the rows dynamic, and then with none.

    Of layers that are alike, only some are traced if that is to be done `once`: see `_layers`.
    Raises CaptureError with the reason of the last attempt and the user's line; InputError where the model does not run without export.
    """
    attempts = [tuple(dynamic), tuple(dims & {0} for dims in dynamic), (frozenset[int](),) * len(dynamic)]
    *dynamic_ones, static = dict.fromkeys(attempts)
    for dims in dynamic_ones:
        try:
            exported = _attempt(call, tensors, dims, once)
        except TpcompileError:
            raise
        except Exception:
            continue
        if _is_measurable(exported.program):
            return exported
    try:
        return _attempt(call, tensors, static, once)
    except TpcompileError:
        raise
    except Exception as error:
        check_eager(call, tensors)
        raise _failed(call, error) from error


def _attempt(call: Call, tensors: Sequence[Tensor], dims: Sequence[frozenset[int]], once: bool) -> Exported:
    """An export; a second one where layers were copied and the last of them was not known before; one in full where that does not help."""
    layers = Layers(call.model if once else nn.Module())
    try:
        exported = _exported(call, tensors, dims, layers)
        if last := layers.unchecked():
            layers = Layers(call.model, last)
            exported = _exported(call, tensors, dims, layers)
        if not layers.unchecked():
            return exported
    except TpcompileError:
        raise
    except Exception:
        if not layers.calls:
            raise
    return _exported(call, tensors, dims, Layers(nn.Module()))


def _exported(call: Call, tensors: Sequence[Tensor], dims: Sequence[frozenset[int]], layers: Layers) -> Exported:
    shapes = [dict.fromkeys(sorted(wanted), Dim.AUTO) for wanted in dims]
    record = call.record
    record.refused, record.notes = None, {}
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _watching(call),
            layers.watching(),
            _quiet(),
            as_on_cpu(call.model),
        ):
            program = torch.export.export(call, (list(tensors),), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:
        if record.refused is not None:
            raise record.refused from error
        raise
    assert record.found is not None
    return Exported(program, record.found, (*record.notes, *record.found.notes), layers)


def _is_measurable(program: ExportedProgram) -> bool:
    """Whether every symbol in an input's shape is the size of some input's dimension by itself."""
    shapes = [node.meta["val"].shape for node in program.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    sizes = [size.node.expr for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    return {symbol for size in sizes for symbol in size.free_symbols} <= set(sizes)


def _failed(call: Call, error: Exception) -> CaptureError:
    source = raised_at(error, Call.forward.__code__)
    reason = reason_of(error)
    if "data-dependent" in str(error):
        fix = "choose with torch.where instead of a Python branch, so that the graph is the same for all values"
    else:
        fix = "rewrite this line, or compile a part of the model that does not run it"
    at, line = (source.code, str(source)) if source else ("", user_line())
    return CaptureError(f"torch.export cannot capture {type(call.model).__name__}: {reason}", at=at, source=line, fix=fix)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.export's own reports, which ours replace, out of logs and the terminal."""
    before, text = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(text), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute")  # weights that a module lists a second time
            yield
        sys.stderr.write(text.getvalue())
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------- what the graph does not show


@contextmanager
def _watching(call: Call) -> Iterator[None]:
    """Keep every autograd.Function, of which export would drop the backward, and notice activation checkpointing.

    What vmap does to put its dimension in place is its own business too: export would take the result for a constant.
    """
    apply, generator = torch.autograd.Function.__dict__["apply"], checkpoint._checkpoint_without_reentrant_generator
    record, below = call.record, cast(Any, predispatch)
    unbatch = below._remove_batch_dim_impl

    def watched(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *operands = args
            with _run_again(call):
                return function(*operands)
        if not cls.__module__.startswith("torch.") and _needs_backward((args, kwargs)):
            try:
                return keep(cls, args, kwargs)
            except CaptureError as error:
                record.refused = error
                raise
        return apply.__get__(None, cls)(*args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        with _run_again(call):
            yield from generator(*args, **kwargs)

    def unbatched(*args: Any) -> Tensor:
        with disable_proxy_modes_tracing():
            return unbatch(*args)  # type: ignore[no-any-return]

    torch.autograd.Function.apply = classmethod(watched)  # type: ignore[method-assign, assignment]
    checkpoint._checkpoint_without_reentrant_generator = noted
    below._remove_batch_dim_impl = unbatched
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        checkpoint._checkpoint_without_reentrant_generator = generator
        below._remove_batch_dim_impl = unbatch


@contextmanager
def _run_again(call: Call) -> Iterator[None]:
    """What is run here is run again in backward by the untouched model: it must not change buffers, which would change twice."""
    call.record.notes[RECOMPUTES] = None
    before = _versions(call.model)
    yield
    if changed := [name for name, version in _versions(call.model).items() if before.get(name) != version]:
        call.record.refused = CaptureError(
            f"forward changes {changed[0]} under activation checkpointing, which runs it twice",
            at=user_code(),
            source=user_line(),
            fix="change it outside, or turn the model's own checkpointing off",
        )
        raise call.record.refused


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def _needs_backward(arguments: Any) -> bool:
    """Whether a gradient may reach the arguments; below vmap, which hides that, it may."""
    wanted = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments))
    return torch.is_grad_enabled() and (wanted or torch._C._are_functorch_transforms_active())
