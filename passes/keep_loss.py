"""keep_loss: a program that returns its loss alone."""

from __future__ import annotations

from torch.utils import _pytree as pytree

from tpcompile.errors import InputError
from tpcompile.ir import Draft, Program
from tpcompile.passes._reasons import user_line


def keep_loss(program: Program) -> Program:
    """Drop every output but the loss, and what was computed for these alone: scores that only the loss reads need not be gathered.

    before  return [%loss, %logits]
    after   return [%loss]
    """
    if program.loss is None:
        raise InputError(
            "there is no loss to return: the model's output is neither a scalar nor has a .loss",
            at='compile(outputs="loss")',
            source=user_line(),
            fix='pass loss= or the labels with the batch, or outputs="all"',
        )
    draft = Draft(program)
    draft.graph.output_node().args = ((draft.nodes[program.loss],),)
    return draft.freeze(outputs=(program.loss,), out_spec=pytree.tree_structure(0), output_constants={})
