"""The page of a compiled model in a headless Chromium: how large it is, how long it takes to load, and pictures of it.

    python benchmarks/page.py                          sizes and times, for Llama's shape with 2 and with 126 layers
    python benchmarks/page.py --pictures docs/page     pictures too

The models are on the meta device. 126 layers take some minutes to compile. Pictures use the fonts of the machine: those in docs/ were made
with Debian's packages chromium, fonts-inter and fonts-jetbrains-mono.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import CHROMIUM, Browser  # noqa: E402 (of the tests beside)

import tpcompile  # noqa: E402

LLAMA = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
GPT2 = {"n_layer": 4, "n_embd": 768, "n_head": 12}
MODELS: Mapping[str, tuple[str, Mapping[str, Any], str, tuple[int, int], Mapping[str, Any]]] = {
    "llama_2": ("llama", {**LLAMA, "num_hidden_layers": 2}, "dp=2,pp=2,tp=4", (32, 4096), {"microbatches": 8}),
    "llama_126": ("llama", {**LLAMA, "num_hidden_layers": 126}, "dp=16,pp=16,tp=8", (1024, 4096), {"microbatches": 32}),
    "gpt2": ("gpt2", GPT2, "pp=2,tp=8", (32, 1024), {"microbatches": 4}),
}
"""By name: the type, its config, the mesh, the rows and positions of a batch, and options."""

PICTURES = (
    ("llama_126", "model", "light", "#view=model&part=model.layers.40&rank=323"),
    ("llama_126", "graph", "dark", "#view=graph&part=model.layers.40&pass=rewrite&value=linear_283"),
    ("llama_2", "graph", "light", "#view=graph&part=model.layers.1&pass=rewrite"),
    ("llama_2", "model", "dark", "#view=model&part=model.layers.1&rank=6"),
    ("llama_126", "schedule", "light", "#view=schedule&part=model.layers.40"),
    ("gpt2", "weights", "dark", "#view=weights&part=transformer.h.3&weight=transformer.h.3.attn.c_attn.weight"),
)
"""The model, the view, the colours, and the place in the page."""

LOADS = 7


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default=",".join(MODELS), help=f"default: {','.join(MODELS)}")
    made.add_argument("--pictures", type=Path, metavar="DIR", help="write pictures there")
    args = made.parse_args(argv)
    if CHROMIUM is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Browser(1240, 620) as browser:
        for name in args.models.split(","):
            file = write(name, Path(folder))
            times = [load(browser, file) for _ in range(LOADS)]
            took = f"loads in {statistics.median(times):.0f} ms, at most {max(times):.0f} ms"
            print(f"{name}: {file.stat().st_size:,} bytes, {took}", flush=True)
            for model, view, colours, address in PICTURES if args.pictures else ():
                if model == name:
                    browser.prefers(colours)
                    browser.open(file, address)
                    browser.screenshot(args.pictures / f"{model}_{view}_{colours}.png")


def write(name: str, folder: Path) -> Path:
    """Compile a model, and write its page."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes, mesh, shape, options = MODELS[name]
    start = time.perf_counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, use_cache=False, **sizes))
        ids = torch.zeros(shape, dtype=torch.long)
    compiled = tpcompile.compile(model, mesh, {"input_ids": ids, "labels": ids}, outputs="loss", **options)
    between = time.perf_counter()
    file = folder / f"{name}.html"
    file.write_text(compiled.html(), encoding="utf-8")
    print(f"{name}: compiled in {between - start:.0f} s, its page written in {time.perf_counter() - between:.1f} s", flush=True)
    return file


def load(browser: Browser, file: Path) -> float:
    """Milliseconds from the start of navigation until the page has drawn itself."""
    browser.open(file)
    return float(browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd"))


if __name__ == "__main__":
    main()
