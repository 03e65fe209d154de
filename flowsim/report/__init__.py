"""What a person looks at: figures and tables, made from a Result alone."""

from flowsim.report.plots import NoReport, Plots

__all__ = ["NoReport", "Plots"]
