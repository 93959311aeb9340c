"""capture: the model, and its loss, as one flat functional graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.errors import CaptureError
from tpcompile.ir import Program
from tpcompile.passes import _binding as binding
from tpcompile.passes._binding import bind_example
from tpcompile.passes._build import Builder
from tpcompile.passes._call import Call
from tpcompile.passes._export import Exported, export
from tpcompile.passes._guards import matches, other_path
from tpcompile.passes._layers import Different
from tpcompile.passes._origin import line_of
from tpcompile.passes._reasons import user_line

__all__ = ["bind_example", "capture", "matches", "other_path"]


def capture(model: nn.Module, batch: Mapping[str, Any], *, loss: Callable[..., Tensor] | None = None, dynamic: bool = True) -> Program:
    """Capture what a model computes for a batch, in its own train or eval mode, and the loss of it.

    before  model(input_ids=[4, 16], labels=[4, 16])
    after   %input_ids, %labels : i64[b, s]
            %embedding = embedding(%p_tokens_weight, %input_ids) : f32[b, s, 64]
            …

    The graph is functional: what the model does in place is spelled as new values. Entries of the batch that forward does not list
    are read by `loss(outputs, batch)` alone. Without `dynamic` all sizes are fixed at the batch's own. Parameters may be on the meta
    device. Raises InputError where the batch does not fit forward, or the model does not run on it at all, and CaptureError with a
    reason and the user's line for what cannot be captured faithfully.
    """
    _refuse_autocast()
    binding.check_names(model, batch, with_loss=loss is not None)
    found, spec = binding.leaves(batch)
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)]
    examples = _examples(model, [leaf for _, leaf in tensors])
    call = Call(model, [leaf for _, leaf in found], spec, lambda given: binding.arguments(model, given, with_loss=loss is not None), loss)
    sizes = [_dynamic(example) if dynamic else frozenset[int]() for example in examples]
    paths = tuple(path for path, _ in tensors)

    def built(exported: Exported) -> Program:
        return Builder(model, exported, paths, examples, line_of(loss)).program(dict(found))

    exported = export(call, examples, sizes)
    try:
        return built(exported)
    except Different as different:
        whole = export(call, examples, sizes, once=False)
        return replace(built(whole), repeated=(f"all layers are captured: {different}", *exported.layers.notes))


def _refuse_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise CaptureError(
                f"autocast is on for {device}: its casts would not be captured",
                source=user_line(),
                fix="call this outside of autocast, with a model in the type that it should run in",
            )


def _examples(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Inputs to export with: on the model's device, the CPU for one without values, and no two of them the same object."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "meta":
        device = torch.device("cpu")
        tensors = [torch.zeros_like(t, device=device, requires_grad=t.requires_grad) if t.is_meta else t for t in tensors]
    moved = [tensor.detach().to(device) if device is not None else tensor.detach() for tensor in tensors]
    apart = [tensor.clone() if tensor is given or tensor._is_view() else tensor for tensor, given in zip(moved, tensors, strict=True)]
    return [new.requires_grad_(given.requires_grad) for new, given in zip(apart, tensors, strict=True)]


def _dynamic(example: Tensor) -> frozenset[int]:
    """The dimensions that another batch may have in another size: all of ids and masks, rows and positions of features."""
    dims = range(min(example.ndim, 2) if example.is_floating_point() else example.ndim)
    return frozenset(dim for dim in dims if example.shape[dim] > 1)
