"""attend: what becomes of masks, of shared heads and of attention that is written out; and what stays, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_models import before_and_after
from torch import Tensor, nn

from tpcompile.ir import Program
from tpcompile.operation import argument, op_name
from tpcompile.passes.attend import attend
from tpcompile.passes.capture import capture
from tpcompile.passes.normalize import normalize
from tpcompile.simulate.lockstep import run

SDPA = "aten.scaled_dot_product_attention.default"
LOW = torch.finfo(torch.float64).min
Work = Callable[..., Any]


class Attention(nn.Module):
    """q, k and v of four heads, and what is under test between them."""

    def __init__(self, work: Work, groups: int) -> None:
        super().__init__()
        self.work, self.groups = work, groups
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 4 * groups), nn.Linear(16, 4 * groups)
        self.bias = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.register_buffer("lower", torch.ones(9, 9, dtype=torch.bool).tril())

    def forward(self, x: Tensor, seen: Tensor) -> Any:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = self.work(self, q, k, v, seen)
        return made.square().sum() if isinstance(made, Tensor) else {"loss": made[0].square().sum(), "weights": made[1]}


def program(work: Work, *, groups: int = 4, dtype: torch.dtype = torch.float64) -> Program:
    torch.manual_seed(0)
    model = Attention(work, groups).to(dtype).train()
    batch = {"x": torch.randn(2, 6, 16, dtype=dtype), "seen": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()}
    return normalize(capture(model, batch))


def calls(found: Program, name: str = SDPA) -> list[Any]:
    return [node for node in found.graph.nodes if node.op == "call_function" and op_name(node) == name]


def same_numbers(before: Program, after: Program) -> None:
    """The same loss and gradients of parameters, for a length that the capture has not seen."""
    torch.manual_seed(1)
    held = Attention(lambda *_: None, int(before.types["p_k_weight"].shape[0]) // 4).double()  # type: ignore[union-attr]
    values: dict[str, Tensor] = {name: held.get_parameter(own) for name, own in before.parameters.items()}
    values |= {name: held.get_buffer(own) for name, own in before.buffers.items()} | dict(before.constants)
    seen = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    values |= {"x": torch.randn(2, 8, 16, dtype=torch.float64), "seen": seen, "rng_key": torch.tensor([1, 0, 1])}
    results = []
    for each in (before, after):
        assert each.loss is not None
        loss = run(each.graph, {name: [value] for name, value in values.items()}, 1)[each.loss][0]
        trained = [values[name] for name in each.parameters]
        results.append([loss, *torch.autograd.grad(loss, trained, allow_unused=True)])
    for one, other in zip(*results, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def lower(x: Tensor, *, below: int = 0) -> Tensor:
    """A causal mask by indices, or one that is moved."""
    place = torch.arange(x.shape[-2])
    return place[None, :] <= place[:, None] + below


def by_index(q: Tensor) -> Tensor:
    """As a function of indices that is mapped over them."""
    place = torch.arange(q.shape[-2])
    inside = torch.vmap(torch.vmap(lambda i, j: (j <= i) & (i >= 0), (None, 0)), (0, None))(place, place)
    return inside[None, None].expand(q.shape[0], 1, -1, -1)


MASKS: dict[str, tuple[Work, str]] = {
    # a mask, and what is said of it
    "arange": (lambda m, q, seen: lower(q), "1 whose mask is causal"),
    "indices": (lambda m, q, seen: by_index(q), "1 whose mask is causal"),
    "tril": (lambda m, q, seen: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()[None, None], "1 whose mask is causal"),
    "triu, inverted": (lambda m, q, seen: ~torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool(), "1 whose mask is causal"),
    "full, -inf": (lambda m, q, seen: torch.full((q.shape[-2],) * 2, -torch.inf, dtype=q.dtype).triu(1), "1 whose mask is causal"),
    "lowest": (lambda m, q, seen: torch.where(lower(q), torch.zeros([], dtype=q.dtype), LOW), "1 whose mask is causal"),
    "one minus": (lambda m, q, seen: (1 - lower(q).to(q.dtype)) * LOW, "1 whose mask is causal"),
    "everything": (lambda m, q, seen: torch.arange(q.shape[-2])[None] >= 0, "1 whose mask hides nothing"),
    "window": (lambda m, q, seen: lower(q) & ~lower(q, below=-3), "1 with a mask that stays: it is not causal"),
    "moved by one": (lambda m, q, seen: lower(q, below=1), "1 with a mask that stays: it is not causal"),
    "turned": (lambda m, q, seen: lower(q).T, "1 with a mask that stays: it is not causal"),
    "minus one": (lambda m, q, seen: torch.where(lower(q), 0.0, -1.0).to(q.dtype), "1 with a mask that stays: it adds -1"),
    "-1e9": (lambda m, q, seen: torch.where(lower(q), 0.0, -1e9).to(q.dtype), "1 with a mask that stays: it adds -1e+09"),
    "padding": (lambda m, q, seen: seen[:, None, None], "1 with a mask that stays: it depends on seen"),
    "causal with padding": (lambda m, q, seen: lower(q) & seen[:, None, None], "1 with a mask that stays: it depends on seen"),
    "prefix": (lambda m, q, seen: lower(q) | (torch.arange(q.shape[-2]) < 2), "1 with a mask that stays: it is not causal"),
    "buffer": (
        lambda m, q, seen: m.lower[: q.shape[-2], : q.shape[-2]],
        "1 with a mask that stays: it reads the buffer lower, which may change",
    ),
    "learned": (lambda m, q, seen: m.bias.expand(-1, -1, q.shape[-2], q.shape[-2]), "1 with a mask that stays: it is learned"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    """A mask becomes an option, or nothing, only where it is known to be that; the numbers stay."""
    mask, said = MASKS[name]
    before = program(lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(m, q, seen)))
    after = attend(before)
    assert after.attention == (said,)
    (node,) = calls(after)
    assert argument(node, "is_causal") == ("causal" in said and "not" not in said)
    assert (argument(node, "attn_mask") is None) == ("stays" not in said)
    assert len(after.graph.nodes) < len(before.graph.nodes) or "stays" in said
    same_numbers(before, after)


def test_a_mask_over_other_lengths() -> None:
    """Of keys that are more than queries, torch's option would show others."""

    def more(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        k, v = (torch.cat([part, part], 2) for part in (k, v))
        place = torch.arange(2 * q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, place[None] <= place[: q.shape[-2], None])

    after = attend(program(more))
    assert after.attention == ("1 with a mask that stays: queries and keys are not known to be as many",)
    assert not argument(calls(after)[0], "is_causal")


def test_a_mask_that_makes_more_rows() -> None:
    def more(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = lower(q).expand(3, 1, 1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert attend(program(more)).attention == ("1 with a mask that stays: it has more dimensions than the queries",)


# ------------------------------------------------------------------------------------------------- written out


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def low(q: Tensor) -> Tensor:
    return hiding(q, ~lower(q))


def window(q: Tensor) -> Tensor:
    return hiding(q, ~lower(q) | lower(q, below=-3))


def hiding(q: Tensor, hidden: Tensor) -> Tensor:
    return torch.zeros([], dtype=q.dtype).masked_fill(hidden, LOW)


CAUSAL, ONE = "1 written out, now one operation that is causal", "1 written out, now one operation"
LEFT = "1 left as written: "
WRITTEN: dict[str, tuple[Work, str]] = {
    "plain": (lambda m, q, k, v, seen: scores(q, k).softmax(-1) @ v, ONE),
    "a scale of its own": (lambda m, q, k, v, seen: (q @ k.mT * 0.3).softmax(-1) @ v, ONE),
    "no scale": (lambda m, q, k, v, seen: (q @ k.mT).softmax(3) @ v, ONE),
    "two scales": (lambda m, q, k, v, seen: (2 * (q @ k.mT) / 3).softmax(3) @ v, ONE),
    "a scale as a tensor": (lambda m, q, k, v, seen: (q @ k.mT / torch.full([], 3.0, dtype=q.dtype)).softmax(-1) @ v, ONE),
    "a scaled query": (lambda m, q, k, v, seen: ((q * 0.3) @ k.mT).softmax(-1) @ v, ONE),
    "keys turned before": (lambda m, q, k, v, seen: (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v, ONE),
    "causal, added": (lambda m, q, k, v, seen: (scores(q, k) + low(q)).softmax(-1) @ v, CAUSAL),
    "causal, first": (lambda m, q, k, v, seen: (low(q) + scores(q, k)).softmax(-1) @ v, CAUSAL),
    "causal, filled in": (lambda m, q, k, v, seen: scores(q, k).masked_fill(~lower(q), -torch.inf).softmax(-1) @ v, CAUSAL),
    "causal, filled in with zeros": (
        lambda m, q, k, v, seen: scores(q, k).masked_fill(torch.ones(q.shape[2], q.shape[2]).tril() == 0, -torch.inf).softmax(-1) @ v,
        CAUSAL,
    ),
    "causal, chosen": (lambda m, q, k, v, seen: torch.where(lower(q), scores(q, k), LOW).softmax(-1) @ v, CAUSAL),
    "causal, chosen otherwise": (lambda m, q, k, v, seen: torch.where(~lower(q), LOW, scores(q, k)).softmax(-1) @ v, CAUSAL),
    "causal, twice": (lambda m, q, k, v, seen: (scores(q, k).masked_fill(~lower(q), LOW) + low(q)).softmax(-1) @ v, CAUSAL),
    "all": (lambda m, q, k, v, seen: (scores(q, k) + torch.zeros(q.shape[2], q.shape[2]).to(q.dtype)).softmax(-1) @ v, ONE),
    "window": (lambda m, q, k, v, seen: (scores(q, k) + window(q)).softmax(-1) @ v, ONE),
    "window and causal": (lambda m, q, k, v, seen: (scores(q, k) + window(q) + low(q)[None]).softmax(-1) @ v, ONE),
    "minus one": (lambda m, q, k, v, seen: (scores(q, k) + torch.where(lower(q), 0.0, -1.0).to(q.dtype)).softmax(-1) @ v, ONE),
    "padding": (
        lambda m, q, k, v, seen: (scores(q, k) + hiding(q, ~seen[:, None, None])).softmax(-1) @ v,
        LEFT + "a row of its mask may hide all keys: it depends on seen",
    ),
    "hidden rows": (
        lambda m, q, k, v, seen: (scores(q, k) + low(q).T + low(q).flip(0)).softmax(-1) @ v,
        LEFT + "a row of its mask may hide all keys",
    ),
    "filled by data": (
        lambda m, q, k, v, seen: scores(q, k).masked_fill(~seen[:, None, None], -torch.inf).softmax(-1) @ v,
        LEFT + "it fills in by a mask: it depends on seen",
    ),
    "filled by a buffer": (
        lambda m, q, k, v, seen: scores(q, k).masked_fill(~m.lower[: q.shape[2], : q.shape[2]], -torch.inf).softmax(-1) @ v,
        LEFT + "it fills in by a mask: it reads the buffer lower, which may change",
    ),
    "filled by a window": (
        lambda m, q, k, v, seen: scores(q, k).masked_fill(window(q) != 0, -torch.inf).softmax(-1) @ v,
        LEFT + "it fills in by a mask: it is not causal",
    ),
    "filled with little": (
        lambda m, q, k, v, seen: scores(q, k).masked_fill(~lower(q), -1.0).softmax(-1) @ v,
        LEFT + "it fills -1 into its scores",
    ),
    "learned": (
        lambda m, q, k, v, seen: (scores(q, k) + m.bias).softmax(-1) @ v,
        LEFT + "a row of its mask may hide all keys: it is learned",
    ),
    "returned": (
        lambda m, q, k, v, seen: ((w := scores(q, k).softmax(-1)) @ v, w),
        LEFT + "its weights are used elsewhere",
    ),
    "scores used": (
        lambda m, q, k, v, seen: ((w := scores(q, k)).softmax(-1) @ v, w),
        LEFT + "its scores are used elsewhere",
    ),
    "dropped": (lambda m, q, k, v, seen: F.dropout(scores(q, k).softmax(-1), 0.5) @ v, LEFT + "its weights are dropped at random"),
    "over queries": (lambda m, q, k, v, seen: scores(q, k).softmax(-2) @ v, LEFT + "its softmax is not over the keys"),
    "in float32": (
        lambda m, q, k, v, seen: F.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype) @ v,
        LEFT + "its softmax is computed in another type",
    ),
    "three dimensions": (
        lambda m, q, k, v, seen: scores(q.flatten(0, 1), k.flatten(0, 1)).softmax(-1) @ v.flatten(0, 1),
        LEFT + "it is not in four dimensions, [batch, heads, positions, features]",
    ),
    "other values": (
        lambda m, q, k, v, seen: scores(q, k).softmax(-1) @ v[..., :2],
        LEFT + "its queries, keys and values are not alike in shape",
    ),
}  # fmt: skip

NONE: dict[str, Work] = {
    "scaled after the mask": lambda m, q, k, v, seen: ((q @ k.mT + low(q) / 4) * 2).softmax(-1) @ v,
    "of something else": lambda m, q, k, v, seen: q.cos().softmax(-1) @ k.mT,
    "used otherwise": lambda m, q, k, v, seen: scores(q, k).softmax(-1).cos(),
}
"""Softmaxes that are in no attention that has one operation."""


@pytest.mark.parametrize("name", WRITTEN)
def test_written_out(name: str) -> None:
    """One operation, where it computes the same; else the program stays as it is."""
    work, said = WRITTEN[name]
    before = program(work)
    after = attend(before)
    assert after.attention == (said,)
    found = calls(after)
    assert len(found) == (said[:8] == "1 writte") and len(calls(after, "aten.softmax.int")) == 1 - len(found)
    assert all(argument(node, "is_causal") == (said == CAUSAL) for node in found)
    if found:
        softmax = next(node for node in before.graph.nodes if op_name(node) == "aten.softmax.int")
        assert after.sources[found[0].name] == before.sources[softmax.name]
    if "dropped" not in said:
        same_numbers(before, after)


@pytest.mark.parametrize("name", NONE)
def test_no_attention(name: str) -> None:
    before = program(NONE[name])
    after = attend(before)
    assert after.attention == () and not calls(after) and len(after.graph.nodes) == len(before.graph.nodes)


def test_sixteen_bits_round_in_other_places() -> None:
    before = program(WRITTEN["plain"][0], dtype=torch.bfloat16)
    assert attend(before).attention == (LEFT + "in 16 bits, one operation rounds in other places",)


def test_dropout_inside_attention_is_said_to_be_written_out() -> None:
    """By normalize, as long as no option keeps it in its kernel."""
    before = program(lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    after = attend(before)
    assert after.attention == ("1 written out: no key repeats a fused kernel's dropout (dropout='fast' keeps it)",)
    assert [node.target for node in after.graph.nodes] == [node.target for node in before.graph.nodes]


def test_what_stays_has_its_line() -> None:
    """For `explain()`: the node, the reason and the place in the model of every attention that stays."""

    def twice(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v, seen[:, None, None])
        return (scores(first, k).softmax(-2) @ v) + F.scaled_dot_product_attention(q, k, v, is_causal=True)

    masked, written = attend(program(twice)).kept
    assert masked.reason == "with a mask that stays: it depends on seen" and masked.node == "scaled_dot_product_attention"
    assert written.reason == LEFT[2:] + "its softmax is not over the keys" and written.node == "softmax"
    assert all(left.source and left.source.code == "made = self.work(self, q, k, v, seen)" for left in (masked, written))


# ------------------------------------------------------------------------------------------------- shared heads


def shared(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As transformers repeats them."""
    k, v = (part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_heads(dtype: torch.dtype) -> None:
    """In 16 bits the operation repeats key/value heads itself."""
    after = attend(program(shared, groups=2, dtype=dtype))
    (node,) = calls(after)
    assert argument(node, "enable_gqa") and argument(node, "is_causal") and not calls(after, "aten.repeat_interleave.self_int")
    assert after.attention == ("1 that shares key/value heads",)


def test_heads_that_stay_repeated() -> None:
    """In wider types, with a mask, or where only one of keys and values is repeated."""
    assert attend(program(shared, groups=2)).attention == ("1 whose key/value heads are repeated: not in 16 bits",)

    def masked(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, seen[:, None, None])

    def keys(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), torch.cat([v, v], 1))

    found = [attend(program(work, groups=2, dtype=torch.bfloat16)) for work in (masked, keys)]
    assert found[0].attention[1:] == ("1 whose key/value heads are repeated: it has a mask",) and found[1].attention == ()
    assert not any(argument(node, "enable_gqa") for each in found for node in calls(each))


# ------------------------------------------------------------------------------------------------- the whole text


def test_attend(golden: Callable[..., None]) -> None:
    """A mask by indices; a layer that is written out; shared heads; what is left of the program."""

    def mixed(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v, by_index(q), scale=0.3)
        second = (scores(first, k) + low(q)).softmax(-1) @ v
        third = (scores(second, k) + window(q)).softmax(-1) @ v
        return F.scaled_dot_product_attention(third, k, v, lower(q) & seen[:, None, None])

    whole = program(mixed)
    half = program(shared, groups=2, dtype=torch.bfloat16)
    golden("\n\n".join(before_and_after(attend, each) for each in (whole, half)))


def test_a_program_without_attention_is_left() -> None:
    found = program(lambda m, q, k, v, seen: q.cos())
    assert attend(found) is found
