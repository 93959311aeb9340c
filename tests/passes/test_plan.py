"""plan: which regions are cut and where, what is left whole and why, and what a user may say about it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_models import Rows, Tiny, before_and_after, captured, planned, program_of, reasons, region, tiny
from torch import Tensor, nn

from tpcompile.errors import InputError
from tpcompile.ir import Program
from tpcompile.passes.detect import detect
from tpcompile.passes.plan import even, plan, share


class Attention(Rows):
    """Query heads that share key/value heads."""

    def __init__(self, heads: int, groups: int, size: int = 2) -> None:
        super().__init__(
            q=nn.Linear(8, heads * size), k=nn.Linear(8, groups * size), v=nn.Linear(8, groups * size), o=nn.Linear(heads * size, 8)
        )
        self.size = size

    def body(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(Rows):
    def __init__(self, inner: int) -> None:
        super().__init__(up=nn.Linear(8, inner), down=nn.Linear(inner, 8))

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class LoRA(Rows):
    """A low-rank pair beside the query's projection."""

    def __init__(self) -> None:
        names = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 8), "a": (8, 3), "b": (3, 8)}
        super().__init__(**{name: nn.Linear(*sizes, bias=False) for name, sizes in names.items()})

    def body(self, x: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in (self.q(x) + self.b(self.a(x)), self.k(x), self.v(x)))
        return self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Forked(Rows):
    """One activation feeds two linears."""

    def body(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.left(y) + self.right(y)  # type: ignore[no-any-return]


class Chained(Rows):
    """Linears one after the other, with no norm between."""

    def body(self, x: Tensor) -> Tensor:
        return self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))  # type: ignore[no-any-return]


class Peeked(Rows):
    """The value between two linears is also used whole."""

    def body(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.down(y) + y.softmax(-1).sum()  # type: ignore[no-any-return]


def cuts(program: Program, parts: int, weight: str) -> str:
    """How one weight is cut, as text."""
    (only,) = planned(program, parts).regions
    return only.weights[weight].removeprefix("[").removesuffix(", 8]")


# --- golden ----------------------------------------------------------------------------------------------------------


def test_golden(golden: Callable[..., None]) -> None:
    program, _ = tiny()
    golden(before_and_after(lambda cones: plan(program, cones, "tp", 2, {}), detect(program)), "plan")


def test_one_rank_cuts_nothing() -> None:
    program, _ = tiny()
    found = planned(program, 1)
    assert found.regions == () and set(reasons(found).values()) == {"there is one rank on tp"}


FIFTY_TWO = "{0:7, 7:14, 14:21, 21:28, 28:34, 34:40, 40:46, 46:52}"

# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "groups", "parts", "queries", "keys"),
    [
        (14, 2, 4, "14@tp{0:4, 4:7, 7:11, 11:14}·2", "2@tp{0:1, 0:1, 1:2, 1:2}·2"),
        (32, 8, 3, "32@tp{0:12, 12:24, 24:32}·2", "8@tp{0:3, 3:6, 6:8}·2"),
        (28, 4, 8, "28@tp{0:4, 4:7, 7:11, 11:14, 14:18, 18:21, 21:25, 25:28}·2", "4@tp{0:1, 0:1, 1:2, 1:2, 2:3, 2:3, 3:4, 3:4}·2"),
        (4, 2, 3, "4@tp{0:1, 1:2, 2:4}·2", "2@tp{0:1, 0:1, 1:2}·2"),
        (52, 52, 8, f"52@tp{FIFTY_TWO}·2", f"52@tp{FIFTY_TWO}·2"),
        (8, 1, 2, "8@tp·2", "2"),
    ],
)  # fmt: skip
def test_heads_on_ranks(heads: int, groups: int, parts: int, queries: str, keys: str) -> None:
    program = program_of(Attention(heads, groups), 8)
    assert cuts(program, parts, "q.weight") == queries
    if "@" in keys:
        assert cuts(program, parts, "k.weight") == keys
    else:
        (only,) = planned(program, parts).regions
        assert only.weights.get("k.weight") in (None, "[1@tp{0:1, 0:1}·2, 8]")


@pytest.mark.parametrize(("heads", "parts"), [(3, 4), (2, 3), (7, 8)])
def test_fewer_heads_than_ranks_stay_whole(heads: int, parts: int) -> None:
    found = planned(program_of(Attention(heads, heads), 8), parts)
    assert found.regions == ()
    assert f"{heads} piece{'s' * (heads != 1)} cannot be shared by {parts} ranks" in reasons(found)["o"]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 8])
