"""Every rule, proved by arithmetic: cut each factor of random inputs, run the operation on each part, join, compare; gradients too.

A row of the tables without an example in `rule_examples` fails here, so a new row is tested by being there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from one_call import Call, Example, cut_dim, e, f, overload
from rule_examples import EXAMPLES, POINTWISE_SAMPLES
from torch import fx

from tpcompile import rules
from tpcompile.factors import LayoutError, reshape
from tpcompile.layout import Dim, Factor, Layout, Open, TensorType, same, size_of, whole_dim
from tpcompile.rules import (
    ALONG,
    ENDS,
    JOINS,
    PARTED,
    POINTWISE,
    RESHAPES,
    RULES,
    Bound,
    Op,
    Token,
    backward,
    bind_rule,
    forward,
    has_rule,
    opened,
    view_op,
)

TABLES = sorted({*RULES, *POINTWISE, *PARTED})
UNDEFINED = ("empty",)
"""Operations whose values are whatever memory held."""


def examples(names: Iterable[str]) -> list[object]:
    table = {**EXAMPLES, **POINTWISE_SAMPLES}
    return [pytest.param(name, example, id=f"{name}-{n}") for name in names for n, example in enumerate(table.get(name, []))]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_an_example(name: str) -> None:
    assert EXAMPLES.get(name), f"{name} has no example in rule_examples.py"


def test_no_example_without_a_row() -> None:
    assert not EXAMPLES.keys() - set(TABLES)
    assert all(torch.Tag.pointwise in overload(name).tags for name in POINTWISE_SAMPLES)


# --- letters ---------------------------------------------------------------------------------------------------------


def places(tokens: tuple[tuple[Token, ...], ...], letter: str) -> Iterator[tuple[int, int]]:
    """Where a letter stands: operand or output, and dimension."""
    for index, row in enumerate(tokens):
        yield from ((index, dim) for dim, token in enumerate(row) if token.letter == letter)


def with_letter(tokens: tuple[tuple[Token, ...], ...], shapes: list[tuple[int, ...]], letter: str, dim: Dim) -> list[Layout]:
    """Layouts in which a letter, where it has its full size, is cut."""
    made = []
    for row, shape in zip(tokens, shapes, strict=True):
        sizes = zip(row, shape, strict=True)
        made.append(Layout(tuple(dim if token.letter == letter and n == size_of(dim) else whole_dim(n) for token, n in sizes)))
    return made


def outs_cut(op: Op, bound: Bound, letter: str) -> list[Layout]:
    made = with_letter(bound.outs, [kind.shape for kind in opened(op).outs], letter, cut_dim(int(bound.sizes[letter])))  # type: ignore[misc, arg-type]
    return [reshape(layout, kind.shape) for layout, kind in zip(made, op.outs, strict=True)]


def ins_cut(op: Op, bound: Bound, letter: str) -> list[Layout]:
    made = with_letter(bound.ins, [kind.shape for kind in opened(op).ins], letter, cut_dim(int(bound.sizes[letter])))  # type: ignore[misc, arg-type]
    return [reshape(layout, kind.shape) for layout, kind in zip(made, op.ins, strict=True)]


LETTERED = [name for name in [*TABLES, *POINTWISE_SAMPLES] if name not in PARTED and not any(word in name for word in UNDEFINED)]


@pytest.mark.parametrize(("name", "example"), examples(LETTERED))
def test_every_letter_may_be_cut_or_is_refused(name: str, example: Example) -> None:
    call = Call.of(name, example)
    op, bound = call.op, bind_rule(opened(call.op))
    for letter in bound.sizes:
        if letter in "*_" or bound.sizes[letter] == 1:
            continue
        kept = any(places(bound.outs, letter))
        if letter in bound.never:
            is_refused(op, bound, letter, kept)
        elif kept:
            outs = outs_cut(op, bound, letter)
            wants = backward(op, outs)
            for given in (True, False):
                call.agrees(call.sharded(outs, wants, given=given))
        else:
            adds_up(call, op, bound, letter)


def is_refused(op: Op, bound: Bound, letter: str, kept: bool) -> None:
    """A factor that an operation needs whole is cut neither in what it makes nor in what it takes."""
    if kept and any(layout.is_cut for layout in outs_cut(op, bound, letter)):
        with pytest.raises(LayoutError, match="needs this dimension whole"):
            backward(op, outs_cut(op, bound, letter))
    if any(layout.is_cut for layout in ins_cut(op, bound, letter)):
        with pytest.raises(LayoutError, match="needs this dimension whole"):
            forward(op, ins_cut(op, bound, letter))


def adds_up(call: Call, op: Op, bound: Bound, letter: str) -> None:
    """A contracted factor, cut, leaves a partial sum; reduced, it is the whole value."""
    wants = ins_cut(op, bound, letter)
    made = forward(op, wants)
    assert all(layout.partial == ("tp",) and not layout.is_cut for layout in made)
    outs = [Layout(layout.dims) for layout in made]
    for given in (True, False):
        call.agrees(call.sharded(outs, wants, given=given, row=True))


ELEMENTS = ("aten.kl_div.default", "aten.mse_loss.default")
"""Losses of elements: without a reduction there is nothing to end."""


@pytest.mark.parametrize(("name", "example"), examples(sorted(ENDS)))
def test_where_a_cut_ends(name: str, example: Example) -> None:
    """What an operation needs whole is cut after all, and rewrite writes out what it is on pieces."""
    call = Call.of(name, example)
    op, ordinary = call.op, bind_rule(call.op)
    bound = bind_rule(op, end=True)
    ended = [letter for letter in bound.sizes if letter in ordinary.never - bound.never]
    assert ended or (name in ELEMENTS and op.argument("reduction") == 0)
    for letter in ended:
        wants = ins_cut(op, bound, letter)
        outs = [Layout(layout.dims) for layout in forward(op, wants, end=True)]
        with pytest.raises(LayoutError, match="needs this dimension whole"):
            forward(op, wants)
        for given in (True, False):
            call.agrees(call.sharded(outs, wants, given=given, row=True))


@pytest.mark.parametrize(("name", "example"), examples(sorted(ALONG)))
def test_along_a_cut_dimension(name: str, example: Example) -> None:
    """What an operation works along is cut, and stays so; elsewhere it is refused."""
    call = Call.of(name, example)
    op, ordinary, bound = call.op, bind_rule(call.op), bind_rule(call.op, end=True)
    free = [letter for letter in bound.sizes if letter not in bound.never]
    along = [letter for letter in free if letter in ordinary.never or letter not in ordinary.sizes]
    assert along
    for letter in free:
        outs = outs_cut(op, bound, letter)
        wants = backward(op, outs, end=True)
        assert all(same(a, b) for a, b in zip(forward(op, wants, end=True), outs, strict=True))
        for given in (True, False):
            call.agrees(call.sharded(outs, wants, given=given))
    for letter in along:
        with pytest.raises(LayoutError, match="needs this dimension whole"):
            backward(op, outs_cut(op, bound, letter))


@pytest.mark.parametrize(("name", "example"), examples(sorted(RULES)))
def test_a_letter_stands_for_dimensions_of_one_size(name: str, example: Example) -> None:
    """Where a letter stands for a dimension of another size than one or its own, the rule says that it is shared."""
    op = opened(Call.of(name, example).op)
    bound = bind_rule(op)
    for tokens, kind in zip(bound.ins + bound.outs, op.ins + op.outs, strict=True):
        for token, size in zip(tokens, kind.shape, strict=True):
            assert token.letter in "*_" or token.shared or size in (1, bound.sizes[token.letter]) or token.letter in bound.never, token


def test_a_sum_of_partial_sums_is_one_and_nothing_else_reads_them() -> None:
    partial = Layout((whole_dim(3), whole_dim(4)), ("tp",))
    for name in ("aten.add.Tensor", "aten.sub.Tensor"):
        op = Call.of(name, Example((EXAMPLES["aten.mm.default"][0].args[0],) * 2)).op
        assert forward(op, [partial, partial]) == [partial]
        with pytest.raises(LayoutError, match="a partial sum is used before it is reduced"):
            forward(op, [partial, Layout(partial.dims)])
    for name in ("aten.relu.default", "aten.mul.Tensor", "aten.mm.default"):
        call = Call.of(name, {**EXAMPLES, **POINTWISE_SAMPLES}[name][0])
        with pytest.raises(LayoutError, match="a partial sum is used before it is reduced"):
            forward(call.op, [Layout(tuple(whole_dim(n) for n in kind.shape), ("tp",)) for kind in call.op.ins])


def test_what_has_no_rule_is_named() -> None:
    call = Call.of("aten.cdist.default", Example(EXAMPLES["aten.mm.default"][0].args[:1] * 2))
    with pytest.raises(LayoutError, match=r"^no rule for aten\.cdist\.default$"):
        backward(call.op, [Layout((whole_dim(3), whole_dim(3)))])


def test_random_numbers_are_no_element_wise_function() -> None:
    """On pieces they would be other numbers than on the whole."""
    for name in ("aten.rand_like.default", "aten.randn_like.default"):
        assert not has_rule(Call.of(name, e(f(3, 4))).op)


# --- views and splits ------------------------------------------------------------------------------------------------


def cut_places(op: Op) -> Iterator[list[Layout]]:
    """The outputs of a view or a split, each with one dimension cut: parts in their own ways, a view wherever it can."""
    for dim, size in enumerate(op.outs[0].shape):
        assert isinstance(size, int)
        if op.name in JOINS and dim == op.dims("dim")[0]:
            parts = tuple(segment for kind in op.ins for segment in cut_dim(int(kind.shape[dim])))  # type: ignore[arg-type]
            yield [Layout(tuple(parts if d == dim else whole_dim(n) for d, n in enumerate(op.outs[0].shape)))]
            continue
        for at in [None] if len(op.outs) > 1 else sorted(range(1, size), key=lambda at: (at * 2 == size, at)):
            shapes = [list(enumerate(kind.shape)) for kind in op.outs]
            outs = [Layout(tuple(cut_dim(int(n), at) if d == dim and n != 1 else whole_dim(n) for d, n in shape)) for shape in shapes]
            try:
                backward(op, outs)
            except LayoutError:
                continue
            yield outs
            break


@pytest.mark.parametrize(("name", "example"), examples(sorted(PARTED)))
def test_views_and_splits_of_pieces(name: str, example: Example) -> None:
    call = Call.of(name, example)
    proved = 0
    for outs in cut_places(call.op):
        wants = backward(call.op, outs)
        assert all(same(a, b) for a, b in zip(forward(call.op, wants), outs, strict=True))
        for given in (True, False):
            call.agrees(call.sharded(outs, wants, given=given))
        proved += 1
    assert proved


def test_parts_are_all_cut_or_none() -> None:
    """A rank's gradient of what is before would else be its own piece of one part, and all of another."""
    whole, cut, long = Layout((whole_dim(3), whole_dim(4))), Layout((whole_dim(3), cut_dim(5))), Layout((whole_dim(3), whole_dim(5)))
    split, cat = (Call.of(name, EXAMPLES[name][0]).op for name in ("aten.split_with_sizes.default", "aten.cat.default"))
    both = Layout((whole_dim(3), (*whole_dim(4), *cut_dim(5))))
    assert backward(cat, [Layout((whole_dim(3), whole_dim(9)))]) == [whole, long]
    for wrong in (lambda: backward(split, [whole, cut]), lambda: backward(cat, [both]), lambda: forward(cat, [whole, cut])):
        with pytest.raises(LayoutError, match=r"^only a part of it is cut$"):
            wrong()


