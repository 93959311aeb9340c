"""Plans for torch.distributed.checkpoint, in boxes of whole tensors: one writer per element, and readers that take their cover."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tpcompile.errors import TpcompileError
from tpcompile.runtime.checkpoint.boxes import Box, shared_out, whole
from tpcompile.runtime.checkpoint.shares import Share


class Saving(SavePlanner):
    """Every rank states the boxes that it holds; rank 0 shares out who writes what.

    `facts` are this rank's notes, `merge` makes those of all ranks into what the checkpoint's description says.
    """

    def __init__(self, shares: Sequence[Share], facts: Any, merge: Callable[[Sequence[Any]], Mapping[str, Any]]) -> None:
        self._shares, self._facts, self._merge = {share.name: share for share in shares}, facts, merge

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [_write(share.name, part.box, share.tensor.dtype, share.shape) for share in self._shares.values() for part in share.parts]
        return SavePlan(items, planner_data=self._facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kinds: dict[str, TensorWriteData] = {}
        held: list[dict[str, list[Box]]] = [{} for _ in all_plans]
        for boxes, plan in zip(held, all_plans, strict=True):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                first = kinds.setdefault(item.index.fqn, data)
                if (first.size, first.properties.dtype) != (data.size, data.properties.dtype):
                    raise TpcompileError(f"ranks hold {item.index.fqn} in different shapes or types", at="compiled.save")
                boxes.setdefault(item.index.fqn, []).append(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        writes = shared_out(held, {name: data.properties.dtype.itemsize for name, data in kinds.items()})
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in kinds}
        plans = []
        for plan, own in zip(all_plans, writes, strict=True):
            items = [_write(name, box, kinds[name].properties.dtype, kinds[name].size) for name, box in own]
            for item in items:
                assert item.tensor_data is not None
                chunks[item.index.fqn].append(item.tensor_data.chunk)
            plans.append(replace(plan, items=items))
        for name, data in kinds.items():
            written = sum(Box(tuple(chunk.offsets), tuple(chunk.sizes)).numel for chunk in chunks[name])
            if written != whole(data.size).numel:
                raise TpcompileError(f"no rank holds {whole(data.size).numel - written} elements of {name}", at="compiled.save")
        tensors = {name: TensorStorageMetadata(data.properties, data.size, chunks[name]) for name, data in kinds.items()}
        return plans, Metadata(dict(tensors), planner_data=self._merge([plan.planner_data for plan in all_plans]))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        share, data = self._shares[write_item.index.fqn], write_item.tensor_data
        assert data is not None
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        (inside,) = (part for part in share.parts if part.box.meet(box) == box)
        return inside.local(box).of(share.tensor)


def _write(name: str, box: Box, dtype: torch.dtype, shape: Sequence[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, box.start), WriteItemType.SHARD, tensor_data=data)


class Loading(LoadPlanner):
    """Every rank reads what its boxes share with the chunks of the files, into tensors of its own."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = list(shares)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for place, share in enumerate(self._shares) for item in self._reads(place, share)])

    def _reads(self, place: int, share: Share) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata[share.name]
        assert isinstance(stored, TensorStorageMetadata)
        items, covered = [], 0
        for chunk in stored.chunks:
            saved = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            for part in share.parts:
                if (shared := part.box.meet(saved)) is None:
                    continue
                covered += shared.numel
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        MetadataIndex(share.name, index=place),
                        torch.Size(part.local(shared).start),
                        MetadataIndex(share.name, saved.start),
                        torch.Size(shared.moved([-a for a in saved.start]).start),
                        torch.Size(shared.size),
                    )
                )
        if covered != sum(part.box.numel for part in share.parts):
            raise TpcompileError(f"the checkpoint's chunks of {share.name} do not cover what this rank needs of it")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TpcompileError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = read_item.dest_index.index
        assert place is not None
        return Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).of(self._shares[place].tensor)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
