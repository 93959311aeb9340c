"""Private to capture: what a forward does to the tensors that the model's modules hold, seen while it is exported.

self.counter += 1                     in place: an operation of the graph, which functionalizing finds
self.mean = 0.9 * self.mean + …       another tensor in a buffer's place: no operation, and export puts the old one back
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tpcompile.errors import CaptureError
from tpcompile.passes._reasons import user_code, user_line

AUGMENTED = frozenset({"__iadd__", "__iand__", "__idiv__", "__imul__", "__ior__", "__isub__", "__itruediv__", "__ixor__", "__setitem__"})
"""Methods that change their tensor and do not end in an underscore."""


@dataclass(frozen=True)
class State:
    """The tensors of a model by name: its buffers, and those that are plain attributes of modules."""

    buffers: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> State:
        plain = {
            f"{path}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }
        return cls(dict(model.named_buffers(remove_duplicate=False)), plain)

    def replaced(self, after: State) -> dict[str, Tensor]:
        """The buffers that are other tensors afterwards, each under the first of its names. Raises CaptureError for what no graph shows:
        buffers that are new, names of one buffer that part, and buffers that come to share memory.
        """
        found: dict[str, Tensor] = {}
        if new := sorted(after.buffers.keys() - self.buffers.keys()):
            raise _unseen(f"registers a buffer, {new[0]}", "register it when the model is made")
        for name, old in self.buffers.items():
            names = [twin for twin, other in self.buffers.items() if other is old]
            made = after.buffers.get(name, old)
            if any(after.buffers.get(twin, old) is not made for twin in names):
                raise _unseen(f"parts {' and '.join(names)}, which are one buffer", "change the buffer in place, under torch.no_grad()")
            if made is not old and name == names[0]:
                sharing = [other for other, held in after.buffers.items() if other not in names and _memory(held) == _memory(made)]
                if sharing:
                    raise _unseen(f"makes the buffers {name} and {sharing[0]} share memory", f"clone what is assigned to {name}")
                found[name] = made
        return found

    def exchanged(self, after: State) -> frozenset[str]:
        """The plain attributes that are other tensors afterwards, or none."""
        return frozenset(name for name, old in self.plain.items() if after.plain.get(name) is not old)

    def written(self, function: Any, operands: Iterable[Any]) -> str:
        """The plain attribute into whose memory a function is about to write: export would do so in the model itself. "" for none."""
        name = getattr(function, "__name__", "")
        if name not in AUGMENTED and not (name.endswith("_") and not name.endswith("__")):
            return ""
        target = next(iter(operands), None)
        if type(target) is not Tensor:
            return ""
        return next((n for n, held in self.plain.items() if type(held) is Tensor and _memory(held) == _memory(target)), "")


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unseen(what: str, fix: str) -> CaptureError:
    return CaptureError(f"forward {what}", source=user_line(), fix=fix)


def no_buffer(name: str) -> CaptureError:
    return CaptureError(
        f"forward changes {name}, which is a plain attribute: it would be taken for a constant",
        at=user_code(),
        source=user_line(),
        fix="register it with register_buffer, so that it is a part of the model's state",
    )
