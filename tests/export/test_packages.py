"""AOTInductor's packages: the numbers of the model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import export_workers
import parity_models
import pytest
import torch
from format_models import Sums, model_of

import tpcompile
from tpcompile.errors import InputError, Refused
from tpcompile.export.check import check_formats
from tpcompile.export.read import Saved


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("llama", "tp=2"), ("gpt", "pp=2")])
def test_they_are_the_model(tmp_path: Path, name: str, mesh: str) -> None:
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
def test_outputs_that_were_reduced_can_be_dropped(tmp_path: Path) -> None:
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


def test_without_a_compiler_nothing_is_written(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    compiled = tpcompile.compile(Sums(), "tp=2", torch.randn(4, 3, 6))
    with inductor.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)}), pytest.raises(InputError) as raised:
        compiled.emit(tmp_path / "build", formats=["aoti"])
    assert "AOTInductor finds no C++ compiler" in str(raised.value) and "name one in the environment variable CXX" in str(raised.value)
    assert not (tmp_path / "build").exists()


def test_what_cannot_be_compiled_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel for this\nand a page of more")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", failing)
    with pytest.raises(Refused) as raised:
        tpcompile.compile(Sums(), "tp=2", torch.randn(4, 3, 6)).emit(tmp_path, formats=["aoti"])
    assert raised.value.what == "AOTInductor cannot package stage 0: no kernel for this" and not any(tmp_path.iterdir())


def test_random_numbers_are_refused(tmp_path: Path) -> None:
    made, batch, _ = parity_models.made("gpt2", torch.float32)
    with pytest.raises(Refused, match="the program draws random numbers, which aoti does not repeat"):
        tpcompile.compile(made, "tp=2", batch).emit(tmp_path, formats=["pt2", "aoti"])
