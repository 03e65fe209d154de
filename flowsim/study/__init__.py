"""Studies: many runs of variants of one configuration, as tables. `docs/studies.md` shows each."""

from flowsim.study.grid import sweep
from flowsim.study.paired import Comparison, compare
from flowsim.study.rates import Goodput, goodput
from flowsim.study.runs import StudyError, StudyWarning
from flowsim.study.scales import SLOScale, slo_scale

__all__ = [
    "Comparison",
    "Goodput",
    "SLOScale",
    "StudyError",
    "StudyWarning",
    "compare",
    "goodput",
    "slo_scale",
    "sweep",
]
