"""Train a model of transformers on a mesh, from random weights, and go on from the last checkpoint when it is started again.

    torchrun --nproc-per-node 4 examples/train_hf.py --mesh dp=2,tp=2 --checkpoints ckpt --steps 200
    torchrun --nproc-per-node 2 --max-restarts 3 --local-ranks-filter 0 examples/train_hf.py --mesh pp=2 --checkpoints ckpt

The second goes on where the first was, on another mesh; when a rank dies, torchrun starts all of them again, and so do they. With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, those that are started again do not find the addresses of those that died.

The text is the Python Language Reference as CPython ships it for `help()` (pydoc_data.topics, PSF licence), some 460,000 characters;
a token is a byte.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", help="a model type of transformers")
    parser.add_argument("--size", nargs="*", default=[], metavar="KEY=NUMBER", help="settings of its config, as num_hidden_layers=8")
    parser.add_argument("--mesh", default="tp=1", help="such as dp=2,pp=2,tp=2")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--data-parallel", default="ddp")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="of the parameters")
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="to compute in")
    parser.add_argument("--recompute", default="none", choices=("none", "full", "selective"))
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoints", help="a directory; without one nothing is saved")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--export", help="write the trained weights here, for from_pretrained")
    return parser.parse_args()


def batch(text: Tensor, step: int, rows: int, length: int) -> dict[str, Tensor]:
    """The rows of a step, which depend on its number alone: who goes on reads what comes next."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    ids = torch.stack([text[start : start + length] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 512}
    sizes |= {key: int(value) for key, _, value in (setting.partition("=") for setting in args.size)}
    config = AutoConfig.for_model(args.model, vocab_size=256, **sizes)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, args.dtype))
    text = torch.tensor(list("\n\n".join(topics.values()).encode()))

    options = {name: getattr(args, name) for name in ("schedule", "microbatches", "data_parallel", "precision", "recompute")}
    compiled = tpcompile.compile(model, args.mesh, batch(text, 0, args.rows, args.length), **options)
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    state = {"optimizer": optimizer, "scheduler": scheduler}
    start = compiled.load(args.checkpoints, **state, missing_ok=True) if args.checkpoints else 0

    with tpcompile.progress(args.steps, start=start) as report:
        for step in range(start, args.steps):
            rows = batch(text, step, args.rows, args.length)
            loss = compiled.train_step(**rows)
            compiled.clip_grad_norm_(args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            report.step(loss, tokens=rows["input_ids"].numel())
            if args.checkpoints and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
                compiled.save(args.checkpoints, **state, step=step + 1, keep=2)
    if args.export:
        compiled.save_pretrained(args.export)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
