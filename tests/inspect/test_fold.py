"""Equal layers as one line."""

from __future__ import annotations

import pytest

from tpcompile.inspect.fold import fold, spell, split_layer

LAYERS = tuple(f"model.layers.{number}" for number in range(12))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["h.0"], "h.0"),
        (["h.0", "h.1", "h.2"], "h.0–2"),
        (["h.0", "h.2", "h.3", "h.7"], "h.0, 2–3, 7"),
        (["encoder.0", "encoder.1", "decoder.0", "decoder.1"], "encoder.0–1, decoder.0–1"),
        (["first", "second"], "first, second"),
        ([], ""),
    ],
)
def test_layers_are_spelled_as_ranges(names: list[str], text: str) -> None:
    assert spell(names) == text


def test_a_name_is_split_at_its_layer() -> None:
    assert split_layer("model.layers.1.mlp", LAYERS) == ("model.layers.1", "mlp")
    assert split_layer("model.layers.11", LAYERS) == ("model.layers.11", "")
    assert split_layer("model.norm", LAYERS) == ("", "model.norm")


def test_only_what_is_alike_is_folded() -> None:
    kinds = dict(zip(LAYERS, "aaba", strict=False))
    items = [*((f"{layer}.{part}", kind) for layer, kind in kinds.items() for part in ("attention", "mlp")), ("head", "a")]
    lines = [name for name, _ in fold(items, lambda item: item[0], lambda item: item[1], LAYERS)]
    assert lines == [
        "model.layers.0–1, 3.attention",
        "model.layers.0–1, 3.mlp",
        "model.layers.2.attention",
        "model.layers.2.mlp",
        "head",
    ]


def test_several_of_one_name_are_counted() -> None:
    items = ["h.0.mlp", "h.0.mlp", "h.1.mlp", "h.1.mlp", "head", "head"]
    assert [name for name, _ in fold(items, str, lambda _: 0, ["h.0", "h.1"])] == ["h.0–1.mlp ×4", "head ×2"]
