"""Programs on disk: what is written, that it runs as the program in memory, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_workers
import parity_models
import pytest
import torch
import transformers
from torch import Tensor, nn

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.errors import InputError, Refused
from tpcompile.export.numbers import decode, encode
from tpcompile.export.read import Saved
from tpcompile.layout import symbol
from tpcompile.passes._chain import folded


def batches(model: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    made, batch, _ = parity_models.made(model, torch.float32)
    return copy.deepcopy(made), [batch, {name: value.flip(0) for name, value in batch.items()}]


def written(directory: Path, model: str = "gpt2", mesh: str = "pp=2,tp=2", **options: Any) -> Path:
    made, given = batches(model)
    tpcompile.compile(made, mesh, given[0], **options).emit(directory)
    return directory


class TestFiles:
    @pytest.fixture(scope="class")
    def build(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return written(tmp_path_factory.mktemp("build"))

    def test_every_file_is_named(self, build: Path) -> None:
        manifest = json.loads((build / "manifest.json").read_text())
        assert {file.name for file in build.iterdir()} == {*manifest["files"], "manifest.json"}
        assert [rank["weights"] for rank in manifest["ranks"]] == [f"rank_00{rank}.safetensors" for rank in range(4)]
        assert [rank["stages"] for rank in manifest["ranks"]] == [[0], [0], [1], [1]]
        calls = [call["call"] for call in manifest["stages"][0]["collectives"]["forward"]]
        assert calls == ["reduce_scatter", "all_gather"] * 2 + ["reduce_scatter"]

    def test_sources_are_short_and_pass_ruff(self, build: Path) -> None:
        for file in build.glob("*.py"):
            assert len(file.read_text().splitlines()) < 300
        ran = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", *build.glob("*.py")], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout

    def test_weights_are_those_of_the_program_in_memory(self, build: Path) -> None:
        model, given = batches("gpt2")
        compiled, saved = tpcompile.compile(model, "pp=2,tp=2", given[0]), Saved.open(build)
        for rank in range(4):
            for ours, theirs in zip(saved.modules(rank), compiled.program(rank).modules, strict=True):
                state = theirs.state_dict()
                assert ours.state_dict().keys() == state.keys()
                assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())

    @pytest.mark.parametrize("name", ["stage_1.py", "rank_002.safetensors", "counts.py", "plan.txt"])
    def test_a_changed_file_is_refused_by_name(self, build: Path, name: str) -> None:
        content = (build / name).read_bytes()
        try:
            (build / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            with pytest.raises(InputError, match=f"{name} is not the file that was written"):
                tpcompile.load(build)
            (build / name).unlink()
            with pytest.raises(InputError, match=f"{name} is missing"):
                tpcompile.load(build)
        finally:
            (build / name).write_bytes(content)

    def test_another_release_is_refused(self, build: Path) -> None:
        file = build / "manifest.json"
        content = file.read_text()
        try:
            file.write_text(content.replace(torch.__version__, "2.99.0"))
            with pytest.raises(InputError, match=r"written with torch 2\.99\.0, this is"):
                tpcompile.load(build)
            file.write_text("{")
            with pytest.raises(InputError, match=r"manifest\.json cannot be read"):
                tpcompile.load(build)
        finally:
            file.write_text(content)

    def test_another_mesh_is_refused(self, build: Path) -> None:
        with pytest.raises(InputError, match=r"4 processes|needs 4|1 process"):
            tpcompile.load(build).module  # noqa: B018

    def test_a_folder_with_other_files_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="is not empty, and no program was written there"):
            written(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]

    def test_what_was_written_before_goes_and_what_others_put_there_stays(self, tmp_path: Path) -> None:
        written(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        for _ in range(2):
            written(tmp_path, mesh="tp=2")
            names = {file.name for file in tmp_path.iterdir()}
            assert names == {*json.loads((tmp_path / "manifest.json").read_text())["files"], "manifest.json", "notes.txt"}
            assert "notes.txt" not in json.loads((tmp_path / "manifest.json").read_text())["files"]
            assert "stage_1.py" not in names and "rank_002.safetensors" not in names


class Bessel(nn.Module):
    """What ONNX has no operator for; and an output that has no place in a manifest, which is written last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return self.down(torch.special.i0(self.up(x))), torch.float32


