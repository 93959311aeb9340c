"""Models for the tests of the page, compiled once, and what a page holds, read back from its text alone."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.runtime.compiled import Compiled

EVIL = "</script><script>window['evil']=1</script><img src=x onerror=window['evil']=2>"
"""A name that would run if anything took it for HTML."""
MODULE = "<b>&'<!--"


class Evil(nn.Module):
    """A model whose names are code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(EVIL, nn.Parameter(torch.ones(6)))
        self.add_module(MODULE, nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * getattr(self, EVIL)  # </script><script>window.evil = 3</script>
        loss: Tensor = getattr(self, MODULE)(scaled).square().sum()
        return loss


Evil.__name__ = f"Evil{EVIL}"


@cache
def gpt(mesh: str = "dp=2,pp=2,tp=2", layers: int = 4, rows: int = 8, **options: Any) -> Compiled:
    """The demo's GPT, on the meta device."""
    with torch.device("meta"):
        model = GPT(Config(layers=layers))
        ids = torch.zeros(rows, 16, dtype=torch.long)
    return tpcompile.compile(model, mesh, {"input_ids": ids, "labels": ids}, **options)


@cache
def evil() -> Compiled:
    return tpcompile.compile(Evil(), "tp=2", {"x": torch.ones(4, 6)})


@cache
def llama() -> Compiled:
    """Two layers of the shape of the largest Llama, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes))
        ids = torch.zeros(8, 64, dtype=torch.long)
    return tpcompile.compile(model, "pp=2,tp=4", {"input_ids": ids, "labels": ids}, outputs="loss")


def data_of(page: str) -> Any:
    """The data in a page, as its own script finds it: up to the first end of a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def spelled(entry: Any, place: int) -> str:
    """A name of a template in its layer, as the page's script spells it."""
    if isinstance(entry, str):
        return entry
    texts, numbers, *others = entry
    if others and str(place) in others[0]:
        return str(others[0][str(place)])
    name = str(texts[0])
    for rule, text in zip(numbers, texts[1:], strict=True):
        name += str(rule[0] + rule[1] * place if isinstance(rule, list) else rule[str(place)]) + text
    return name
