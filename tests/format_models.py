"""Models whose programs are written in other formats."""

from __future__ import annotations

import copy

import parity_models
import torch
from torch import Tensor, nn


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


class Sums(nn.Module):
    """What it returns is what ranks have summed, and nothing is done with that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out
