"""The rules of operations whose dimensions depend on their arguments: each function computes the text of one, for one call."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

from tpcompile.factors import LayoutError
from tpcompile.operation import Op


def letters(op: Op, operand: int, *, never: Sequence[int] = (), drop: Sequence[int] = (), keep: bool = False) -> str:
    """Letters a, b, c … for an operand's dimensions, some marked `!`, some left out or of size one."""
    rank = op.rank(operand)
    marked, dropped = {d % rank for d in never} if rank else set(), {d % rank for d in drop} if rank else set()
    names = [("1" if keep else "") if d in dropped else string.ascii_letters[d] + ("!" if d in marked else "") for d in range(rank)]
    return " ".join(filter(None, names))


def last(names: str, count: int) -> str:
    """The last few of some letters: what is broadcast from the right."""
    return " ".join(names.split()[len(names.split()) - count :])


def along(op: Op, name: str = "dim", outputs: int = 1) -> str:
    """Works along dimensions, which stay whole; other operands are scalars."""
    text = letters(op, 0)
    others = ", *" * (len(op.ins) - 1)
    return f"{letters(op, 0, never=op.dims(name) or range(op.rank(0)))}{others} -> {', '.join([text] * outputs)}"


def reduced(op: Op, *, never: bool = False, outputs: int = 1) -> str:
    """Reduces dimensions: contracted, or needed whole."""
    dims = op.dims("dim")
    if op.argument("dim") == []:
        dims = list(range(op.rank(0)))
    out = letters(op, 0, drop=dims, keep=bool(op.argument("keepdim", False)))
    return f"{letters(op, 0, never=dims if never else ())} -> {', '.join([out] * outputs)}"


def unbound(op: Op) -> str:
    dims = op.dims("dim")
    return f"{letters(op, 0, never=dims)} -> {', '.join([letters(op, 0, drop=dims)] * len(op.outs))}"


def difference(op: Op) -> str:
    text = letters(op, 0, never=op.dims("dim"))
    return ", ".join([text] * len(op.ins)) + f" -> {letters(op, 0)}"


def permuted(op: Op, order: Sequence[int]) -> str:
    names = letters(op, 0).split()
    return f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"


def exchanged(op: Op, first: str = "dim0", second: str = "dim1") -> list[int]:
    order = list(range(op.rank(0)))
    a, b = op.dims(first)[0], op.dims(second)[0]
    order[a], order[b] = order[b], order[a]
    return order


def moved(op: Op) -> str:
    order = list(range(op.rank(0)))
    source, target = op.dims("source")[0], op.dims("destination")[0]
    order.insert(target, order.pop(source))
    return permuted(op, order)


def stacked(op: Op) -> str:
    dim = op.argument("dim", 0) % (op.rank(0) + 1)
    names = letters(op, 0).split()
    return f"{', '.join([' '.join(names)] * len(op.ins))} -> {' '.join([*names[:dim], 'Z!', *names[dim:]])}"


def normed(op: Op) -> str:
    """Norms over the last dimensions, which stay whole, with weight and bias of that shape."""
    count = len(op.argument("normalized_shape"))
    never = range(op.rank(0) - count, op.rank(0))
    text, names = letters(op, 0, never=never), letters(op, 0).split()
    return ", ".join([text, *[" ".join(f"{n}!" for n in names[-count:])] * (len(op.ins) - 1)]) + f" -> {' '.join(names)}"


def product_of_matrices(op: Op) -> str:
    """matmul with one or more dimensions on either side."""
    left, right = op.rank(0), op.rank(1)
    a = "k" if left == 1 else "... m k"
    b = "k" if right == 1 else ("k n" if right == 2 else "... k n")
    out = " ".join(filter(None, ["..." if max(left, right) > 2 else "", "m" if left > 1 else "", "n" if right > 1 else ""]))
    return f"{a if left > 2 or right > 2 or left == 1 else 'm k'}, {b} -> {out}"


def einsum(op: Op) -> str:
    equation = op.argument("equation").replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise LayoutError("an einsum without an arrow, or with an ellipsis")
    ins, out = equation.split("->")
    return ", ".join(" ".join(part) for part in ins.split(",")) + " -> " + " ".join(out)


