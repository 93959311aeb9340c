"""The page's text: what it holds, that it loads nothing, and that nothing of the model can run in it."""

from __future__ import annotations

import html
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_models import EVIL, MODULE, Evil, data_of, evil, gpt, llama, spelled
from parity_models import compiled
from torch import fx

import tpcompile
from tpcompile.cli import main
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect.page import embedded, encoded, page
from tpcompile.inspect.page.gather import gather
from tpcompile.inspect.page.lines import Line, Name
from tpcompile.inspect.page.places import Places
from tpcompile.inspect.page.templates import Pool, over_layers
from tpcompile.ir import Local, Program, Sharded, Stage
from tpcompile.layout import symbol
from tpcompile.operation import op_name
from tpcompile.runtime.compiled import Compiled

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("operation", "collective")

MODELS: dict[str, Callable[[], Compilation]] = {
    "gpt": lambda: gpt().compilation,
    "llama": lambda: llama().compilation,
    "gpt2 with dropout": lambda: compiled("gpt2", "dp=2,pp=2,tp=2"),
    "bert": lambda: compiled("bert", "tp=2"),
}


# ------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", MODELS)
def test_every_line_of_every_pass_can_be_spelled(name: str) -> None:
    """From templates alone: each value of each graph, once, with its operation and its operands in order."""
    compilation = MODELS[name]()
    data = gather(compilation)
    for step, packed in zip(compilation.history.values(), data["passes"], strict=True):
        if (graphs := graphs_of(step.made)) is None:
            continue
        found: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
        for part, template in packed["parts"]:
            number = data["parts"][part].get("number", 0)
            names = [spelled(entry, number) for entry in data["templates"][template]["names"]]
            for line in data["templates"][template]["lines"]:
                if line["kind"] in KINDS:
                    operands = [names[token] for token in line.get("tokens", ()) if isinstance(token, int)]
                    found[names[line["name"]], line["op"], tuple(one for one in operands if not one.isdecimal())] += 1
        assert found == Counter(of_node(node) for graph in graphs for node in graph.nodes if node.op == "call_function")


def graphs_of(made: object) -> list[fx.Graph] | None:
    match made:
        case Program() | Local():
            return [made.graph]
        case Sharded():
            return [made.program.graph]
        case tuple() | list() if made and isinstance(made[0], Stage):
            return [stage.graph for stage in made]
    return None


def of_node(node: fx.Node) -> tuple[str, str, tuple[str, ...]]:
    operands: list[str] = []
    fx.node.map_arg((node.args, node.kwargs), lambda operand: operands.append(operand.name))
    return node.name, op_name(node).removesuffix(".default"), tuple(operands)


def test_equal_layers_are_one_template() -> None:
    data = gather(gpt().compilation)
    layers = [index for index, part in enumerate(data["parts"]) if "number" in part]
    assert [data["parts"][index]["name"] for index in layers] == [f"blocks.{index}" for index in range(4)]
    for packed in data["passes"]:
        if packed["graph"]:
            assert len({template for part, template in packed["parts"] if part in layers}) == 1, packed["name"]


def test_layers_that_differ_are_not() -> None:
    """Another width, or another operand, makes another layer; other numbers in names do not."""

    def layer(index: int, width: int, second: str) -> list[Line]:
        made = Line("operation", f"linear_{index}", "aten.linear", (Name(f"x_{index}"),), f"f32[b, {width}]")
        return [made, Line("operation", f"add_{index}", "aten.add", (Name(made.name), ", ", Name(second)), f"f32[b, {width}]")]

    numbers = {f"h.{index}": index for index in range(4)}
    parts = {"h.0": layer(0, 8, "x_0"), "h.1": layer(1, 8, "x_1"), "h.2": layer(2, 9, "x_2"), "h.3": layer(3, 8, "linear_3")}
    found = Pool().add(parts, numbers)
    assert found["h.0"] == found["h.1"] and len(set(found.values())) == 3


@pytest.mark.parametrize(
    ("names", "packed"),
    [
        (["x", "x", "x"], "x"),
        (["h_1_up", "h_2_up", "h_3_up"], [["h_", "_up"], [[0, 1]]]),
        (["linear", "linear_4", "linear_8"], [["linear_", ""], [[-4, 4]], {"1": "linear"}]),
        (["a_1", "a_5", "a_6"], [["a_", ""], [{"1": 1, "2": 5, "3": 6}]]),
        (["h_01", "h_02", "h_3"], [["h_", ""], [[3, 0]], {"1": "h_01", "2": "h_02"}]),
    ],
)
def test_a_name_in_all_layers(names: list[str], packed: Any) -> None:
    made = over_layers(names, [1, 2, 3])
    assert made == packed
    assert [spelled(made, place) for place in (1, 2, 3)] == names


def test_parts_of_a_model_without_layers() -> None:
    data = gather(evil().compilation)
    assert [part["name"] for part in data["parts"]] == ["", MODULE]


def test_parts_beside_layers() -> None:
    places = Places(compiled("bert", "tp=2").captured)
    found = {
        path: places.of_path(path) for path in ("bert.embeddings.LayerNorm", "bert.encoder.layer.1.output.dense", "cls.predictions", "")
    }
    assert list(found.values()) == ["bert.embeddings", "bert.encoder.layer.1", "cls", ""]


# ------------------------------------------------------------------------------------------------- contents


def test_strips_are_what_ranks_hold() -> None:
    """Against the pieces that each rank's program really has."""
    made = gpt()
    data = gather(made.compilation)
    (group,) = [one for one in data["parameters"] if one["name"] == "attention.qkv.weight"]
    (cut,) = group["cuts"]
    assert [data["parts"][part]["name"] for part in group["parts"]] == [f"blocks.{index}" for index in range(4)]
    assert [label for _, _, label in cut["segments"]] == ["q", "k", "v"]
    for rank in (0, 1):
        piece = made.program(rank).parameters["blocks.0.attention.qkv.weight"]
        assert cut["dim"] == piece.dim
        assert [tuple(one) for one in cut["ranks"][rank]] == list(piece.ranges)


