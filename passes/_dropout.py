"""Private to capture and normalize: dropout as an operation of our own, and the sites where random numbers are drawn.

    dropout       local: every rank draws the mask of its own piece, from a key that says which piece it is
    dropout_at    exact: an element's mask follows from its place in the value of the whole batch

A site is a number: how many of these operations ran before in the model's forward, those counted too whose values nobody uses. An eager
model can count the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from tpcompile import collectives
from tpcompile.errors import Refused
from tpcompile.factors import quotient
from tpcompile.ir import Draft
from tpcompile.layout import Size, TensorType
from tpcompile.passes._random import SPELLINGS, Spelling, is_random
from tpcompile.rules import argument, op_name

aten = torch.ops.aten
ATTENTION = "aten.scaled_dot_product_attention.default"


def drops(node: fx.Node) -> bool:
    """Whether a call is a dropout that drops something, or attention with one."""
    if node.op != "call_function":
        return False
    match op_name(node):
        case "aten.dropout.default" | "aten.dropout_.default":
            return bool(argument(node, "p") > 0 and argument(node, "train"))
        case name:
            return name == ATTENTION and bool(argument(node, "dropout_p") > 0)


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers that can be keyed: those that have a site."""
    return drops(node) or is_random(node)


def key_random(draft: Draft, how: str) -> bool:
    """Replace dropout and other random operations by our own, which depend only on a key and the place in the graph.

    `how` is "local", "exact", or "fast": then attention keeps its own dropout, which its fused kernels draw from torch's generator.
    Returns whether there is any.
    """
    sites = dict(draft.program.sites)
    for node in [node for node in draft.graph.nodes if op_name(node) == ATTENTION and drops(node)]:
        if how != "fast":
            name = node.name
            sites[spell_attention(draft, node).name] = sites.get(name, len(sites))
    places = [node for node in draft.graph.nodes if draws(node) and op_name(node) != ATTENTION]
    if not places:
        return False
    with draft.graph.inserting_before(next(n for n in draft.graph.nodes if n.op != "placeholder")):
        key = draft.graph.placeholder("rng_key")
    draft.types[key.name] = TensorType(torch.int64, (3,))
    for order, node in enumerate(places):
        site = sites.get(node.name, order)
        with draft.graph.inserting_before(node):
            if (spell := SPELLINGS.get(op_name(node))) is not None:
                draft.replace(node, spell(Spelling(draft, node, key, site, -1 if how == "exact" else collectives.OWN)))
                continue
            target = collectives.ops.dropout_at.default if how == "exact" else collectives.ops.dropout.default
            args = (node.args[0], argument(node, "p"), key, site, *(() if how == "exact" else (0,)))
            draft.replace(node, draft.call(target, *args, type=draft.types[node.name], like=node))
    return True


def spell_attention(draft: Draft, node: fx.Node) -> fx.Node:
    """Attention with dropout as softmax(q·kᵀ·scale + mask), dropout, ·v: torch's own draws masks that no key can repeat.

    Returns its dropout.
    """
    query, key, value, mask, p, causal, scale, grouped = (argument(node, name) for name in OPERANDS)
    q, k, v = (draft.types[n.name] for n in (query, key, value))
    out = draft.types[node.name]
    assert isinstance(q, TensorType) and isinstance(k, TensorType) and isinstance(v, TensorType) and isinstance(out, TensorType)

    def call(target: Callable[..., object], *args: object, shape: tuple[Size, ...], of: torch.dtype = q.dtype, **kwargs: object) -> fx.Node:
        return draft.call(target, *args, type=TensorType(of, shape), like=node, **kwargs)

    if not all(isinstance(size, int) for size in (q.shape[-1], *((q.shape[-3], k.shape[-3]) if grouped else ()))):
        what = "attention with dropout, over heads whose number or size is known only when it runs"
        raise Refused(what, source=str(draft.sources.get(node.name, "")), fix="take the heads apart in the model, or set the dropout to 0")
    with draft.graph.inserting_before(node):
        if grouped and k.shape[-3] != q.shape[-3]:
            times = quotient(q.shape[-3], k.shape[-3])
            k, v = (TensorType(kind.dtype, (*kind.shape[:-3], q.shape[-3], *kind.shape[-2:])) for kind in (k, v))
            key = call(aten.repeat_interleave.self_int, key, times, -3, shape=k.shape)
            value = call(aten.repeat_interleave.self_int, value, times, -3, shape=v.shape)
        turned = call(aten.transpose.int, key, -2, -1, shape=(*k.shape[:-2], k.shape[-1], k.shape[-2]))
        scores_shape = (*broadcast(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        scores = call(aten.matmul.default, query, turned, shape=scores_shape)
        scores = call(aten.mul.Tensor, scores, 1 / math.sqrt(int(q.shape[-1])) if scale is None else scale, shape=scores_shape)
        if causal:
            seen = call(aten.ones_like.default, scores, shape=scores_shape, of=torch.bool, dtype=torch.bool)
            mask = call(aten.tril.default, seen, shape=scores_shape, of=torch.bool)
        if mask is not None:
            kind = draft.types[mask.name]
            assert isinstance(kind, TensorType)
            scores_shape = broadcast(scores_shape, kind.shape)
            if kind.dtype == torch.bool:
                hidden = call(aten.logical_not.default, mask, shape=kind.shape, of=torch.bool)
                scores = call(aten.masked_fill.Scalar, scores, hidden, -math.inf, shape=scores_shape)
            else:
                scores = call(aten.add.Tensor, scores, mask, shape=scores_shape)
        weights = call(aten._safe_softmax.default, scores, -1, shape=scores_shape)
        dropped = call(aten.dropout.default, weights, p, True, shape=scores_shape)
        draft.replace(node, call(aten.matmul.default, dropped, value, shape=out.shape))
    return dropped


def broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """The shape of two tensors put together element by element."""
    rank = max(len(a), len(b))
    pairs = zip(((1,) * (rank - len(a)) + a), ((1,) * (rank - len(b)) + b), strict=True)
    return tuple(right if left == 1 else left for left, right in pairs)


OPERANDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
