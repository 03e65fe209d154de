"""Gates on policy metrics: a fixed suite of runs against a stored baseline.

From the command line `python -m flowsim.regress --baseline FILE`, from pytest `pytest --flowsim-baseline FILE`;
docs/regress.md describes the file.
"""

from flowsim.regress.baseline import Baseline, load, record
from flowsim.regress.compare import Move, Verdict, compare
from flowsim.regress.suite import Suite, measure

__all__ = ["Baseline", "Move", "Suite", "Verdict", "compare", "load", "measure", "record"]