def attention(op: Op) -> str:
    """Scaled dot-product attention over q [..., h, q, e], k [..., h, k, e], v [..., h, k, v] and a mask of any lower rank."""
    rank = op.rank(0)
    batch = string.ascii_lowercase[: max(rank - 3, 0)]
    head = ["h"] if rank > 2 else []
    shared = ["h~"] if rank > 2 else []
    query, key, value = [*batch, *head, "q!", "e!"], [*batch, *shared, "k!", "e!"], [*batch, *shared, "k!", "v"]
    texts = [query, key, value]
    if len(op.ins) > 3:
        texts.append([*batch, *head, "q!", "k!"][rank - op.rank(3) :])
    return ", ".join(" ".join(text) for text in texts) + " -> " + " ".join([*batch, *head, "q", "v"])


def repeated(op: Op) -> str:
    """Each index of a dimension several times in a row."""
    dim = op.dims("dim")[0]
    names = letters(op, 0).split()
    return f"{' '.join([*names[:dim], names[dim] + '~', *names[dim + 1 :]])} -> {' '.join(names)}"


def indexed(op: Op) -> str:
    """x[i, j, …]: the dimensions that are looked up stay whole; the look-ups' own dimensions are broadcast together."""
    listed = list(op.argument("indices"))
    looked = [d for d, index in enumerate(listed) if index is not None]
    names = letters(op, 0).split()
    if op.ins[1].dtype == torch.bool:
        first, chosen = masked(op)
        texts = [" ".join(f"{n}!" if n in chosen else n for n in names), " ".join(f"{n}!" for n in chosen)]
        return f"{', '.join(texts)} -> {' '.join([*names[:first], 'Y!', *names[first + len(chosen) :]])}"
    if looked != list(range(looked[0], looked[-1] + 1)):
        raise LayoutError("an index of dimensions that are not neighbours")
    width = max(len(kind.shape) for kind in op.ins[1:])
    places = [f"Y{n}" for n in range(width)]
    texts = [" ".join(f"{n}!" if d in looked else n for d, n in enumerate(names))]
    texts += [" ".join(places[width - len(kind.shape) :]) for kind in op.ins[1:]]
    return f"{', '.join(texts)} -> {' '.join([*names[: looked[0]], *places, *names[looked[-1] + 1 :]])}"


def masked(op: Op) -> tuple[int, list[str]]:
    """Of an index by one mask: the first dimension that it chooses from, and the letters of all of them."""
    looked = [d for d, index in enumerate(op.argument("indices")) if index is not None]
    if len(looked) != 1:
        raise LayoutError("an index by a mask and something else")
    first = looked[0]
    return first, letters(op, 0).split()[first : first + op.rank(1)]


def put(op: Op) -> str:
    """x[i, j, …] = values, or += values: what is looked up stays whole; by a mask, unless all that it chooses get the same."""
    looked = [d for d, index in enumerate(op.argument("indices")) if index is not None]
    names, indices, values = letters(op, 0).split(), op.ins[1:-1], op.ins[-1]
    if looked != list(range(looked[0], looked[-1] + 1)):
        raise LayoutError("an index of dimensions that are not neighbours")
    if indices[0].dtype == torch.bool:
        first, chosen = masked(op)
        places, after = ["Y!"], first + len(chosen)
    else:
        first, chosen, after = looked[0], names[looked[0] : looked[-1] + 1], looked[-1] + 1
        places = [f"Y{n}!" for n in range(max(len(kind.shape) for kind in indices))]
    given = [*names[:first], *places, *names[after:]]
    if len(values.shape) > len(given):
        raise LayoutError("more values than places")
    given = given[len(given) - len(values.shape) :]
    if indices[0].dtype == torch.bool:
        alike = all(size == 1 for letter, size in zip(given, values.shape, strict=True) if letter in places)
        texts = [" ".join(chosen if alike else [f"{n}!" for n in chosen])]
    else:
        alike, texts = False, [" ".join(places[len(places) - len(kind.shape) :]) for kind in indices]
    whole = [f"{n}!" if n in chosen and not alike else n for n in names]
    return f"{', '.join([' '.join(whole), *texts, ' '.join(given)])} -> {' '.join(whole)}"


def index_selected(op: Op) -> str:
    dim = op.dims("dim")[0]
    names = letters(op, 0).split()
    return f"{letters(op, 0, never=(dim,))}, Y -> {' '.join([*names[:dim], 'Y', *names[dim + 1 :]])}"


