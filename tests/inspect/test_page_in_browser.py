"""The page in a real browser: what it shows after clicks, keys and searches, and how long it takes to be there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from page_models import EVIL, MODULE, data_of, evil, gpt, llama

from tpcompile.inspect.page import embedded

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, such as Debian's package chromium")

SECONDS = 5.0
"""What a page may take to load on a machine that does other things too; on an idle one it is a tenth of that."""

PAGES: dict[str, Callable[[], str]] = {
    "gpt": lambda: gpt().html(),
    "evil": lambda: evil().html(),
    "llama": lambda: llama().html(),
    "interleaved": lambda: gpt(schedule="interleaved_1f1b", mesh="pp=2,tp=2").html(),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def show(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Browser]:
    """Load a page by its name, at an address within it."""
    folder = tmp_path_factory.mktemp("pages")

    def load(name: str, address: str = "") -> Browser:
        file = folder / f"{name}.html"
        if not file.exists():
            file.write_text(PAGES[name](), encoding="utf-8")
        browser.prefers("light")
        browser.open(file, address)
        assert not browser.problems()
        return browser

    return load


# ------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_loads_alone_and_soon(show: Callable[..., Browser], name: str) -> None:
    page = show(name)
    assert page.text("#title") in ("GPT", "LlamaForCausalLM")
    assert len(page.requests()) == 1
    assert page.ask("performance.getEntriesByType('navigation')[0].loadEventEnd") < 1000 * SECONDS


def test_every_view_of_every_part_can_be_drawn(show: Callable[..., Browser]) -> None:
    """All passes of all parts, and the other views, without an error."""
    page = show("interleaved")
    page.click("#tab-graph")
    passes = page.texts(".passes button")
    assert passes[0] == "capture" and passes[-2:] == ["split", "emit"]
    for part in page.ask("[...document.querySelectorAll('#outline li')].map((one) => one.dataset.part)"):
        page.click(f'#outline li[data-part="{part}"] .part')
        shown = "((name) => { document.querySelector(`[data-pass=${name}]`).click(); return document.querySelector('.heads').innerText; })"
        heads = page.ask(f"[...document.querySelectorAll('.passes button')].map((one) => one.dataset.pass).map({shown})")
        assert len(heads) == len(passes) and all("after: " in head for head in heads) and not page.problems()
    for view in ("model", "weights", "schedule", "traffic"):
        page.click(f"#tab-{view}")
        assert page.text("#view") and not page.problems()


# ------------------------------------------------------------------------------------------------- the model


def test_layers_stages_and_ranks(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    assert page.texts("#stages tr[data-stage='0'] .cell")[-2:] == ["0", "1"]
    assert page.texts("#stages tr[data-stage='1'] .cell")[:2] == ["2", "3"]
    assert [one.split("\n")[0] for one in page.texts("#stages .rank")] == ["0", "1", "2", "3"]
    page.click(".rank[data-rank='3']")
    assert (
        "coordinates\ndp 0, pp 1, tp 1" in page.text("#rank") and "ranks 2–3" in page.text("#rank") and "ranks 3, 7" in page.text("#rank")
    )
    page.ask("(() => { const box = document.getElementById('replica'); box.value = 1; box.dispatchEvent(new Event('change')); })()")
    assert "dp 1, pp 1, tp 1" in page.text("#rank")
    assert [one.split("\n")[0] for one in page.texts("#stages .rank")] == ["4", "5", "6", "7"]
    page.click("#stages tr[data-stage='1'] .cell[data-part='blocks.3']")
    assert page.text(".bar-top h2") == "blocks.3" and page.text("[role=tab][aria-selected=true]") == "Graph"


def test_equal_layers_are_folded(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    assert "blocks.0–1" in page.text("#outline") and "×2" in page.text("#outline")
    before = len(page.texts("#outline li"))
    page.click("#outline .fold[aria-expanded='false']")
    assert len(page.texts("#outline li")) == before + 2
    page.click("#outline li.inner[data-part='blocks.1'] .part")
    assert page.text(".bar-top h2") == "blocks.1"
    page.click("[aria-label='next equal layer']")
    assert page.text(".bar-top h2") == "blocks.2" and "%layer_norm_4" in page.text(".sides")


# ------------------------------------------------------------------------------------------------- graphs


def line(page: Browser, name: str, side: int = 2) -> str:
    return page.text(f".line-pair > .line:nth-child({side})[data-name='{name}']")


def test_before_and_after_a_pass(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=sequence")
    page.click("[data-pass='rewrite']")
    assert page.texts(".heads b") == ["sequence", "rewrite"]
    assert line(page, "linear_4", 1).startswith("%linear_4 = aten.linear(%layer_norm_2, attention.qkv.weight, attention.qkv.bias)")
    assert line(page, "linear_4", 2).startswith("%linear_4 = aten.linear(%layer_norm_2_gather, attention.qkv.weight, attention.qkv.bias)")
    sides = "[...document.querySelectorAll('[data-name=linear_4]')].map((one) => one.getBoundingClientRect().y)"
    assert len(set(page.ask(sides))) == 1 and len(page.ask(sides)) == 2
    changed = "[...document.querySelectorAll('[data-name=linear_4] .differs')].map((one) => one.innerText)"
    assert page.ask(changed) == ["%layer_norm_2", "%layer_norm_2_gather"]
    assert not line(page, "layer_norm_2_gather", 1) and line(page, "layer_norm_2_gather", 2)


def test_collectives_have_their_bytes(show: Callable[..., Browser]) -> None:
    """Forward, a rank gives its own half of 2 rows × 16 positions × 60 floats; backward, all of it."""
    page = show("gpt", "#view=graph&part=blocks.1&pass=rewrite")
    chips = page.texts("[data-name=layer_norm_2_gather] .chip")
    assert [re.sub(r" \W ", " ", one) for one in chips] == ["all-gather forward 3.75 KiB", "reduce-scatter backward 7.5 KiB"]
    page.click("[data-name=layer_norm_2_gather] .value")
    assert re.search(r"240·b·\S+ bytes given by a rank", page.text("#dock"))


def test_keys(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=rewrite")
    page.key("]")
    assert page.text(".passes [aria-pressed=true]") == "optimize"
    page.key("[")
    page.key("[")
    assert page.text(".passes [aria-pressed=true]") == "sequence"
    shown = len(page.texts(".line-pair"))
    page.key("c")
    assert page.ask("document.getElementById('changes').checked")
    assert 0 < len(page.texts(".line-pair")) < shown and "equal line" in page.text(".skip")
    page.click("#tab-graph")
    page.key("ArrowRight")
    assert page.text("[role=tab][aria-selected=true]") == "Weights" == page.ask("document.activeElement.innerText")
    assert page.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_value(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=optimize")
    page.click("[data-name=linear_5] .value")
    dock = page.text("#dock")
    assert "model.py:" in dock and "self.out(" in dock and "blocks.1.attention.out" in dock and "used by\n%add_3" in dock
    assert re.search(r"capture\s+aten.linear f32\[b, s, 60\]", dock) and re.search(r"rewrite\s+aten.add.Tensor f32\[b, s@tp, 60\]", dock)
    page.click("[data-name=add_3] [data-value=add_2]:not(.defined)")
    assert page.text(".bar-top h2") == "blocks.0" and page.text("#dock code").startswith("%add_2")
    page.key("Escape")
    assert not page.text("#dock")


def test_the_model_beside_what_was_captured(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=capture")
    rows = page.ask("[...document.querySelectorAll('.line-pair')].map((one) => [...one.children].map((side) => side.innerText))")
    row = next(right for left, right in rows if "self.qkv(x)" in left)
    assert row.startswith("%linear_4 = aten.linear(")


def test_what_was_found_beside_what_it_is_about(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=detect")
    rows = "[...document.querySelectorAll('.line-pair')].map((one) => [...one.children].map((side) => side.innerText))"
    assert [right for left, right in page.ask(rows) if left.startswith("%linear_7 ")] == ["%linear_7 ends mlp: columns %linear_6"]
    page.key("]")
    assert page.texts(".heads b") == ["detect", "plan"]
    assert [right for _, right in page.ask(rows)][4:6] == ["mlp is cut over tp: mlp", "    mlp.up.weight [230@tp, 60]"]


def test_the_source_of_a_stage(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=split")
    page.click("[data-pass='emit']")
    assert "class Stage(nn.Module):" in page.text(".source") and "stage_0.py" in page.text(".heads")


# ------------------------------------------------------------------------------------------------- colours


def test_layouts_have_colours_by_day_and_by_night(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=rewrite")
    colour = "getComputedStyle(document.querySelector('.line-pair > .line:nth-child(2)[data-name={}] .defined')).color"
    ground = "getComputedStyle(document.body).backgroundColor"
    names = {"whole": "layer_norm_2_gather", "cut": "linear_4", "partial": "linear_5_partial"}
    light = {kind: page.ask(colour.format(name)) for kind, name in names.items()}
    assert len(set(light.values())) == 3 and page.ask(ground) == "rgb(255, 255, 255)"
    page.prefers("dark")
    dark = {kind: page.ask(colour.format(name)) for kind, name in names.items()}
    assert len(set(dark.values())) == 3 and not set(dark.values()) & set(light.values()) and page.ask(ground) == "rgb(20, 23, 27)"
    page.click("#theme")
    assert page.text("#theme").endswith("light") and page.ask(ground) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.text("#theme").endswith("dark") and page.ask(ground) == "rgb(20, 23, 27)"
    page.click("#theme")
    page.prefers("light")
    assert page.text("#theme").endswith("system") and page.ask(ground) == "rgb(255, 255, 255)"


# ------------------------------------------------------------------------------------------------- search


def search(page: Browser, text: str) -> list[list[str]]:
    """The results, each as its kind, its name and where it is."""
    page.key("Escape")
    page.key("/")
    page.ask("document.getElementById('query').value = ''")
    page.type(text)
    return list(
        page.ask(
            "[...document.querySelectorAll('#results li[role=option]')].map((one) =>"
            " [one.querySelector('.what'), one.querySelector('code'), one.querySelector('.where')].map((part) => part.innerText))"
        )
    )


def test_search_by_value(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    assert search(page, "linear_9")[0] == ["value", "%linear_9", "blocks.2"]
    page.key("Enter")
    assert page.text(".bar-top h2") == "blocks.2" and "%linear_9" in page.text(".line.selected") and page.text("#dock")


def test_search_by_parameter(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    found = search(page, "qkv.weight")
    assert found[0] == ["parameter", "blocks.0.attention.qkv.weight", "and in 3 equal layers"]
    assert search(page, "blocks.3.attention.qkv.w")[0][:2] == ["parameter", "blocks.3.attention.qkv.weight"]
    page.key("Enter")
    assert page.text("#weight h2") == "blocks.3.attention.qkv.weight"
    assert search(page, "head.weight")[0][:2] == ["parameter", "tokens.weight"]  # its other name


def test_search_by_operation(show: Callable[..., Browser]) -> None:
    page = show("gpt", "#view=graph&part=blocks.1&pass=rewrite")
    assert ["operation", "tpcompile.seq_gather", "9 after rewrite"] in search(page, "seq_gather")
    page.key("ArrowUp")  # from the first to the last
    page.key("Enter")
    assert page.text(".bar-top h2") == "blocks.1"
    assert page.texts(".line.found .op") == ["seq_gather"] * 2


def test_search_by_source_line(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    (found,) = [one for one in search(page, "self.down(") if one[0] == "line"]
    assert found[2].startswith("model.py:")
    assert [one for one in search(page, found[2]) if one[0] == "line"] == [found]
    page.key("Enter")
    assert "self.down(" in page.text("#dock") and page.text(".line.selected")


def test_search_for_nothing(show: Callable[..., Browser]) -> None:
    page = show("gpt")
    assert search(page, "no such thing") == [] and "Nothing has this" in page.text("#results")
    page.key("Escape")
    assert page.ask("document.getElementById('results').hidden")


# ------------------------------------------------------------------------------------------------- weights, schedule


def test_the_strips_of_a_fused_projection(show: Callable[..., Browser]) -> None:
    """Five heads on two ranks, three times: of q, of k and of v each rank has whole heads."""
    page = show("gpt", "#view=weights&part=blocks.1")
    page.click("[data-weight='blocks.1.attention.qkv.weight']")
    strips = page.ask("[...document.querySelectorAll('#weight rect.own')].map((one) => [one.dataset.rank, one.dataset.range])")
    assert strips == [["0", "0:36"], ["1", "36:60"], ["0", "60:96"], ["1", "96:120"], ["0", "120:156"], ["1", "156:180"]]
    heights = page.ask("[...document.querySelectorAll('#weight rect.own')].map((one) => one.getBoundingClientRect().height)")
    assert heights[0] / heights[1] == pytest.approx(36 / 24, rel=1e-3)
    rows = page.texts("#holders tr")
    held = [row.split()[2:5] for row in rows[1:]]
    assert held == [["0:36", "60:96", "120:156"], ["36:60", "96:120", "156:180"]]
    labels = page.ask("[...document.querySelectorAll('#weight svg text')].map((one) => one.textContent)")
    assert {"q", "k", "v"} <= set(labels)
    page.click("[data-weight='blocks.1.norm_1.weight']")
    assert "Every tensor rank holds all of it" in page.text("#weight")


def test_the_schedule(show: Callable[..., Browser]) -> None:
    page = show("interleaved", "#view=schedule")
    assert "interleaved_1f1b, 4 micro-batches" in page.text("#view") and len(page.texts("#idle tr")) == 3
    names = page.ask("[...document.querySelectorAll('#timeline text.on')].map((one) => one.textContent)")
    assert sorted(names) == sorted(f"{stage}{work}{index}" for stage in range(4) for work in "FB" for index in range(4))
    place = "[...document.querySelectorAll('#timeline text.on')].find((one) => one.textContent === '2B1').getBoundingClientRect()"
    box = page.ask(f"(() => {{ const box = {place}; return [box.x + box.width / 2, box.y + box.height / 2]; }})()")
    page.move(*box)
    assert page.text("#run").startswith("rank 0, stage 2: backward of micro-batch 1, from ")
    assert page.ask("document.querySelector('#timeline path.same').getAttribute('d').split('M').length - 1") == 8


# ------------------------------------------------------------------------------------------------- safety


def test_names_of_the_model_are_text(show: Callable[..., Browser]) -> None:
    page = show("evil")
    for view in ("graph", "weights", "schedule", "traffic", "model"):
        page.click(f"#tab-{view}")
    assert search(page, "window['evil']")[0][1] == EVIL
    page.key("Enter")
    assert page.text("#weight h2") == EVIL
    assert search(page, MODULE)[0][:2] == ["part", MODULE]
    page.key("Enter")
    assert page.text(".bar-top h2") == MODULE
    assert any(one[0] == "line" and "window.evil = 3" in one[1] for one in search(page, "window.evil"))
    assert page.ask("document.title") == f"Evil{EVIL} on dp=1,pp=1,tp=2"
    assert page.ask("window.evil === undefined") and page.ask("document.querySelectorAll('img').length") == 0
    assert page.ask("document.scripts.length") == 2 and not page.problems() and len(page.requests()) == 1


def test_a_script_that_is_not_the_pages_own_does_not_run(show: Callable[..., Browser], browser: Browser, tmp_path: Path) -> None:
    """Were a name to get out of the data, the page's policy would still hold."""
    document = evil().html().replace("<noscript>", f"{EVIL}<noscript>")
    (tmp_path / "broken.html").write_text(document, encoding="utf-8")
    browser.open(tmp_path / "broken.html")
    assert browser.ask("document.querySelectorAll('img').length") == 1 and browser.ask("window.evil === undefined")
    assert browser.problems()


