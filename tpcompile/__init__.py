"""tpcompile: one call from an unmodified PyTorch Transformer to tensor × pipeline × data parallel training.

compiled = tpcompile.compile(model, "dp=2,pp=2,tp=2", batch)     what every rank runs
compiled.emit("build/"); loaded = tpcompile.load("build/")        the same from disk, without the model
report = tpcompile.check(model, "dp=2,pp=2,tp=2", batch)         whether it computes the same numbers
"""

from tpcompile import testing
from tpcompile.errors import TpcompileError
from tpcompile.export.load import load
from tpcompile.mesh import Mesh
from tpcompile.runtime.compiled import compile
from tpcompile.runtime.initial import Initial
from tpcompile.runtime.launch import launch
from tpcompile.runtime.progress import progress
from tpcompile.simulate import check

__all__ = ["Initial", "Mesh", "TpcompileError", "check", "compile", "launch", "load", "progress", "testing"]