def test_bytes_of_collectives_are_those_of_the_plan() -> None:
    """The sum over all lines of the last graph is what the stages say in one micro-batch."""
    compilation = gpt().compilation
    data = gather(compilation)
    shown = sum(
        call["bytes"]
        for part, template in data["passes"][-1]["parts"]
        for line in data["templates"][template]["lines"]
        for call in line.get("calls", ())
    )
    sizes = {**compilation.sizes, symbol("tp"): 2}
    said = [sent for stage in compilation.step.messages for sent in (*stage.forward, *stage.backward)]
    assert shown == sum(evaluate(sent.bytes, sizes) for sent in said) > 0


def test_stages_and_schedule() -> None:
    data = gather(gpt(schedule="interleaved_1f1b", mesh="pp=2,tp=2").compilation)
    assert [stage["place"] for stage in data["stages"]] == [0, 1, 0, 1]
    runs = [(run[0], run[1], run[2]) for row in data["schedule"]["rows"] for run in row]
    assert sorted(runs) == sorted((work, index, stage) for work in "FB" for index in range(4) for stage in range(4))
    assert all(run[3] < run[4] for row in data["schedule"]["rows"] for run in row)


def test_the_source_is_what_ranks_run() -> None:
    made = gpt()
    data = gather(made.compilation, made.model)
    sources = ["\n".join(data["code"][place] for place in source) for source in data["sources"]]
    assert sources == [made.program(0).source, made.program(2).source]


# ------------------------------------------------------------------------------------------------- safety


class Tags(HTMLParser):
    """The elements of a page, and the attributes that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.loads = list[str](), list[tuple[str, str | None]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            (name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action") or name.startswith("on")
        ]


@pytest.mark.parametrize("made", [gpt, evil])
def test_the_page_loads_nothing(made: Callable[[], Compiled]) -> None:
    document = made().html()
    parser = Tags()
    parser.feed(document)
    assert not parser.loads
    assert parser.tags.count("script") == 2 and "img" not in parser.tags and "link" not in parser.tags
    outside = re.sub(r'<script type="application/json".*?</script>', "", document, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\s\"'`)]*", outside)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\bFunction\(|fetch\(|XMLHttp", outside)
    assert "default-src 'none'" in document


def test_names_are_data() -> None:
    """The evil name is in the data, whole, and nowhere else; the title is escaped."""
    made = evil()
    document = made.html()
    data = data_of(document)
    assert EVIL in [name for group in data["parameters"] for name in [group["name"].removeprefix("/")]]
    assert any(EVIL in line[2] or "window.evil = 3" in line[2] for line in data["lines"])
    assert EVIL not in document and "<img" not in document
    assert html.escape(f"Evil{EVIL} on ") in document
    assert data == data_of(page(made.compilation, made.model))


def test_what_json_may_not_hold_in_a_script() -> None:
    text = encoded({"</script><!--": "&\u2028\u2029<"})
    assert not set(text) & set("<>&\u2028\u2029")
    assert data_of(f'<script type="application/json" id="data">{text}</script>') == {"</script><!--": "&\u2028\u2029<"}


def test_a_page_in_a_notebook() -> None:
    made = evil()
    frame = made._repr_html_()
    assert frame is not None and frame == embedded(made.html())
    found = re.fullmatch(r'<iframe sandbox="allow-scripts" style="[^"]*" title="[^"]*" srcdoc="([^"]*)"></iframe>', frame)
    assert found is not None and html.unescape(found[1]) == made.html()


def test_before_the_first_capture_there_is_no_page() -> None:
    assert tpcompile.compile(Evil(), "tp=2")._repr_html_() is None


# ------------------------------------------------------------------------------------------------- size, files


def test_the_size_of_a_page() -> None:
    """Of two layers of Llama, half a megabyte with the sources of both stages."""
    assert len(llama().html()) < 500_000


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.html"
    assert main(["inspect", "tpcompile.demo.model:gpt", "--mesh", "tp=2", "--html", str(file)]) == 0
    assert capsys.readouterr().out.split() == [f"{file.stat().st_size:,}", str(file)]
    assert data_of(file.read_text())["mesh"]["text"] == "dp=1,pp=1,tp=2"


def test_the_page_needs_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "tpcompile.demo.model:gpt", "--html", "out.html"]) == 2
    assert capsys.readouterr().err == (
        "tpcompile: --mesh not given\n  at   tpcompile inspect --html out.html\n  fix  give MODEL and --mesh\n"
    )


def test_the_folder_of_the_page_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none" / "out.html"
    assert main(["inspect", "tpcompile.demo.model:gpt", "--mesh", "tp=2", "--html", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"tpcompile: there is no folder {tmp_path / 'none'}\n  at   --html {file}\n  fix  make the folder, or name another file\n"
    )


def test_the_parts_of_the_page_are_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tpcompile"]
    package = ROOT / "tpcompile"
    installed = {file for pattern in patterns for file in package.glob(pattern)}
    own = {file for file in (package / "inspect" / "page").rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert own and own <= installed


def test_the_pictures_of_the_documentation() -> None:
    pictures = re.findall(r"!\[[^]]+\]\((page/\w+\.png)\)", (ROOT / "docs" / "inspect.md").read_text())
    assert sorted(pictures) == sorted(f"page/{file.name}" for file in (ROOT / "docs" / "page").iterdir())
    assert all((ROOT / "docs" / picture).stat().st_size < 200_000 for picture in pictures)