def test_a_page_in_a_notebook_draws_itself(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{embedded(gpt().html())}</body>", encoding="utf-8")
    browser.open(tmp_path / "notebook.html")
    (frame,) = browser.frames()
    for _ in range(200):
        if drawn := browser.ask("document.querySelectorAll('#stages .rank').length", frame):
            break
    assert drawn == 4 and not browser.problems()
    browser.ask("document.getElementById('tab-weights').click()", frame)
    assert browser.ask("document.querySelectorAll('#weight rect.own').length", frame) > 0


# ------------------------------------------------------------------------------------------------- many layers


@pytest.mark.slow
def test_126_layers(browser: Browser, tmp_path: Path) -> None:
    """As large as a page of a few layers but for the stages' sources, and as quick."""
    made = gpt("pp=7,tp=2", 126, 7, outputs="loss")
    document = made.html()
    assert len(document) < 500_000
    few, many = data_of(PAGES["gpt"]()), data_of(document)
    assert len(many["templates"]) < 2 * len(few["templates"])
    (tmp_path / "many.html").write_text(document, encoding="utf-8")
    browser.open(tmp_path / "many.html")
    assert browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd") < 1000 * SECONDS
    assert len(browser.texts("#stages .cell")) >= 126 and len(browser.texts("#outline li")) < 40
    assert search(browser, "linear_4")[0] == ["value", "%linear_4", "blocks.1"]
    assert search(browser, "linear_403_partial")[0] == ["value", "%linear_403_partial", "blocks.100"]
    browser.key("Enter")
    assert browser.text(".bar-top h2") == "blocks.100" and "%linear_403_partial" in browser.text(".line.selected")
    timed = "((one) => { const start = performance.now(); $(one).click(); document.body.offsetHeight; return performance.now() - start; })"
    tabs = "[...document.querySelectorAll('[role=tab]')].map((one) => one.id)"
    clicks = browser.ask(f"{tabs}.map({timed.replace('$', 'document.getElementById.bind(document)')})")
    assert len(clicks) == 5 and max(clicks) < 1000 * SECONDS
    assert not browser.problems()