class TestAllOrNothing:
    @pytest.mark.parametrize("formats", [(), ("onnx",)])
    def test_a_refusal_leaves_the_folder_as_it_was(self, tmp_path: Path, formats: tuple[str, ...]) -> None:
        folder, x = tmp_path / "deep" / "build", torch.randn(4, 3, 6)
        failing = tpcompile.compile(Bessel(), "tp=2", x)

        def refused() -> None:
            if formats:
                with pytest.raises(Refused) as raised:
                    failing.emit(folder, formats=formats)
                assert raised.value.what.startswith("ONNX cannot hold stage 0: No ONNX function found for") and "bessel_i0" in str(
                    raised.value
                )
            else:
                with pytest.raises(InputError, match="the output holds a dtype, which has no place in a file"):
                    failing.emit(folder)

        refused()
        assert not folder.exists()
        written(folder, mesh="tp=2")
        (folder / "notes.txt").write_text("mine")
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        refused()
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
        tpcompile.load(folder)

    def test_what_a_killed_process_left_is_cleared(self, tmp_path: Path) -> None:
        """Killed while it wrote, and while it moved what it had written: the files of its own manifest are known to be its own."""
        (tmp_path / ".unfinished").mkdir()
        (tmp_path / ".unfinished" / "stage_0.py").write_text("half")
        written(tmp_path)
        names = [file.name for file in tmp_path.iterdir()]
        (tmp_path / ".unfinished").mkdir()
        for name in ("manifest.json", "rank_002.safetensors"):
            (tmp_path / name).rename(tmp_path / ".unfinished" / name)
        written(tmp_path, mesh="tp=2")
        assert "stage_1.py" in names and not {".unfinished", "stage_1.py", "rank_002.safetensors"} & {f.name for f in tmp_path.iterdir()}
        tpcompile.load(tmp_path)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_golden(tmp_path: Path, model: str, golden: Callable[..., None]) -> None:
    """The sources of both stages, whole."""
    written(tmp_path, model)
    for stage in range(2):
        golden((tmp_path / f"stage_{stage}.py").read_text(), f"{model}_stage_{stage}")


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_a_source_does_not_grow_with_the_depth(tmp_path: Path, mesh: str) -> None:
    """Equal layers are a class, a line that makes them, and a loop; the program with the loop computes what the model does."""
    ids = torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(0))
    batch, sources = {"input_ids": ids, "labels": ids}, {}
    for layers in (12, 20):
        torch.manual_seed(0)
        model = GPT(Config(layers=layers, heads=2, hidden=8, inner=10)).double()
        tpcompile.compile(model, mesh, batch).emit(tmp_path / str(layers))
        sources[layers] = [file.read_text().splitlines() for file in sorted((tmp_path / str(layers)).glob("stage_*.py"))]
    assert [len(lines) for lines in sources[12]] == [len(lines) for lines in sources[20]]
    loops = [line.strip() for lines in sources[20] for line in lines if line.lstrip().startswith("for i in")]
    assert loops == (["for i in range(19):"] if mesh == "tp=2" else ["for i in range(10):", "for i in range(11, 19):"])
    tpcompile.testing.assert_parity(model, mesh, batch)


