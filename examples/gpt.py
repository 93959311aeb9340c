"""Train the demo's GPT, plain PyTorch, by hand-written lines: on local processes, and on one device beside them.

    python examples/gpt.py                       dp=2,pp=2,tp=2: eight processes
    python examples/gpt.py pp=2,tp=2 --steps 5
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import tpcompile
from tpcompile.demo.data import CHARACTERS, batches
from tpcompile.demo.model import GPT, Config


def model() -> nn.Module:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return GPT(Config(vocab_size=len(CHARACTERS))).double()


def data(steps: int) -> list[dict[str, torch.Tensor]]:
    return list(batches(steps=steps, rows=16, length=48, vocabulary=len(CHARACTERS)))


def on_mesh(mesh: str, steps: int) -> list[float]:
    """What every process does."""
    rows = data(steps)
    compiled = tpcompile.compile(model(), mesh, rows[0])
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for batch in rows:
        losses.append(compiled.train_step(**batch).item())
        compiled.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_one_device(steps: int) -> list[float]:
    alone, losses = model(), []
    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    for batch in data(steps):
        loss = alone(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="?", default="dp=2,pp=2,tp=2")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    together = tpcompile.launch(on_mesh, args.mesh, args.mesh, args.steps)[0]
    for step, (ours, theirs) in enumerate(zip(together, on_one_device(args.steps), strict=True), 1):
        print(f"step {step:3}  loss {ours:.12f}  one device {theirs:.12f}  apart {abs(ours - theirs):.1e}")


if __name__ == "__main__":
    main()
