"""The parity checker: every rank of every stage and replica in one process, beside the untouched model."""

from tpcompile.simulate.compare import check, compare
from tpcompile.simulate.report import Divergence, Report, Tolerance

__all__ = ["Divergence", "Report", "Tolerance", "check", "compare"]
