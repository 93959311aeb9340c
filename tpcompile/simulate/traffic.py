"""What the ranks of a lockstep run handed to each other, beside what the compiler's formulas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import sympy

from tpcompile.collectives.table import RANKS
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.messages import Sent
from tpcompile.simulate.wire import Total
from tpcompile.timeline import Posted

Key = tuple[int, str, str, str]


def promised(compilation: Compilation, sizes: Mapping[sympy.Symbol, int]) -> tuple[Total, ...]:
    """The calls of every place along the pipeline in a step, by the formulas at these sizes; receives are counted where they are sent.

    Left out is what no lockstep run does: the agreement of processes before a step.
    """
    counts, totals, open_sizes = Counter[Key](), Counter[Key](), set[Key]()
    known = {**sizes, RANKS: compilation.mesh.tp}
    for place in range(compilation.mesh.pp):
        for event in compilation.step.timeline(place):
            sent = event.transfers if isinstance(event, Posted) else (event,) if isinstance(event, Sent) else ()
            for call in sent:
                if call.call != "recv" and call.axis != "all":
                    key = place, call.axis, call.direction, call.call
                    counts[key] += 1
                    totals[key] += evaluate(call.bytes, known)
                    if not sympy.sympify(call.bytes).free_symbols <= known.keys():
                        open_sizes.add(key)
    return tuple(Total(*key, counts[key], None if key in open_sizes else totals[key]) for key in sorted(counts))


def differences(promised: Iterable[Total], moved: Iterable[Total]) -> tuple[str, ...]:
    """Where the two differ, in words; bytes, where the formulas know them.

    How gradients are divided into calls over dp is the engine's affair: there bytes count alone.
    """
    a, b = ({(t.stage, t.axis, t.direction, t.call): (t.count, t.bytes) for t in side} for side in (promised, moved))
    found = []
    for key in sorted(a.keys() | b.keys()):
        one, other = a.get(key, (0, 0)), b.get(key, (0, 0))
        if (one[1] is not None and one[1] != other[1]) or (one[0] != other[0] and key[1:3] != ("dp", "backward")):
            stage, axis, direction, call = key
            what = f"{call} over {axis}, {direction}, of stage {stage}"
            found.append(f"{what}: {other[0]} of {other[1]} bytes, where the formulas say {one[0]} of {one[1]}")
    return tuple(found)