def gathered(op: Op, *, cut: bool = False) -> str:
    """Entries along one dimension, which stays whole unless a `cut` of it ends here."""
    dim = op.dims("dim")[0]
    index = " ".join("Y!" if d == dim else n for d, n in enumerate(letters(op, 0).split()))
    if any(a != b for d, (a, b) in enumerate(zip(op.ins[0].shape, op.ins[1].shape, strict=True)) if d != dim):
        raise LayoutError("a gather that shortens another dimension")
    return f"{letters(op, 0, never=() if cut else (dim,))}, {index} -> {index.replace('!', '')}"


def scattered(op: Op, *, cut: bool = False) -> str:
    """Writes along one dimension, at places that each line along it has of its own; where it is `cut`, at those that a rank holds."""
    dim = op.dims("dim")[0]
    if any(kind.shape[:dim] + kind.shape[dim + 1 :] != op.ins[0].shape[:dim] + op.ins[0].shape[dim + 1 :] for kind in op.ins[1:]):
        raise LayoutError("a scatter that shortens another dimension")
    texts = [" ".join(f"Y{i}!" if d == dim else n for d, n in enumerate(letters(op, 0).split())) for i in range(len(op.ins))]
    texts[0] = letters(op, 0) if cut else texts[0]
    return f"{', '.join(texts)} -> {texts[0]}"


def patched(op: Op) -> str:
    """Another value in place of a slice along one dimension."""
    dim, gone = op.dims("dim")[0], op.rank(1) < op.rank(0)
    names = letters(op, 0, never=(dim,)).split()
    patch = [("" if gone else "Z!") if d == dim else n for d, n in enumerate(names)]
    return f"{' '.join(names)}, {' '.join(filter(None, patch))} -> {' '.join(names)}"


def tiled(op: Op) -> str:
    """The whole tensor several times along some dimensions, which stay whole."""
    repeats = list(op.argument("repeats"))
    new = len(repeats) - op.rank(0)
    names = letters(op, 0, never=[d for d, times in enumerate(repeats[new:]) if times != 1]).split()
    outs = [f"Z{d}!" if n.endswith("!") else n for d, n in enumerate(names)]
    return f"{' '.join(names)} -> {' '.join([*(f'Y{d}!' for d in range(new)), *outs])}"


def scalar(op: Op) -> str:
    """One number from all elements."""
    return f"{letters(op, 0, never=range(op.rank(0)))} ->"


def batch_normed(op: Op) -> str:
    """Statistics of each channel over everything else."""
    names = letters(op, 0, never=[d for d in range(op.rank(0)) if d != 1])
    return ", ".join([names, *["b"] * (len(op.ins) - 1)]) + f" -> {names}"


def windowed(op: Op) -> str:
    """Windows along one dimension, as a new last one."""
    names = letters(op, 0, never=op.dims("dimension")).split()
    return f"{' '.join(names)} -> {' '.join('Y!' if n.endswith('!') else n for n in names)} Z!"