def test_every_rank_has_heads_and_none_much_more_than_its_share(groups: int, parts: int) -> None:
    for heads in (groups * step for step in range(1, 8)):
        if heads >= parts:
            ranges = share(heads, groups, parts)
            lengths = [stop - start for start, stop in ranges]
            assert [head for start, stop in ranges for head in range(start, stop)] == list(range(heads))
            assert min(lengths) >= 1
            if groups < parts:
                assert max(lengths) <= max(1.25 * -(-heads // parts), 1)


def test_even_parts() -> None:
    assert even(64, 3) == [(0, 22), (22, 43), (43, 64)]
    assert even(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


# --- MLPs and conflicts ----------------------------------------------------------------------------------------------


def test_an_mlp_of_64_on_three_ranks() -> None:
    program = program_of(MLP(64), 8)
    assert cuts(program, 3, "up.weight") == "64@tp{0:22, 22:43, 43:64}"


def test_a_low_rank_pair_beside_a_projection() -> None:
    """Attention keeps its query: the pair's first factor is whole, its second column-cut."""
    found = planned(program_of(LoRA(), 8), 2)
    attention = region(found, "attention")
    assert attention.weights.keys() == {"q.weight", "k.weight", "v.weight", "o.weight", "b.weight"}
    assert attention.weights["b.weight"] == "[4@tp·2, 3]"
    assert len(found.regions) == 1 and "a" in reasons(found)


def test_an_activation_that_feeds_two_rows() -> None:
    found = planned(program_of(Forked(up=nn.Linear(8, 10), left=nn.Linear(10, 8), right=nn.Linear(10, 8)), 8), 2)
    (only,) = found.regions
    assert set(only.rows) == {"linear_1", "linear_2"} and only.columns == ("linear",)


def test_chains_alternate() -> None:
    """A linear is one region's row or another's column, never both."""
    names = {"a": nn.Linear(8, 12), "b": nn.Linear(12, 8), "c": nn.Linear(8, 12), "d": nn.Linear(12, 8)}
    found = planned(program_of(Chained(**names), 8), 2)
    assert [(one.columns, tuple(one.rows)) for one in found.regions] == [(("linear",), ("linear_1",)), (("linear_2",), ("linear_3",))]
    assert len({one.name for one in found.regions}) == 2 and reasons(found) == {}


def test_a_value_that_is_also_used_whole() -> None:
    found = planned(program_of(Peeked(up=nn.Linear(8, 10), down=nn.Linear(10, 8)), 8), 2)
    assert found.regions == ()
    assert re.fullmatch(r"its value gelu is also used whole, by softmax at pass_models\.py:\d+", reasons(found)["down"])


def test_the_reason_names_the_operation_and_the_line() -> None:
    class Normed(Rows):
        def body(self, x: Tensor) -> Tensor:
            return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]

    found = planned(program_of(Normed(first=nn.Linear(8, 6), norm=nn.LayerNorm(6), second=nn.Linear(6, 8)), 8), 2)
    left = {one.name: one for one in found.whole}
    assert re.fullmatch(r"aten\.layer_norm\.default needs this dimension whole: layer_norm at pass_models\.py:\d+", left["second"].reason)
    assert left["second"].source is not None and left["second"].source.code == "return self.body(x).sum()"
    assert left["first"].reason.startswith("no linear before it")


# --- overrides -------------------------------------------------------------------------------------------------------


def batch() -> dict[str, Tensor]:
    return {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, 0]])}


def overridden(parts: int = 2, **wishes: str) -> tuple[set[str], dict[str, str]]:
    program = captured(Tiny(), batch())
    found = plan(program, detect(program), "tp", parts, {key.replace("__", "."): wish for key, wish in wishes.items()})
    return {one.name for one in found.regions}, reasons(found)


def test_regions_are_named_by_module() -> None:
    names, _ = overridden()
    assert names == {"layers.0", "layers.0.mlp", "vocabulary"}


def test_whole_by_override() -> None:
    names, left = overridden(layers__0__mlp="whole")
    assert names == {"layers.0", "vocabulary"}
    assert left["layers.0.down"] == 'overrides say "whole"'


def test_globs_match() -> None:
    program = captured(Tiny(layers=2), batch())
    found = plan(program, detect(program), "tp", 2, {"layers.*": "whole"})
    assert [one.name for one in found.regions] == ["vocabulary"]


@pytest.mark.parametrize(
    ("wish", "kind", "layout"), [("column", "column", "[7@tp{0:4, 4:7}, 6]"), ("row", "row", "[7, 6@tp]")]
)  # fmt: skip
def test_a_lone_linear_by_override(wish: str, kind: str, layout: str) -> None:
    program = captured(Tiny(), batch())
    found = plan(program, detect(program), "tp", 2, {"head": wish}, vocab_parallel=False)
    (head,) = (one for one in found.regions if one.name == "head")
    assert head.kind == kind and list(head.weights.values()) == [layout]


def message(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [line for line in str(error.value).splitlines() if not line.startswith("  from")]


def test_a_name_that_no_region_has() -> None:
    with pytest.raises(InputError) as error:
        overridden(layer__0="whole")
    assert message(error) == [
        "overrides name no region: 'layer.0'",
        "  at   compile(overrides=…)",
        "  fix  the regions are layers.0, layers.0.mlp, vocabulary",
    ]


def test_a_wish_that_is_none() -> None:
    with pytest.raises(InputError) as error:
        overridden(head="sideways")
    assert message(error) == [
        "overrides['head'] is 'sideways'",
        "  at   compile(overrides=…)",
        '  fix  use "whole", "cut", "column", "row" or "per micro-batch"',
    ]


def test_a_column_shorter_than_the_ranks() -> None:
    with pytest.raises(InputError, match=r"^7 cannot be cut in 8\n"):
        overridden(8, head="column")


@pytest.mark.parametrize("dropped", [True, False])
def test_dropout_that_keeps_a_projection_whole_is_the_reason(dropped: bool) -> None:
    """Keys with dropout of their own, of two heads for six of queries: every rank that held one would draw for itself."""

    class Shared(Rows):
        def body(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            k = F.dropout(self.k(h), 0.1) if dropped else self.k(h)
            q, k, v = (a.unflatten(-1, (-1, 4)).transpose(1, 2) for a in (self.q(h), k, self.v(h)))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return x + self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    sizes = {"q": nn.Linear(24, 24), "k": nn.Linear(24, 8), "v": nn.Linear(24, 8), "o": nn.Linear(24, 24)}
    found = planned(program_of(Shared(norm=nn.LayerNorm(24), **sizes), 24), 3)
    dropout = r"dropout of heads that several ranks may hold, each of which would draw for itself: dropout\w* at pass_models\.py:\d+"
    assert set(reasons(found)) == ({"k"} if dropped else set())
    assert not dropped or re.fullmatch(dropout, reasons(found)["k"])
