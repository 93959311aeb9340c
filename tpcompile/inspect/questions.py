"""The four questions to ask before choosing tensor parallelism, answered for one compiled model.

does it fit one device?      what one device would hold, and what a rank does
are there enough devices?    how many this mesh needs, and which meshes would fit
does the structure cut?      what is cut in how many pieces, how evenly, and what is not
does communication pay?      what a rank sends in a step over each axis, and how much it computes for a byte
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tpcompile.driver import Compilation
from tpcompile.inspect.fold import fold
from tpcompile.inspect.load import Load
from tpcompile.inspect.memory import SIZES, spelled
from tpcompile.ir import Program
from tpcompile.layout import Cut, Even, Layout, TensorType, cut_factors, local_size, product

UNITS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1, "FLOP"))
KINDS = {"attention": "heads", "mlp": "columns of MLPs", "vocabulary": "words"}
"""What is counted where a region of a kind is cut; columns of others."""
MOST, REASON = 0.9, 64
"""The share of parameters that is a good part of them, and characters of a reason."""


def answers(compilation: Compilation, load: Load, device: int, per_node: int) -> Iterator[tuple[str, str, bool | None]]:
    """Each question with its answer, and whether that is good news, bad news or just news (None). `device` is a device's bytes."""
    yield "does it fit one device?", _one_device(compilation, load, device), None
    yield "are there enough devices?", *_devices(compilation, load, device, per_node)
    yield "does the structure cut?", *_structure(compilation)
    yield "does communication pay?", _communication(compilation, load), None


def _one_device(compilation: Compilation, load: Load, device: int) -> str:
    whole, total = load.whole, load.whole.between + load.alone.bytes
    none = " (without activations)" if load.unknown else ""
    text = f"{'yes' if total <= device else 'no'}, of {spelled(device)}: one device needs {spelled(total)}{none} = "
    text += _sum(total, parameters=whole.parameters, gradients=whole.gradients, moments=whole.optimizer, activations=load.alone.bytes)
    if compilation.mesh.size > 1:
        most, held = load.most, load.most.state
        more = held.gathered + held.unreduced
        text += f"; a rank {spelled(most.most)} = "
        text += _sum(most.most, held.parameters, held.gradients, held.optimizer, in_a_step=more, activations=most.activations)
    return text


def _sum(total: int, *plain: int, **named: int) -> str:
    """parameters 47 + gradients 47 + …, in the unit in which the total is spelled."""
    unit = next(size for size, _ in SIZES if total >= size or size == 1)
    parts = [("", size) for size in plain] + [(word.replace("_", " ") + " ", size) for word, size in named.items() if size]
    return " + ".join(f"{word}{size / unit:.3g}" for word, size in parts)


def _devices(compilation: Compilation, load: Load, device: int, per_node: int) -> tuple[str, bool]:
    mesh, fits = compilation.mesh, load.most.most <= device
    count = f"{mesh.size} devices" if mesh.size > 1 else "one device"
    text = f"this mesh takes {count} and {'fits' if fits else 'does NOT fit'} {spelled(device)} on each"
    if load.unknown:
        return f"{text}, activations left out: {load.unknown}", fits
    found = load.fitting(device, per_node)[:3]
    if found:
        others = "; ".join(f"{other} on {other.size}" for other in found)
        return f"{text}; the smallest that fit, estimated for the same batch: {others}", fits
    return f'{text}; no mesh is estimated to: try data_parallel="zero3", recompute="full", more replicas or micro-batches', fits


def _structure(compilation: Compilation) -> tuple[str, bool | None]:
    program, tp = compilation.program, compilation.mesh.tp
    total = sum(_elements(program, name) for name in program.parameters)
    if tp == 1:
        return f"one tensor rank: all of {_count(total)} parameters are whole; compile with tp=2 or more to see what it would cut", None
    layouts = compilation.local.layouts
    cut = {name: layout for name in program.parameters if isinstance(layout := layouts.get(name), Layout) and layout.is_cut}
    share = sum(_elements(program, name) for name in cut) / max(total, 1)
    what = ", ".join(_counted(compilation))
    part = ">99.99%" if 0.9999 < share < 1 else f"{share:.2%}"
    text = f"{part} of {_count(total)} parameters" + (f", by {what}" if what else "") + _uneven(compilation, cut)
    left = compilation.plan.whole
    if not left:
        return f"{text}; no linear and no table is whole", share > MOST
    name, first = fold(left, lambda one: one.name, lambda one: one.reason, program.layers)[0]
    more = f"; {len(left) - 1} more below" if len(left) > 1 else ""
    return f"{text}. Whole: {name}, {first.reason[:REASON]}{'…' if len(first.reason) > REASON else ''}{more}", share > MOST


def _counted(compilation: Compilation) -> Iterator[str]:
    """128 and 8 heads, 53248 columns of MLPs"""
    layouts, places = compilation.local.layouts, {name: place for place, name in compilation.program.parameters.items()}
    sizes: dict[str, dict[int, None]] = defaultdict(dict)
    for region in compilation.plan.regions:
        for name in region.weights:
            layout = layouts.get(places[name])
            for dim in layout.dims if isinstance(layout, Layout) else ():
                sizes[KINDS.get(region.kind, "columns")] |= {int(f.size): None for f in cut_factors(dim) if isinstance(f.size, int)}
    for word, found in sizes.items():
        yield f"{' and '.join(map(str, sorted(found, reverse=True)[:3]))} {word}"


def _uneven(compilation: Compilation, cut: dict[str, Layout]) -> str:
    """How much more than the mean the largest tensor rank holds of what is cut."""
    tp = compilation.mesh.tp
    held = [sum(int(product(local_size(dim, place) for dim in layout.dims)) for layout in cut.values()) for place in range(tp)]
    over = max(held) * tp / max(sum(held), 1) - 1
    shared = any(isinstance(f.cut, Cut) and f.cut.overlaps for layout in cut.values() for dim in layout.dims for f in cut_factors(dim))
    even = not any(isinstance(f.cut, Even) for layout in cut.values() for dim in layout.dims for f in cut_factors(dim))
    words = [f"the largest rank {over:.1%} over the mean"] if over > 5e-4 and even else []
    words += ["some on several ranks"] if shared else []
    return "".join(f"; {word}" for word in words)


def _communication(compilation: Compilation, load: Load) -> str:
    mesh = compilation.mesh
    if mesh.size == 1:
        return f"nothing is sent; a step computes {flop(load.flops)}"
    sent = {axis: size for axis, size in load.sent.items() if axis != "all" and size}
    listed = ", ".join(f"{spelled(size)} over {axis}" for axis, size in sent.items()) or "next to nothing"
    if load.unknown or not load.flops:
        return f"a rank sends in a step {listed}"
    text = f"a rank computes {flop(load.flops)} in a step and sends {listed}"
    if sent:
        text += f": {' / '.join(_short(load.flops / size) for size in sent.values())} FLOPs a byte"
        text += "; it pays for devices that do fewer in a byte's time"
    return text


def flop(count: float) -> str:
    """1.27 PFLOP."""
    size, name = next(((size, name) for size, name in UNITS if count >= size), UNITS[-1])
    return f"{count / size:.3g} {name}"


def _count(elements: int) -> str:
    """405.9 B"""
    for size, name in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if elements >= size:
            return f"{elements / size:.4g}{name}"
    return str(elements)


def _short(number: float) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _elements(program: Program, placeholder: str) -> int:
    kind = program.types[placeholder]
    return int(product(kind.shape)) if isinstance(kind, TensorType) else 0
