"""Batches of characters from the text that ships with the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\ufffd"
"""Line feed, printable ASCII, and one for all others: 97."""


def text() -> str:
    return Path(__file__).with_name("text.txt").read_text(encoding="utf-8")


def encode(characters: str) -> Tensor:
    """Character numbers, int64[len(characters)]."""
    number = {character: place for place, character in enumerate(CHARACTERS)}
    return torch.tensor([number.get(character, len(CHARACTERS) - 1) for character in characters])


def batches(steps: int, rows: int, length: int, vocabulary: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """`steps` batches of `rows` random windows of the text, the same for the same seed; labels are the next characters.

    A model with fewer than 97 words sees characters modulo its vocabulary.
    """
    ids = encode(text()) % vocabulary
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - length, (rows,), generator=generator)
        windows = torch.stack([ids[start : start + length + 1] for start in starts.tolist()])
        yield {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}
