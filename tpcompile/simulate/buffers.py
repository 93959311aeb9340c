"""The buffers of the model after some steps, on all ranks, beside one device's."""

from __future__ import annotations

from torch import nn

from tpcompile.simulate.distance import distance
from tpcompile.simulate.replay import Replay


def buffer_errors(replay: Replay, model: nn.Module) -> dict[str, float]:
    """The worst element of every buffer that a step changes, on any rank of any stage, relative to its largest or to 1.

    `model` is the untouched one after its steps. A buffer that it changes, and that no stage does, counts as it was.
    """
    errors: dict[str, float] = {}
    for name, whole in model.named_buffers():
        before = replay.model.get_buffer(name)
        made = [value for held in replay.buffers for value in held.get(name, [])]
        if made or distance(before, whole) > 0:
            size = max(1.0, float(whole.abs().max())) if whole.is_floating_point() and whole.numel() else 1.0
            errors[name] = max(distance(value, whole) for value in made or [before]) / size
    return errors
