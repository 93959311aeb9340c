"""A model trained on one mesh and then on another, through a checkpoint: the steps that follow are one device's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import checkpoint_workers as workers
import pytest
import torch
import transformers
from checkpoint_workers import MODELS, Found

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ALL = "dp=2,pp=2,tp=2 zero2"
FOUR = [
    *(("fused", mesh) for mesh in ("tp=4", "pp=4", "dp=4 zero3", "dp=4 zero1", "dp=2,pp=2 zero2 zbv", "pp=2,tp=2 ddp interleaved_1f1b")),
    *(("shared", mesh) for mesh in ("tp=4", "dp=2,tp=2")),
]
ONE = [("fused", "tp=1"), ("shared", "tp=1")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def first(directory: Path) -> list[dict[str, workers.First]]:
    return tpcompile.launch(workers.first, ALL.split()[0], list(MODELS), ALL, str(directory / "there"))


@pytest.fixture(scope="module")
def second(directory: Path, first: Any) -> list[dict[tuple[str, str], Found]]:
    there, back = str(directory / "there"), str(directory / "back")
    return [*tpcompile.launch(workers.second, "tp=4", FOUR, there, back), workers.second(ONE, there, back)]


@cache
def expected(name: str) -> list[float]:
    return workers.reference(name, 4)[0]


def check(name: str, found: Found, losses: int = 2) -> None:
    assert len(found.losses) == losses
    assert max(abs(a - b) for a, b in zip(found.losses, expected(name)[-losses:], strict=True)) <= 1e-10, found
    assert found.parameters.error <= 1e-9, found
    assert found.step == 2 or losses == 4


@pytest.mark.parametrize("name", MODELS)
def test_the_same_mesh_goes_on_bit_by_bit(first: list[dict[str, workers.First]], name: str) -> None:
    for rank in first:
        check(name, rank[name].found, 4)
        check(name, rank[name].again)
        assert rank[name].bitwise and rank[name].found.losses[2:] == rank[name].again.losses


@pytest.mark.parametrize(("name", "mesh"), FOUR + ONE)
def test_another_mesh_goes_on(second: list[dict[tuple[str, str], Found]], name: str, mesh: str) -> None:
    ranks = [found[name, mesh] for found in second if (name, mesh) in found]
    assert len(ranks) == (1 if mesh == "tp=1" else 4)
    for found in ranks:
        check(name, found)


def test_and_back(directory: Path, second: Any) -> None:
    paths = {name: [f"{directory}/back/{name}_{mesh}" for other, mesh in FOUR + ONE if other == name] for name in MODELS}
    for rank in tpcompile.launch(workers.resumed, ALL.split()[0], paths, ALL):
        assert len(rank) == len(FOUR + ONE)
        for path, found in rank.items():
            check(Path(path).name.split("_")[0], found)


@pytest.mark.parametrize("name", MODELS)
def test_whole_tensors_under_the_models_own_keys(first: list[dict[str, workers.First]], name: str, directory: Path) -> None:
    model = MODELS[name]()
    assert [rank[name].keys for rank in first] == [list(model.state_dict()), *[[]] * 7]
    assert first[0][name].whole.error <= 1e-9
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory / "there" / f"{name}_whole", dtype=torch.float64)
    trained = dict(loaded.named_parameters())
    reference = workers.reference(name, 4)[1]
    assert trained.keys() == reference.keys()
    assert max((trained[key] - value).abs().max().item() for key, value in reference.items()) <= 1e-9


def test_a_save_in_the_background_and_a_lost_file(tmp_path: Path) -> None:
    for rank, found in enumerate(tpcompile.launch(workers.in_background, "tp=2", str(tmp_path))):
        assert found.same and found.untouched
        lost = f"{found.path}/rank_00001_0.safetensors is missing"
        assert lost in found.error and "nothing in memory was changed" in found.error, rank


def test_shards_of_pieces() -> None:
    zero, one = tpcompile.launch(workers.shards, "dp=2")
    assert all(right for _, right in zero + one)
    assert [boxes for boxes, _ in zero] == [
        [((0, 0), (4, 2), (0, 0)), ((0, 6), (4, 3), (0, 2))],
        [((0, 0), (7, 2), (0, 0)), ((0, 6), (7, 1), (0, 2))],
        [((0, 0), (2, 12), (0, 0)), ((3, 0), (1, 12), (2, 0))],
        [((0, 0), (2, 6), (0, 0)), ((3, 0), (3, 6), (2, 0))],
        [((0, 0), (4, 12), (0, 0))],
        [((0, 0), (7, 6), (0, 0))],
    ]
    assert [boxes for boxes, _ in one][:3] == [
        [((4, 0), (3, 2), (0, 0)), ((4, 6), (3, 3), (0, 2))],
        [((0, 7), (7, 2), (0, 0))],
        [((4, 0), (2, 12), (0, 0))],
    ]
