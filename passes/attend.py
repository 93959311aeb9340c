"""attend: one operation for attention, which is told what its mask is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tpcompile.ir import Draft, Left, Program
from tpcompile.layout import Size, TensorType
from tpcompile.operation import argument, op_name
from tpcompile.passes._attention import SOFTMAX, LeftWritten, Written, written
from tpcompile.passes._dropout import ATTENTION, OPERANDS, broadcast
from tpcompile.passes._indices import ALWAYS, NEVER, Condition, at_least_zero, index, placed
from tpcompile.passes._masks import Masks, cases_of, masks_of

aten = torch.ops.aten
SPELLED = "aten._safe_softmax.default"
"""The softmax of attention with dropout, when normalize has written it out."""
HALF = (torch.bfloat16, torch.float16)


def attend(program: Program) -> Program:
    """Write attention as one operation, and a causal mask as its option, where that computes the same.

    before  %m = le(%k, %q) : bool[b, 1, s, s]
            %y = scaled_dot_product_attention(%x, %x1, %x2, %m)
    after   %y = scaled_dot_product_attention(%x, %x1, %x2, None, 0.0, True)

    before  %s = mul(matmul(%x, transpose(%x1, 2, 3)), 0.25)
            %y = matmul(softmax(add(%s, %m), -1), %x2)
    after   %y = scaled_dot_product_attention(%x, %x1, %x2, %m, scale=0.25)

    before  %k = repeat_interleave(%x1, 2, 1), %v = repeat_interleave(%x2, 2, 1)
            %y = scaled_dot_product_attention(%x, %k, %v) : bf16[b, 8, s, 64]
    after   %y = scaled_dot_product_attention(%x, %x1, %x2, enable_gqa=True)
    """
    places = [node.name for node in program.graph.nodes if node.op == "call_function" and op_name(node) in (ATTENTION, SPELLED, *SOFTMAX)]
    if not places:
        return program
    draft = Draft(program)
    attention = _Attention(draft)
    for name in places:
        attention.rewrite(draft.nodes[name])
    said = tuple(f"{count} {what}" for what, count in attention.said.items())
    return replace(draft.freeze(), attention=said, kept=tuple(attention.kept))


class _Attention:
    """The attentions of a draft, one after the other, and what is said of them."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.said: Counter[str] = Counter()
        self.kept: list[Left] = []

    @cached_property
    def masks(self) -> Masks:
        return masks_of(self.draft.program)

    @cached_property
    def same(self) -> dict[str, Any]:
        """The values that are one number everywhere."""
        return {name: value[0][0] for name, each in self.masks.values.items() if (value := cases_of(each)) and len(value) == 1}

    def type(self, node: fx.Node) -> TensorType:
        found = self.draft.types[node.name]
        assert isinstance(found, TensorType)
        return found

    def keep(self, node: fx.Node, what: str) -> None:
        """Say that an attention stays, as far as that goes, and why."""
        self.said[what] += 1
        source = self.draft.sources.get(node.name)
        self.kept.append(Left((source.path if source else "") or node.name, node.name, what, source))

    def rewrite(self, node: fx.Node) -> None:
        if op_name(node) == ATTENTION:
            self.name_mask(node)
            self.share_heads(node)
            return
        if op_name(node) == SPELLED:
            if any("dropout" in op_name(user) for user in node.users):
                self.keep(node, "written out: no key repeats a fused kernel's dropout (dropout='fast' keeps it)")
            return
        try:
            found = written(node, self.draft.types, self.same)
            if found is not None:
                causal = self.join(node, found)
                self.said["written out, now one operation" + (" that is causal" if causal else "")] += 1
        except LeftWritten as reason:
            self.keep(node, f"left as written: {reason}")

    # --- masks

    def name_mask(self, node: fx.Node) -> None:
        """Drop a mask that hides nothing, and make one that is causal an option."""
        query, key, _, mask, p, _, scale, grouped = (argument(node, name) for name in OPERANDS)
        if mask is None:
            return
        lengths = [self.type(each).shape[-2] for each in (query, key)]
        kind, reason = self.kind(mask, lengths, self.type(query).dtype)
        if self.type(node).shape[:-1] != self.type(query).shape[:-1]:
            kind, reason = "", "it has more dimensions than the queries"
        if not kind:
            self.keep(node, f"with a mask that stays: {reason}")
            return
        self.said["whose mask is causal" if kind == "causal" else "whose mask hides nothing"] += 1
        kwargs = {} if scale is None else {"scale": scale}
        kwargs |= {"enable_gqa": True} if grouped else {}
        node.args, node.kwargs = (*node.args[:3], *((None, p, True) if kind == "causal" else (None, p) if p else ())), kwargs

    def kind(self, mask: fx.Node, lengths: list[Size], dtype: torch.dtype) -> tuple[str, str]:
        """Whether a mask is "causal", or hides nothing ("all"); "" and the reason where it does neither."""
        cases = cases_of(self.masks.values.get(mask.name))
        own = self.type(mask)
        if cases is None:
            return "", self.masks.why.get(mask.name, "it counts")
        if own.dtype == torch.bool:
            where = dict(cases).get(True, NEVER)
            return self.shown(where, own, lengths)
        for number, _ in cases:
            if number != 0 and number > lowest(dtype):
                return "", f"it adds {number:g}"
        return self.shown(dict(cases).get(0.0, NEVER), own, lengths)

    def shown(self, where: Condition, own: TensorType, lengths: list[Size]) -> tuple[str, str]:
        """The same, of what is shown where a condition holds."""
        if where == ALWAYS:
            return "all", ""
        rank = len(own.shape)
        if rank < 2 or where != at_least_zero(index(rank - 2).plus(index(rank - 1), -1), own.shape):
            return "", "it is not causal"
        if not own.shape[-2] == own.shape[-1] == lengths[0] == lengths[1]:
            return "", "queries and keys are not known to be as many"
        return "causal", ""

    # --- heads

    def share_heads(self, node: fx.Node) -> None:
        """Let query heads share key/value heads inside the operation.

        In 16 bits and without a mask: others were not tried on a GPU.
        """
        query, key, value, mask, _, _, _, grouped = (argument(node, name) for name in OPERANDS)
        repeats = [each for each in (key, value) if op_name(each) == "aten.repeat_interleave.self_int"]
        if len(repeats) < 2 or grouped:
            return
        kind, own = self.type(query), [self.type(each.all_input_nodes[0]) for each in repeats]
        times = {argument(each, "repeats") for each in repeats}
        dims = {argument(each, "dim") % len(kind.shape) if argument(each, "dim") is not None else None for each in repeats}
        if len(kind.shape) != 4 or dims != {1} or len(times) > 1 or own[0].shape[1] != own[1].shape[1]:
            return
        (count,) = times
        if not isinstance(count, int) or kind.shape[1] != count * own[0].shape[1]:
            return
        if mask is not None or kind.dtype not in HALF:
            self.keep(node, "whose key/value heads are repeated: " + ("it has a mask" if mask is not None else "not in 16 bits"))
            return
        node.args = (query, *(each.args[0] for each in repeats), *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        self.said["that shares key/value heads"] += 1

    # --- what is written out

    def join(self, softmax: fx.Node, found: Written) -> bool:
        """Put one operation in the place of many. Returns whether it is causal. Raises LeftWritten."""
        draft, kind = self.draft, self.type(found.query)
        key_length = self.type(found.turned).shape[-1]
        causal, mask_nodes = self.hidden(found, [kind.shape[-2], key_length], kind.dtype)
        with draft.graph.inserting_before(found.out):
            key = self.turned(found.turned, softmax)
            mask = self.mask(mask_nodes, found, softmax)
            scale = 1 / math.sqrt(kind.shape[-1]) if isinstance(kind.shape[-1], int) else None
            kwargs = {} if found.scale == scale else {"scale": found.scale}
            more: tuple[Any, ...] = (None, 0.0, True) if causal else (mask,) if mask is not None else ()
            args = (found.query, key, found.value, *more)
            made = draft.call(aten.scaled_dot_product_attention.default, *args, type=self.type(found.out), like=softmax, **kwargs)
        draft.replace(found.out, made)
        return causal

    def hidden(self, found: Written, lengths: list[Size], dtype: torch.dtype) -> tuple[bool, list[fx.Node]]:
        """Whether an attention is causal, and else what is added to its scores. Raises LeftWritten.

        A number that is as low as can be hides a key as -inf does where another key of its row is seen: its weight is exp of less than
        -10,000, which is 0 in all types. Causal rows see themselves.
        """
        causal, kept = False, []
        for condition, number, seen in found.filled:
            value = self.same.get(number.name) if isinstance(number, fx.Node) else number
            if not isinstance(value, (int, float)) or value > lowest(dtype):
                raise LeftWritten(
                    f"it fills {value:g} into its scores" if isinstance(value, (int, float)) else "it fills in what is no number"
                )
            cases, own = cases_of(self.masks.values.get(condition.name)), self.type(condition)
            if cases is None:
                raise LeftWritten(f"it fills in by a mask: {self.masks.why.get(condition.name, 'it counts')}")
            kind, reason = self.shown(dict(cases).get(seen, NEVER), own, lengths)
            if not kind:
                raise LeftWritten(f"it fills in by a mask: {reason}")
            causal |= kind == "causal"
        filled = causal
        for each in found.added:
            kind, _ = self.kind(each, lengths, dtype)
            causal |= kind == "causal"
            kept += [each] if kind == "" else []
        if kept and filled:
            raise LeftWritten("it has a mask that fills in and one that is added")
        for each in kept:
            self.refuse_mask(each, lengths, dtype)
        return (False, found.added) if kept else (causal, [])

    def refuse_mask(self, mask: fx.Node, lengths: list[Size], dtype: torch.dtype) -> None:
        """Raise LeftWritten unless every query is known to see its own key.

        Of a row whose keys all have the lowest number added, softmax makes equal weights; torch's fused kernels recompute these in
        backward from the logarithm of their sum, which is lost beside such a number: gradients are as many times too large as there are
        keys. Of a row of -inf, softmax makes nan, and kernels zeros.
        """
        own, cases = self.type(mask), cases_of(self.masks.values.get(mask.name))
        if cases is None:
            raise LeftWritten(f"a row of its mask may hide all keys: {self.masks.why.get(mask.name, 'it counts')}")
        rank = len(own.shape)
        shown, diagonal = dict(cases).get(0.0, NEVER), {dim: index(rank - 2 if dim == rank - 1 else dim) for dim in range(rank)}
        if rank < 2 or own.shape[-2] != own.shape[-1] or lengths != list(own.shape[-2:]) or placed(shown, diagonal, own.shape) != ALWAYS:
            raise LeftWritten("a row of its mask may hide all keys")
        if own.dtype != dtype or any(number > 0 for number, _ in cases):
            raise LeftWritten("its mask is of another type" if own.dtype != dtype else "its mask adds more than 0")

    def turned(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """The keys of their transpose."""
        if op_name(value) == "aten.transpose.int" and {argument(value, name) % 4 for name in ("dim0", "dim1")} == {2, 3}:
            return value.all_input_nodes[0]
        kind = self.type(value)
        turned = TensorType(kind.dtype, (*kind.shape[:2], kind.shape[3], kind.shape[2]))
        return self.draft.call(aten.transpose.int, value, 2, 3, type=turned, like=like)

    def mask(self, added: list[fx.Node], found: Written, like: fx.Node) -> fx.Node | None:
        """The sum of masks, of two or four dimensions."""
        if not added:
            return None
        total, scores = added[0], self.type(found.scores)
        for each in added[1:]:
            shape = broadcast(self.type(total).shape, self.type(each).shape)
            total = self.draft.call(aten.add.Tensor, total, each, type=replace(scores, shape=shape), like=like)
        while len(shape := self.type(total).shape) not in (2, 4):
            wider = replace(scores, shape=(1, *shape))
            total = self.draft.call(aten.unsqueeze.default, total, 0, type=wider, like=like)
        return total


def lowest(dtype: torch.dtype) -> float:
    """Half of the lowest number of float32, or of a narrower type: what is below hides a key."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min) / 2
