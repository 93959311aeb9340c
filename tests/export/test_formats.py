"""ONNX and .pt2: the numbers of the model, for any batch and length."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import export_workers
import numpy as np
import parity_models
import pytest
import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.errors import InputError, Refused
from tpcompile.export.check import check_formats, run_onnx, whole_inputs
from tpcompile.export.read import Saved

pytest.importorskip("onnx")


def model_of(name: str, *, layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    if name.startswith("t5"):
        model, batch = t5()
        return model, batch if name == "t5" else {"input_ids": batch["input_ids"], "labels": batch["decoder_input_ids"]}
    made, batch, _ = parity_models.made(name, torch.float32)
    model = copy.deepcopy(made).eval()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList):
            model.set_submodule(path, module[:layers])
    return model, batch


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """A layer before and one after: a stage each."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=41, d_model=16, d_kv=4, d_ff=22, num_layers=1, num_heads=4, use_cache=False, pad_token_id=0)
    config.decoder_start_token_id = 0
    ids = parity_models.tokens()
    return T5ForConditionalGeneration(config).eval(), {"input_ids": ids, "decoder_input_ids": ids.flip(1)}


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


class Sums(nn.Module):
    """What it returns is what ranks have summed, and nothing is done with that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class TestPackages:
    @pytest.mark.processes
    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "mesh"), [("llama", "tp=2"), ("gpt", "pp=2")])
    def test_they_are_the_model(self, tmp_path: Path, name: str, mesh: str) -> None:
        model, batch = model_of(name, layers=1 if mesh == "tp=2" else 2)
        tpcompile.compile(model, mesh, batch).emit(tmp_path, formats=["aoti"])
        batches = [batch, {key: value[:3, :5].contiguous() for key, value in batch.items()}]
        saved = Saved.open(tmp_path)
        for found in tpcompile.launch(export_workers.packaged, mesh, str(tmp_path), batches):
            for given, made in zip(batches, found, strict=True):
                with torch.no_grad():
                    expected = model(**given)
                logits, loss = expected["logits"], expected["loss"]
                assert any(value.shape == logits.shape and (value - logits).abs().max() < 1e-5 for value in made.values())
                assert abs(made[saved.content["program"]["loss"]["name"]] - loss) < 1e-5
        assert check_formats(tmp_path)["aoti"] < 1e-5

    @pytest.mark.processes
    @pytest.mark.slow
    def test_outputs_that_were_reduced_can_be_dropped(self, tmp_path: Path) -> None:
        """torch runs a package under Python's lock: were its outputs tensors that gloo still holds, ranks would come to wait for ever."""
        torch.manual_seed(0)
        model, x = Sums(), torch.randn(4, 3, 6)
        tpcompile.compile(model, "tp=2", x, sequence_parallel=False).emit(tmp_path, formats=["aoti"])
        for made in tpcompile.launch(export_workers.packaged_often, "tp=2", str(tmp_path), x, 200, timeout=120):
            assert (made - model(x)).abs().max() < 1e-5
        content = bytearray((tmp_path / "rank_000.aoti.pt2").read_bytes())
        content[-1] ^= 1
        (tmp_path / "rank_000.aoti.pt2").write_bytes(content)
        with pytest.raises(InputError, match=r"rank_000\.aoti\.pt2 is not the file that was written"):
            check_formats(tmp_path)

    def test_without_a_compiler_nothing_is_written(self, tmp_path: Path) -> None:
        import torch._inductor.config as inductor

        compiled = tpcompile.compile(Sums(), "tp=2", torch.randn(4, 3, 6))
        with inductor.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)}), pytest.raises(InputError) as raised:
            compiled.emit(tmp_path / "build", formats=["aoti"])
        assert "AOTInductor finds no C++ compiler" in str(raised.value) and "name one in the environment variable CXX" in str(raised.value)
        assert not (tmp_path / "build").exists()

    def test_what_cannot_be_compiled_is_refused_with_the_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*_: Any, **__: Any) -> None:
            raise RuntimeError("no kernel for this\nand a page of more")

        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", failing)
        with pytest.raises(Refused) as raised:
            tpcompile.compile(Sums(), "tp=2", torch.randn(4, 3, 6)).emit(tmp_path, formats=["aoti"])
        assert raised.value.what == "AOTInductor cannot package stage 0: no kernel for this" and not any(tmp_path.iterdir())

    def test_random_numbers_are_refused(self, tmp_path: Path) -> None:
        made, batch, _ = parity_models.made("gpt2", torch.float32)
        with pytest.raises(Refused, match="the program draws random numbers, which aoti does not repeat"):
            tpcompile.compile(made, "tp=2", batch).emit(tmp_path, formats=["pt2", "aoti"])
