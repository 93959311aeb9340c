"""Look at what a compiler makes of a Llama: the plan, the passes, one rank's source, and a page for the browser. Needs no processes.

    python examples/inspect_llama.py                                what explain() says, what the passes did, what rewriting changed
    python examples/inspect_llama.py --mesh tp=4 --html llama.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,pp=2,tp=2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0, help="whose source is printed")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    args = parser.parse_args()
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
    with torch.device("meta"):  # no weights are needed to look
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=args.layers, vocab_size=1000, **sizes))
    ids = torch.zeros(8, 32, dtype=torch.int64)

    compiled = tpcompile.compile(model, args.mesh, {"input_ids": ids, "labels": ids})
    print(compiled.explain())
    print(compiled.history)
    print(compiled.history["rewrite"].layer(0).diff())
    print("\n\n".join(compiled.program(args.rank).sources))
    if args.html:
        args.html.write_text(compiled.html(), encoding="utf-8")


if __name__ == "__main__":
    main()
