"""ONNX and .pt2: the numbers of the model, for any batch and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import parity_models
import pytest
import torch
from format_models import model_of
from torch import Tensor, nn

import tpcompile
from tpcompile.errors import InputError, Refused
from tpcompile.export.check import check_formats, run_onnx, whole_inputs
from tpcompile.export.read import Saved

pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks of two stages, in ONNX and .pt2."""
    directory, (model, batch) = tmp_path_factory.mktemp("llama"), model_of("llama")
    tpcompile.compile(model, "pp=2,tp=2", batch).emit(directory, formats=["onnx", "pt2"])
    return directory


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "tp=3"), ("bert", "tp=2"), ("t5", "pp=2"), ("t5 with labels", "tp=2")])
def test_onnx_in_lockstep_is_the_model(tmp_path: Path, name: str, mesh: str) -> None:
    model, batch = model_of(name, layers=1)
    tpcompile.compile(model, mesh, batch).emit(tmp_path, formats=["onnx"])
    check_onnx(tmp_path, model, batch)


def test_onnx_of_stages_and_tensor_ranks_is_the_model(llama: Path) -> None:
    check_onnx(llama, *model_of("llama"))


def check_onnx(directory: Path, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Logits and loss on every tensor rank, for the batch that it was written with and for a smaller one."""
    saved = Saved.open(directory)
    for given in (batch, {key: value[:3, :5].contiguous() for key, value in batch.items()}):
        with torch.no_grad():
            expected = model(**given)
        inputs = whole_inputs(saved, given)
        for made in run_onnx(saved, inputs):
            logits = next(value for value in made.values() if value.shape == expected.logits.shape)
            assert (logits - expected.logits).abs().max() < 1e-5
            if (loss := saved.content["program"]["loss"]) is not None:
                assert abs(made[loss["name"]] - expected.loss) < 1e-5


def test_without_collectives_onnxruntime_runs_it(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, batch = model_of("gpt2")
    given = {"input_ids": batch["input_ids"]}
    tpcompile.compile(model, "pp=2", given).emit(tmp_path, formats=["onnx"])
    values: dict[str, Any] = {"input_ids": batch["input_ids"][:3, :4].numpy()}
    for rank in range(2):
        session = runtime.InferenceSession(str(tmp_path / f"rank_00{rank}.onnx"), providers=["CPUExecutionProvider"])
        taken = {entry.name: values[entry.name] for entry in session.get_inputs()}
        values |= dict(zip([entry.name for entry in session.get_outputs()], session.run(None, taken), strict=True))
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"][:3, :4]).logits.numpy()
    logits = next(value for value in values.values() if value.shape == expected.shape)
    assert np.abs(logits - expected).max() < 1e-5


def test_onnx_keeps_names_and_open_sizes(llama: Path) -> None:
    import onnx

    stages = [onnx.load(llama / f"rank_00{rank}.onnx") for rank in (1, 3)]
    names = {tensor.name for made in stages for tensor in made.graph.initializer}
    assert {name for name, _ in model_of("llama")[0].named_parameters()} <= names
    (ids,) = (entry for entry in stages[0].graph.input if entry.name == "input_ids")
    assert all(dim.dim_param for dim in ids.type.tensor_type.shape.dim)
    for layer, made in enumerate(stages):
        kinds = {(node.domain, node.op_type) for node in made.graph.node if node.domain}
        assert kinds == {("com.microsoft", "AllReduce"), ("com.microsoft", "AllGather")}
        scopes = [prop.value for node in made.graph.node for prop in node.metadata_props if prop.key == "pkg.torch.onnx.name_scopes"]
        assert any(f"'model.layers.{layer}'" in scope for scope in scopes), "nodes are grouped by layer"


def test_random_numbers_are_refused(tmp_path: Path) -> None:
    made, batch, _ = parity_models.made("gpt2", torch.float32)
    with pytest.raises(Refused, match="the program draws random numbers, which onnx does not repeat"):
        tpcompile.compile(made, "tp=2", batch).emit(tmp_path, formats=["onnx"])


@pytest.mark.processes
def test_pt2_and_onnx_do_what_the_sources_do(llama: Path) -> None:
    found = check_formats(llama)
    assert found.keys() == {"onnx", "pt2"} and all(worst < 1e-5 for worst in found.values())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "layers"), [("tp=2", 1), ("pp=2", 2)])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_pt2_is_what_the_sources_are(tmp_path: Path, name: str, mesh: str, layers: int) -> None:
    model, batch = model_of(name, layers=layers)
    tpcompile.compile(model, mesh, batch).emit(tmp_path, formats=["pt2"])
    assert check_formats(tmp_path)["pt2"] < 1e-5


def test_random_numbers_are_not_compared(tmp_path: Path) -> None:
    """.pt2 takes the key of a step, and draws the masks that it says."""
    made, batch, _ = parity_models.made("gpt2", torch.float32)
    tpcompile.compile(made, "tp=2", batch).emit(tmp_path, formats=["pt2"])
    with pytest.raises(InputError, match="the program draws random numbers: its formats are given the key of a step"):
        check_formats(tmp_path)
