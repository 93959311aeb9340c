"""A model that cannot be exported may not run at all: then its own error says more than that of torch.export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.errors import InputError
from tpcompile.passes._call import Call
from tpcompile.passes._reasons import raised_at, reason_of, user_line


def check_eager(call: Call, tensors: Sequence[Tensor]) -> None:
    """Run the model as it is, once, and leave it as it was. Raises InputError with its error, if it has one, and the user's line.

    A model on the meta device has no values to run with.
    """
    if any(tensor.is_meta for tensor in (*tensors, *call.model.parameters(), *call.model.buffers())):
        return
    try:
        with _unchanged(call.model), torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            call.run(tensors)
    except Exception as error:  # whatever the user's code raises
        source = raised_at(error, Call.run.__code__)
        raise InputError(
            f"{type(call.model).__name__} does not run on this batch: {type(error).__name__}: {reason_of(error)}",
            at=source.code if source else "",
            source=str(source) if source else user_line(),
            fix="give it a batch that model(**batch) takes, or mend this line; nothing was compiled",
        ) from error


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Give the model's buffers, and its plain attributes that are tensors, their values back."""
    before = [(held, _tensors(held)) for module in model.modules() for held in (module._buffers, vars(module))]
    copies = [(tensor, tensor._version, tensor.detach().clone()) for _, tensors in before for tensor in tensors.values()]
    try:
        yield
    finally:
        for held, tensors in before:
            for name in _tensors(held).keys() - tensors.keys():
                del held[name]
            held.update(tensors)
        for tensor, version, copy in copies:
            if tensor._version != version:
                tensor.detach().copy_(copy)


def _tensors(held: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in held.items() if isinstance(value, Tensor) and not value.is_inference()}