def test_calls_that_differ_are_no_loop() -> None:
    def calls(*last: str) -> list[str]:
        return [f"x{n + 1} = self.h[{n}](x{n}, mask); del x{n}" for n in range(4)] + list(last)

    assert folded(calls("y = x4 + mask")) == ["x4 = x0; del x0", "for i in range(4):", "    x4 = self.h[i](x4, mask)", "y = x4 + mask"]
    assert folded(calls("i = x4 + mask"))[1] == "for i_1 in range(4):"
    assert folded(calls()[:3]) == calls()[:3]
    for other in ("x5 = self.h[5](x4, mask); del x4", "x5 = self.g[4](x4, mask); del x4", "x5 = self.h[4](x4); del x4"):
        assert folded(calls(other))[3:] == [other]
    for other in ("x5 = self.h[4](mask, x4); del x4", "x5 = self.h[4](x4, mask); del mask", "x5, z = self.h[4](x4, mask); del x4"):
        assert folded(calls(other))[3:] == [other]
    kept = [line.partition(";")[0] for line in calls()]
    assert folded(kept) == kept, "what others read later is kept"


def test_replicas_share_weights(tmp_path: Path) -> None:
    written(tmp_path, mesh="dp=2,tp=2")
    ranks = json.loads((tmp_path / "manifest.json").read_text())["ranks"]
    assert [rank["weights"][5:8] for rank in ranks] == ["000", "001", "000", "001"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_model_without_values_gives_programs_without_weights(tmp_path: Path) -> None:
    model, given = batches("gpt2")
    tpcompile.compile(model.to("meta"), "pp=2,tp=2", given[0]).emit(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".py", ".json", ".txt"}
    with pytest.raises(InputError, match="written without weights"):
        Saved.open(tmp_path).modules(0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("gpt2", "pp=2,tp=2", {}),
        ("llama", "dp=2,tp=2", {"data_parallel": "zero2"}),
        ("bert", "pp=2", {"schedule": "gpipe", "recompute": "full"}),
    ],
)
def test_disk_and_memory_train_alike_to_the_last_bit(tmp_path: Path, model: str, mesh: str, options: dict[str, Any]) -> None:
    made, given = batches(model)
    tpcompile.compile(made, mesh, given[0], **options).emit(tmp_path)
    assert all(tpcompile.launch(export_workers.both, mesh, made, mesh, given, str(tmp_path), options))


@pytest.mark.processes
def test_what_is_written_after_training_is_trained(tmp_path: Path) -> None:
    made, given = batches("gpt2")
    options = {"data_parallel": "zero3"}
    assert all(tpcompile.launch(export_workers.emitted_trained, "dp=2,tp=2", made, "dp=2,tp=2", given, str(tmp_path), options))


def test_a_deep_model_has_short_sources(tmp_path: Path) -> None:
    """Twelve layers in two stages: each is one class, however many there are."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=12, **sizes))
    ids = torch.zeros(4, 6, dtype=torch.int64)
    tpcompile.compile(model, "pp=2,tp=2", {"input_ids": ids, "labels": ids}).emit(tmp_path)
    assert all(len((tmp_path / f"stage_{stage}.py").read_text().splitlines()) < 300 for stage in range(2))


def test_one_rank_runs_without_processes(tmp_path: Path) -> None:
    model, given = batches("llama")
    tpcompile.compile(model, "tp=1", given[0]).emit(tmp_path)
    loaded = tpcompile.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**given[0])["logits"], model(**given[0]).logits)
    with pytest.raises(InputError, match="the program on disk is not for such a batch"):
        loaded(input_ids=given[0]["input_ids"])
    assert loaded.explain() == tpcompile.compile(model, "tp=1", given[0]).explain() + "\n"


def test_numbers_as_json() -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod

    b, s = symbol("b"), symbol("s")
    for size in (3, s, b * (s + 1), FloorDiv(s, 2), sympy.floor((s + 1) / 2), sympy.Ne(Mod(b * s, 4), 0), sympy.Rational(1, 3) * s):
        assert decode(json.loads(json.dumps(encode(size)))) == size
    for bad in (["__import__", "os"], ["Symbol.__init__", 1], {"a": 1}, None, ["sympify", "x"]):
        with pytest.raises(InputError, match="is no size"):
            decode(bad)
