"""A checkpoint's files: tensors as safetensors, and one description of all of them as JSON. Nothing is pickled.

step_00000100/
    checkpoint.json           which file has which box of which tensor; settings, counters
    rank_00000_0.safetensors  boxes by names such as model.h.0.attn.c_attn.weight:0,64
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tpcompile.errors import InputError
from tpcompile.runtime.checkpoint.boxes import Box
from tpcompile.runtime.checkpoint.plain import dtype_name, dtype_of
from tpcompile.runtime.checkpoint.together import rank

DESCRIPTION = "checkpoint.json"
FORMAT, VERSION = "tpcompile checkpoint", 1
FILE_BYTES = 2**28
"""A rank begins another file when one has as many bytes: what is copied at a time."""


class Writer(StorageWriter):
    """Writes into a directory that is there, and is nobody else's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            name = f"rank_{rank():05d}_{number}.safetensors"
            tensors: dict[str, Tensor] = {}
            for item in items:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor)
                tensors[_key(item.index)] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            save_file(tensors, self._path / name, {"format": "pt"})
            sync(self._path / name)
            size = (self._path / name).stat().st_size
            written += [WriteResult(item.index, _bytes(item), (name, size)) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = [result for own in results for result in own]
        places = {(result.index.fqn, tuple(result.index.offset or ())): result.storage_data for result in found}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                {"file": places[name, tuple(chunk.offsets)][0], "start": list(chunk.offsets), "size": list(chunk.sizes)}
                for chunk in stored.chunks
            ]
            tensors[name] = {"dtype": dtype_name(stored.properties.dtype), "shape": list(stored.size), "chunks": chunks}
        text = {"format": FORMAT, "version": VERSION, **metadata.planner_data, "files": dict(places.values()), "tensors": tensors}
        write_text(self._path / DESCRIPTION, json.dumps(text, indent=1))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    for item in items:
        if batch and sum(map(_bytes, batch)) + _bytes(item) > FILE_BYTES:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)).numel * data.properties.dtype.itemsize


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}:{','.join(map(str, index.offset or ()))}"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------- reading


def describe(path: Path) -> dict[str, Any]:
    """A checkpoint's description. Raises InputError for one that is missing, damaged or of another kind."""
    file = path / DESCRIPTION
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise bad(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise bad(f"{file} does not describe a checkpoint of tpcompile")
    if found.get("version") != VERSION:
        raise bad(f"{file} is of version {found.get('version')}, and this is tpcompile for version {VERSION}")
    return found


def bad(what: str) -> InputError:
    return InputError(what, at="compiled.load", fix="load another checkpoint; nothing in memory was changed")


class Reader(StorageReader):
    """Reads what a plan asks for, after a look at every file's size and every box's shape and type."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self._path, self._sizes = path, description["files"]
        self._places: dict[tuple[str, tuple[int, ...]], str] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._metadata = Metadata({})
        for name, stored in description["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(chunk["start"]), torch.Size(chunk["size"])) for chunk in stored["chunks"]]
            self._places |= {(name, tuple(chunk["start"])): chunk["file"] for chunk in stored["chunks"]}
            self._chunks |= {(name, tuple(chunk["start"])): chunk["size"] for chunk in stored["chunks"]}
            properties = TensorProperties(dtype=dtype_of(stored["dtype"]))
            self._metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index.fqn, tuple(item.storage_index.offset or ())], []).append(item)
        for name, items in by_file.items():
            self._check(name)
            try:
                with safe_open(self._path / name, framework="pt") as file:
                    keys = set(file.keys())
                    for item in items:
                        if _key(item.storage_index) not in keys:
                            raise bad(f"{self._path / name} has no {_key(item.storage_index)}")
                        self._read(file, self._path / name, item, planner)
            except SafetensorError as error:
                raise bad(f"{self._path / name} is damaged: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check(self, name: str) -> None:
        file, size = self._path / name, self._sizes[name]
        if not file.is_file():
            raise bad(f"{file} is missing")
        if (found := file.stat().st_size) != size:
            raise bad(f"{file} has {found} bytes, and {size} were written")

    def _read(self, file: Any, path: Path, item: ReadItem, planner: LoadPlanner) -> None:
        key, stored = _key(item.storage_index), self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        size = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        given = file.get_slice(key)
        if list(given.get_shape()) != size:
            raise bad(f"{path} has {key} in shape {list(given.get_shape())}, and {size} was written")
        ranges = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
        value: Tensor = given[ranges] if ranges else file.get_tensor(key)
        if value.dtype != stored.properties.dtype:
            raise bad(f"{path} has {key} in {dtype_name(value.dtype)}, and {dtype_name(stored.properties.dtype)} was written")
        planner.resolve_tensor(item).copy_(value)