@pytest.mark.parametrize(("name", "example"), examples(sorted(RESHAPES)))
def test_views_carry_open_cuts_both_ways(name: str, example: Example) -> None:
    """A cut that has no ranges yet: what the walk finds backward, the other direction gives back."""
    op = Call.of(name, example).op
    for dim, size in enumerate(op.outs[0].shape):
        out = Layout(tuple(((Factor(n, Open(0) if d == dim and size != 1 else None),),) for d, n in enumerate(op.outs[0].shape)))
        try:
            (want, *_) = backward(op, [out])
        except LayoutError:
            continue
        assert same(forward(op, [want])[0], out)


# --- what is known already -------------------------------------------------------------------------------------------


def said(op: Op) -> list[object]:
    """What the rules say of every way to cut one dimension of a result, or of an operand, in two."""
    found: list[object] = []
    for kinds, ask in ((op.outs, backward), (op.ins, forward)):
        wholes = [Layout(tuple(map(whole_dim, kind.shape))) for kind in kinds]
        for place, kind in enumerate(kinds):
            for dim, size in enumerate(kind.shape):
                dims = [*wholes[place].dims]
                dims[dim] = cut_dim(int(size))  # type: ignore[call-overload]
                try:
                    found.append(list(map(str, ask(op, [*wholes[:place], Layout(tuple(dims)), *wholes[place + 1 :]]))))
                except LayoutError as error:
                    found.append(str(error))
    return found


