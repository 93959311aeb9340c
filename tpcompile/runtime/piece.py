"""One stage as a schedule runs it: torch's PipelineStage, whose backward can be kept whole."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage


class Piece(PipelineStage):
    """A stage. With `whole`, where a schedule asks for backward in halves, the first is all of it and the second nothing."""

    def __init__(self, *args: Any, whole: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._whole = whole

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._whole, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._whole:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
