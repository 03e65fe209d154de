"""What a person looks at: figures, tables, timelines and pages, made from a Result alone."""

from flowsim.report.full import Full
from flowsim.report.html import Html
from flowsim.report.plots import NoReport, Plots, Report
from flowsim.report.trace import Trace

__all__ = ["Full", "Html", "NoReport", "Plots", "Report", "Trace"]