def test_what_is_known_of_one_call_is_what_would_be_said_of_another() -> None:
    """With all that the examples leave behind, every one of them is still answered as the first in a process."""
    ops = [Call.of(name, example).op for name, rows in {**EXAMPLES, **POINTWISE_SAMPLES}.items() for example in rows]
    fresh = []
    for op in ops:
        rules._known.clear()
        fresh.append(said(op))
    rules._known.clear()
    for turn in (ops, ops):
        assert [said(op) for op in turn] == fresh
    assert sum(any(isinstance(one, list) for one in found) for found in fresh) > len(ops) // 2


def test_calls_of_one_form_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    calls = {
        "first": (torch.ops.aten.softmax.int, (a, 1)),
        "alike": (torch.ops.aten.softmax.int, (b, 1)),
        "along another": (torch.ops.aten.softmax.int, (a, 0)),
        "one twice": (torch.ops.aten.add.Tensor, (a, a)),
        "two": (torch.ops.aten.add.Tensor, (a, b)),
        "two again": (torch.ops.aten.add.Tensor, (b, a)),
        "by name": (torch.ops.aten.add.Tensor, (b, a), {"alpha": 2}),
    }
    nodes = {name: graph.call_function(target, *given) for name, (target, *given) in calls.items()}  # type: ignore[arg-type]
    types = {node.name: TensorType(torch.float32, (4, 6)) for node in (a, b, *nodes.values())}
    worked: list[str] = []
    needed = rules._needed
    monkeypatch.setattr(rules, "_needed", lambda op, *rest: worked.append(op.node.name) or needed(op, *rest))
    rules._known.clear()
    out = Layout((cut_dim(4), whole_dim(6)))
    answers = {}
    for name, node in nodes.items():
        try:
            answers[name] = backward(view_op(node, types), [out])
        except LayoutError as error:
            answers[name] = str(error)
    assert worked == [nodes[name].name for name in ("first", "along another", "one twice", "two", "by name")]
    assert answers["first"] == answers["alike"] == [out] and "whole" in answers["along another"] and answers["two"] == [out, out]


def test_an_argument_without_a_hash_is_no_obstacle() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    node = graph.call_function(torch.ops.aten.softmax.int, (a, 1), {"dtype": bytearray(b"?")})  # type: ignore[dict-item]
    out = Layout((cut_dim(4), whole_dim(6)))
    assert backward(view_op(node, dict.fromkeys(("a", node.name), TensorType(torch.float32, (4, 6)))), [out]) == [out]
