"""Everything that can be held against something real or exact, in one table.

    python -m experiments.validate [--out docs/validation.md]

Writes docs/validation.md with its figures and prints the table. Reads the folder of measured data that FLOWSIM_DATA
names (default `../shared/data`); without it, says which rows were skipped. Exit status: 0 if every stated tolerance
holds, 1 if one is exceeded. Two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import sensitivity, validate_flowprefill, validate_profiles, validate_theory
from experiments.headlines import headlines
from experiments.real_flowprefill import data_folder
from experiments.validate_flowprefill import FIGURE, show
from experiments.validation_report import Evidence, Row, render, table_rows

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "validation.md"
NEEDS_DATA = ("FlowPrefill run", "measured operators", "splitwise-sim", "DistServe")


def gather(data: Path, num_requests: int, images: Path) -> Evidence:
    """Runs everything and draws its figures into `images`; what lacks its data is named in `skipped`."""
    skipped: list[str] = []

    def with_data(name: str, run: Any) -> Any:
        try:
            return run(data)
        except FileNotFoundError:
            skipped.append(name)
            return None

    def real(folder: Path) -> dict[str, Any]:
        answer = validate_flowprefill.validate(folder)
        setup = validate_flowprefill.with_idle_overhead(answer["alone"]["excess_s"]["p50"])
        validate_flowprefill.draw(folder, images / FIGURE.name, setup)
        return answer

    jobs = (real, validate_profiles.sums, validate_profiles.splitwise, validate_profiles.distserve)
    run, sums, splitwise, distserve = (with_data(name, job) for name, job in zip(NEEDS_DATA, jobs, strict=True))
    base, swings = sensitivity.tornado(num_requests)
    sensitivity.draw(base, swings, images)
    return Evidence(
        run=run,
        sums=sums or [],
        splitwise=splitwise or [],
        distserve=distserve or [],
        stated=validate_profiles.stated(),
        held_out=validate_profiles.held_out(),
        headlines=headlines(num_requests),
        theory=validate_theory.theory(),
        reference=validate_theory.reference_executor(),
        events=validate_theory.events(),
        base=base,
        swings=swings,
        skipped=skipped,
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs it all, writes the document; answers the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the document, figures beside it in img/")
    parser.add_argument("--num-requests", type=int, default=sensitivity.NUM_REQUESTS, help="of goodput and sensitivity")
    options = parser.parse_args(arguments)
    images = options.out.parent / "img"
    images.mkdir(parents=True, exist_ok=True)
    evidence = gather(data_folder(), options.num_requests, images)
    rows = table_rows(evidence)
    options.out.write_text(render(evidence, rows), encoding="utf-8")
    header = ("what", "real or exact", "simulated", "off", "tolerance", "ok", "sample")
    show(Console(width=None if sys.stdout.isatty() else 200), "Validation", header, [row.cells() for row in rows])
    for name in evidence.skipped:
        print(f"skipped, no data: {name}. Set FLOWSIM_DATA to the folder of measured data.")
    return status(rows)


def status(rows: list[Row]) -> int:
    """1 if a stated tolerance is exceeded, else 0."""
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
