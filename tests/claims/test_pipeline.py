"""What a pipeline stores, how even its stages are, and what crosses between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tpcompile
from tpcompile.demo.model import GPT, MLP, Config

LARGE = Config(vocab_size=1000, layers=4, heads=16, hidden=1024, inner=4096)


def ids(rows: int = 4, length: int = 8, device: str = "cpu") -> dict[str, Tensor]:
    batch = torch.zeros(rows, length, dtype=torch.int64, device=device)
    return {"input_ids": batch, "labels": batch.clone()}


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_memory_linear(tp: int, pp: int) -> None:
    """What the ranks hold of the blocks' weights adds up to the model's; norms and some biases are whole on every tensor rank."""
    with torch.device("meta"):
        model = GPT(LARGE)
    compiled = tpcompile.compile(model, f"pp={pp},tp={tp}", ids(device="meta"))
    whole = sum(p.numel() for p in model.blocks.parameters())
    held = []
    for rank in range(tp * pp):
        module = compiled.program(rank).module
        assert all(p.is_meta for p in module.parameters())
        held.append(sum(p.numel() for name, p in module.named_parameters() if name.startswith("blocks.")))
    assert all(abs(count * tp * pp - whole) <= 0.01 * whole for count in held)


def uneven(inner: Sequence[int]) -> GPT:
    """Blocks whose MLPs have different sizes."""
    torch.manual_seed(0)
    config = Config(layers=len(inner), hidden=16, heads=2, inner=16)
    model = GPT(config)
    for block, size in zip(model.blocks, inner, strict=True):
        block.mlp = MLP(replace(config, inner=size))
    return model


def flops_of_blocks(model: GPT, batch: dict[str, Tensor]) -> list[int]:
    """By torch's own counter; the head's are the last block's."""
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    counts = {name.rpartition("GPT.")[2]: sum(ops.values()) for name, ops in counter.flop_counts.items()}
    loads = [counts[f"blocks.{index}"] for index in range(len(model.blocks))]
    loads[-1] += counts["head"]
    return loads


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("inner", [(900, 30, 30, 30, 30, 30, 400), (30, 60, 90, 200, 400, 800, 1600), (500, 500, 500, 500, 500, 500, 500)])
def test_stage_balance(inner: tuple[int, ...], stages: int) -> None:
    """The slowest stage is as fast as in the best of all cuts."""
    model, batch = uneven(inner), ids()
    loads = flops_of_blocks(model, batch)
    compiled = tpcompile.compile(model, f"pp={stages}", batch)
    held = [
        {name.split(".")[1] for name in stage.parameters.values() if name.startswith("blocks.")} for stage in compiled.compilation.stages
    ]
    assert sorted(index for stage in held for index in stage) == [str(index) for index in range(len(inner))]
    slowest = max(sum(loads[int(index)] for index in stage) for stage in held)
    cuts = [(0, *cut, len(loads)) for cut in combinations(range(1, len(loads)), stages - 1)]
    assert slowest == min(max(sum(loads[a:b]) for a, b in zip(cut, cut[1:], strict=False)) for cut in cuts)


def demo() -> tuple[nn.Module, dict[str, Tensor]]:
    return GPT(Config(layers=4)), ids()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """Rotary tables and masks are needed by every layer."""
    sizes = {"hidden_size": 60, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    batch = ids() | {"attention_mask": torch.ones(4, 8, dtype=torch.int64)}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, head_dim=16, **sizes)), batch


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 60, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 16}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    batch = ids() | {"attention_mask": torch.ones(4, 8, dtype=torch.int64)}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **sizes, **rates)), batch


@pytest.mark.parametrize("make", [demo, llama, bert])
def test_stage_boundary_bytes(make: object) -> None:
    """One activation of the residual stream crosses, and nothing that a stage can compute from the inputs."""
    assert callable(make)
    model, batch = make()
    compiled = tpcompile.compile(model, "pp=4,tp=2", batch, microbatches=4)
    stages = compiled.compilation.stages
    symbols = compiled.compilation.program.symbols
    rows, length = 1, 8  # of a micro-batch
    for sender, receiver in zip(stages, stages[1:], strict=False):
        assert sender.sends == receiver.receives
        sent = 0
        for boundary in sender.sends:
            sizes = {symbol: (rows, length)[dim] for symbol, (_, dim) in symbols.items()}
            shape = [size if isinstance(size, int) else int(size.subs(sizes)) for size in boundary.shape(0)]
            sent += boundary.type.dtype.itemsize * torch.Size(shape).numel()
        assert sent == rows * length // 2 * 60 * 4, "each of two tensor ranks sends its positions"
    assert not stages[0].receives and not stages[-1].sends
