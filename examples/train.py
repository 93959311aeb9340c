"""Train a Llama with random weights on a mesh, and write nothing that is about parallelism but the mesh.

    torchrun --nproc-per-node 8 examples/train.py dp=2,pp=2,tp=2
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tpcompile.demo.data import CHARACTERS, batches

mesh = sys.argv[1] if len(sys.argv) > 1 else "dp=2,pp=2,tp=2"
sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}

torch.distributed.init_process_group("gloo")  # or "nccl", with a GPU for every rank
torch.manual_seed(0)  # the same weights on every rank
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=len(CHARACTERS), **sizes))
data = list(batches(steps=20, rows=16, length=48, vocabulary=len(CHARACTERS)))

compiled = tpcompile.compile(model, mesh, data[0])
optimizer = compiled.optimizer(torch.optim.AdamW, lr=3e-3)
for step, batch in enumerate(data, 1):
    loss = compiled.train_step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step:3}  loss {loss.item():.4f}")

torch.distributed.destroy_process_group()