def padded(op: Op) -> str:
    """Longer at the ends of some dimensions, which stay whole. Amounts come in pairs, the last dimension's first."""
    amounts = list(op.argument("pad"))
    pairs = {op.rank(0) - 1 - place: amounts[2 * place : 2 * place + 2] for place in range(len(amounts) // 2)}
    changed = [dim for dim, pair in pairs.items() if pair != [0, 0]]
    return f"{letters(op, 0, never=changed)} -> {letters(op, 0, never=changed)}"


def resized(op: Op, spatial: int) -> str:
    """Pooled or resampled over the last few dimensions, everything before them by itself."""
    names = letters(op, 0, never=range(op.rank(0) - spatial, op.rank(0)))
    return f"{names} -> {', '.join([names] * len(op.outs))}"


def refolded(op: Op) -> str:
    """Windows of an image [c, h, w] as columns [c·window, places], or back: each channel by itself."""
    channels = letters(op, 0).split()[:-2]
    return f"{' '.join([*channels, 'X!', 'Y!'])} -> {' '.join([*channels, 'U!', 'V!'])}"


def transformed(op: Op) -> str:
    """Fourier transforms over one or more dimensions: those given, else as many from the end as there are sizes, else all."""
    sizes, given = op.argument("s"), op.argument("dim")
    last_ones = list(range(-len(sizes), 0)) if sizes and given is None else None
    dims = last_ones if last_ones is not None else op.dims("dim")
    return f"{letters(op, 0, never=dims)} -> {letters(op, 0)}"


def parted(op: Op) -> str:
    """Taken apart along one dimension, which stays whole: into parts whose sizes are not known."""
    dim = op.dims("dim")[0]
    names = letters(op, 0, never=(dim,)).split()
    outs = [" ".join(f"Y{i}!" if d == dim else n for d, n in enumerate(names)) for i in range(len(op.outs))]
    return f"{' '.join(names)} -> {', '.join(outs)}"


def convolution(op: Op, spatial: int) -> str:
    """x [b, c, …], weight [o, c, …]: channels in are contracted; in groups, x [b, g·c, …], weight [g·o, c, …], within each group."""
    places = " ".join(f"{n}!" for n in "xyz"[:spatial])
    window = " ".join(f"{n}!" for n in "uvw"[:spatial])
    group = "g " if op.argument("groups", 1) != 1 else ""
    bias = f", {group}o" if len(op.ins) > 2 else ""
    return f"b {group}c {places}, {group}o c {window}{bias} -> b {group}o {places}"


def elements(op: Op, *tails: str) -> str:
    """A loss for each element, broadcast together; `tails` are the letters of each operand behind the elements' own."""
    ends = [*tails, *[""] * (len(op.ins) - len(tails))]
    ranks = [op.rank(i) - len(end.split()) for i, end in enumerate(ends)]
    names = " ".join(string.ascii_lowercase[: max(ranks)])
    ins = [f"{last(names, rank)} {end}".strip() for rank, end in zip(ranks, ends, strict=True)]
    return f"{', '.join(ins)} -> {names}"


def cross_entropy(op: Op, *, cut: bool = False) -> str:
    """Scores [n, classes, …] and labels [n, …], or probabilities like the scores: a loss for each place, which rows may share out.

    Where a cut of the classes ends here, weights of classes are whole.
    """
    probabilities = op.ins[1].dtype.is_floating_point
    if op.rank(0) < 2 or op.rank(1) != op.rank(0) - (not probabilities):
        raise LayoutError("a cross-entropy of labels that are not one for each row of [rows, classes, …]")
    names = [letter for letter in letters(op, 0).split() if letter != "b"]
    scores = [names[0], "b" if cut else "b!", *names[1:]]
    weight = (", *" if cut else ", b!") * (len(op.ins) - 2)
    return f"{' '.join(scores)}, {' '.join(scores if probabilities else names)}{weight} -> {' '.join(names)}"


def loss(op: Op, text: str) -> str:
    """A loss function by its `reduction`: 0 gives what the text says; a mean or a sum needs all elements."""
    if op.argument("reduction", 1) == 0:
        return text
    ins, out = text.split("->")
    parts = [" ".join(f"{word}!" if word in out.split() else word for word in part.split()) for part in ins.split(",")]
    return f"{', '.join(parts)} ->"


def added_up(op: Op) -> str:
    """A loss of elements, by its `reduction`: a sum of all elements, whichever of them a rank has."""
    text = elements(op)
    return text if op.argument("reduction", 1) == 0 else f"{text.split('->')[0]}->"


def normalized(op: Op) -> str:
    """Along a dimension that may be cut: each element by what all of them add up to."""
    return f"{letters(op, 0)} -> {letters(op, 0)}"


def highest(op: Op) -> str:
    """The place of the largest element along a dimension of which each rank has a part."""
    if op.argument("dim") is None:
        raise LayoutError("a place among all elements")
    return reduced(op)


def looked_up(op: Op) -> str:
    """Rows of a table, of which each rank has some."""
    if op.argument("scale_grad_by_freq") or op.argument("sparse"):
        raise LayoutError("a look-up whose gradient is sparse or scaled by frequency")
    return "v h, ... -> ... h"


def created(op: Op) -> str:
    """A new tensor with nothing of its operand but type and device."""
    out = " ".join(f"Y{n}!" for n in range(len(op.outs[0].shape)))
    return ", ".join(["_"] * len(op.ins)) + f" -> {out}"
