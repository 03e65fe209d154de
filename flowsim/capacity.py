"""`task=capacity`: how many instances of which GPU carry a workload within its SLOs, and what that costs.

Called as every task is (`flowsim.task`). It runs the set-up with other numbers of instances and other GPUs; it knows
no policy by name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowsim.config import Setup
from flowsim.latency import LatencyModel
from flowsim.metrics import Result
from flowsim.names import unknown
from flowsim.pool import Cluster
from flowsim.profile import load_profile
from flowsim.report.plots import Report

__all__ = ["Capacity", "Sized", "overall", "size", "worst_class"]

COUNTS = "instances"


@dataclass(frozen=True)
class Sized:
    """The fewest instances found on one kind of GPU; None where there are none, and `why` says why.

    `instances` is by pool, `gpus` those of all of them; `attainment` and `utilisation` are of that run,
    `one_fewer` the attainment of the best run with an instance less. `usd_per_million` requests is at the workload's
    rate, `usd_per_hour` of one GPU.
    """

    gpu: str
    tp: int
    instances: Mapping[str, int] | None
    gpus: int | None
    attainment: float | None
    one_fewer: float | None
    utilisation: float | None
    usd_per_hour: float | None
    usd_per_million: float | None
    runs: int
    why: str = ""


class Capacity:
    """Sizes a cluster for a workload: `capacity.csv`, `capacity.json` and a table.

    Every GPU serves the same requests with the same SLOs, those of the run's configuration. Of one pool the fewest
    instances are found by doubling and bisection, which takes it that more instances never attain less. Of several
    pools, all are doubled together until the SLOs are met, and then each is made as small as the others allow, in
    order: no pool of the answer can lose an instance, but another answer may be cheaper.

    Args:
        gpus: names as in `gpu=`, or mappings with `gpu` and `tp`; None: the run's. Pools with a `gpu` of their own
            keep it.
        attainment: the share of requests that must meet their SLO.
        per_class: whether each class must, rather than all together.
        most_instances: of a pool.
        prices: by GPU, mappings with `usd_per_hour`, `source` and `date`.

    Raises:
        ValueError: an argument out of its range, or of the wrong form.
    """

    def __init__(
        self,
        *,
        gpus: Sequence[str | Mapping[str, Any]] | None = None,
        attainment: float = 0.9,
        per_class: bool = False,
        most_instances: int = 64,
        prices: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if not 0.0 < attainment <= 1.0:
            raise ValueError(f"task.attainment is {attainment}; it must be above 0 and at most 1")
        if not isinstance(most_instances, int) or most_instances < 1:
            raise ValueError(f"task.most_instances is {most_instances!r}; it must be a whole number, at least 1")
        self.gpus = None if gpus is None else [_kind(one) for one in gpus]
        self.attainment = attainment
        self.share = worst_class if per_class else overall
        self.most_instances = most_instances
        self.prices = {str(gpu): _price(str(gpu), price) for gpu, price in (prices or {}).items()}

    def __call__(self, setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> int:
        """Runs it; returns for how many kinds of GPU there is an answer."""
        kinds = self.gpus or [(setup.latency.profile.gpu, None)]
        found = []
        for gpu, tp in kinds:
            profile = setup.latency.profile
            if gpu != profile.gpu:
                profile = load_profile(profile.model, gpu)
            try:
                on = replace(setup, latency=LatencyModel(profile, tp or setup.latency.tp))
                price = self.prices.get(profile.gpu)
                found.append(size(on, self.attainment, share=self.share, most=self.most_instances, price=price))
            except ValueError as error:
                found.append(nothing(profile.gpu, tp or setup.latency.tp, str(error)))
        self._write(found, folder)
        if not quiet:
            console = Console(markup=False)
            console.print(table(found, f"{title}: attainment {self.attainment:g}"))
            for line in remarks(found):
                console.print(line, highlight=False)
            console.print(f"results in {folder}", highlight=False, soft_wrap=True)
        return sum(one.instances is not None for one in found)

    def _write(self, found: Sequence[Sized], folder: Path) -> None:
        rows = [asdict(one) for one in found]
        prices = {gpu: {**price, "date": str(price["date"])} for gpu, price in self.prices.items()}
        content = {"attainment": self.attainment, "of": self.share.__name__, "found": rows, "prices": prices}
        (folder / "capacity.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        with (folder / "capacity.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {COUNTS: _counted(row[COUNTS])} for row in rows)


def overall(result: Result) -> float:
    """The share of all requests with an SLO that met it; where tokens are decoded, that met those of TTFT and TBT.

    Raises:
        ValueError: none has one.
    """
    summary = result.summary()
    share: float | None = summary["joint_attainment"]
    if share is None:
        share = summary["attainment"]
    if share is None:
        raise ValueError("no request has a TTFT SLO, so that any number of instances would do; see docs/workloads.md")
    return share


def worst_class(result: Result) -> float:
    """The smallest share of any class; the errors are those of `overall`."""
    summary = result.summary()
    decoded = summary["joint_attainment"] is not None
    shares: dict[str, float | None] = summary["joint_attainment_by_class" if decoded else "attainment_by_class"]
    return min([overall(result), *(share for share in shares.values() if share is not None)])


def size(
    setup: Setup,
    attainment: float,
    *,
    share: Callable[[Result], float] = overall,
    most: int = 64,
    price: Mapping[str, Any] | None = None,
) -> Sized:
    """The fewest instances of each pool with which a run's `share` is at least `attainment`.

    Args:
        setup: the run; its numbers of instances do not matter.
        attainment: of the requests, 0 to 1.
        share: what has to reach it.
        most: instances of a pool, at most.
        price: its `usd_per_hour` is of one GPU.

    Raises:
        ValueError: the model does not fit the GPUs, or no request has an SLO.
    """
    pools = Cluster.of(setup.cluster).pools
    runs: dict[tuple[int, ...], tuple[float, dict[str, Any]]] = {}

    def attained(counts: tuple[int, ...]) -> float:
        if counts not in runs:
            result: Result = replace(setup, cluster=_with(setup.cluster, counts)).run()
            runs[counts] = (share(result), result.summary())
        return runs[counts][0]

    counts = (1,) * len(pools)
    while attained(counts) < attainment and counts[0] < most:
        counts = (min(most, 2 * counts[0]),) * len(pools)
    gpu, tp = setup.latency.profile.gpu, setup.latency.tp
    if attained(counts) < attainment:
        return nothing(gpu, tp, f"{most} instances of each pool attain {attained(counts):.2%}", len(runs))
    for place in range(len(counts)):
        at = partial(_put, counts, place)
        counts = at(_fewest(lambda number, at=at: attained(at(number)) >= attainment, counts[place]))  # type: ignore[misc]
    fewer = [_put(counts, place, number - 1) for place, number in enumerate(counts) if number > 1]
    figure, summary = runs[counts]
    hourly = None if price is None else float(price["usd_per_hour"])
    rate_rps = summary["rate_rps"]
    cost = None if hourly is None or rate_rps is None else summary["gpus"] * hourly / 3600.0 * 1e6 / rate_rps
    return Sized(
        gpu=gpu,
        tp=tp,
        instances=dict(zip(pools, counts, strict=True)),
        gpus=summary["gpus"],
        attainment=figure,
        one_fewer=max(map(attained, fewer), default=None),
        utilisation=summary["utilisation"],
        usd_per_hour=hourly,
        usd_per_million=cost,
        runs=len(runs),
    )


def nothing(gpu: str, tp: int, why: str, runs: int = 0) -> Sized:
    """No answer for a kind of GPU."""
    return Sized(gpu, tp, None, None, None, None, None, None, None, runs, why)


def _fewest(does: Callable[[int], bool], known: int) -> int:
    """The smallest number that does, where `known` does and what is larger than one that does, does."""
    low, high = 0, known
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


def _put(counts: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*counts[:place], number, *counts[place + 1 :])


def _with(cluster: Any, counts: tuple[int, ...]) -> Any:
    """The cluster with so many instances in each of its pools."""
    if not isinstance(cluster, Cluster):
        return replace(cluster, instances=counts[0])
    pools = {
        name: replace(pool, instances=number)
        for (name, pool), number in zip(cluster.pools.items(), counts, strict=True)
    }
    return replace(cluster, pools=pools)


def _kind(given: str | Mapping[str, Any]) -> tuple[str, int | None]:
    """(gpu, tp) of one entry of `gpus`; tp None: the run's."""
    if not isinstance(given, Mapping):
        return str(given), None
    for key in given:
        if key not in ("gpu", "tp"):
            raise ValueError(unknown("key of task.gpus", str(key), ("gpu", "tp")))
    if "gpu" not in given:
        raise ValueError(f"task.gpus has {dict(given)}; an entry is a GPU's name, or has `gpu` and `tp`")
    return str(given["gpu"]), given.get("tp")


def _price(gpu: str, price: Mapping[str, Any]) -> Mapping[str, Any]:
    """A price, checked."""
    if not isinstance(price, Mapping) or {"usd_per_hour", "source", "date"} - set(price):
        raise ValueError(f"task.prices.{gpu} is {price!r}; it needs usd_per_hour, and its source and date")
    usd = price["usd_per_hour"]
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not usd > 0.0:
        raise ValueError(f"task.prices.{gpu}.usd_per_hour is {usd!r}; it must be a number above 0")
    return dict(price)


def table(found: Sequence[Sized], title: str) -> Table:
    """A row per kind of GPU, the cheapest first, those without an answer last."""
    drawn = Table(
        title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in ("GPU", "tp", "inst.", "GPUs", "attained", "1 fewer", "busy", "$/GPU-h", "$/million"):
        drawn.add_column(name, justify="left" if name == "GPU" else "right", no_wrap=True)
    for one in sorted(found, key=_dearness):
        counted = " + ".join(map(str, (one.instances or {}).values()))
        cells = [one.gpu, str(one.tp), counted or "none", _cell(one.gpus, "d")]
        cells += [_cell(share, ".2%") for share in (one.attainment, one.one_fewer, one.utilisation)]
        drawn.add_row(*map(Text, [*cells, _cell(one.usd_per_hour, ".2f"), _cell(one.usd_per_million, ".2f")]))
    return drawn


def remarks(found: Sequence[Sized]) -> list[str]:
    """What the table cannot say."""
    lines = [f"{one.gpu}: {one.why}" for one in found if one.instances is None]
    pools = next((list(one.instances) for one in found if one.instances is not None), [])
    if len(pools) > 1:
        lines.append(f"instances: {' + '.join(pools)}")
    unpriced = [one.gpu for one in found if one.instances is not None and one.usd_per_hour is None]
    if unpriced:
        lines.append(f"no price for {', '.join(unpriced)}: give task.prices.GPU (conf/task/capacity.yaml has the form)")
    return lines


def _dearness(one: Sized) -> tuple[bool, float, int]:
    cost = float("inf") if one.usd_per_million is None else one.usd_per_million
    return one.instances is None, cost, one.gpus or 0


def _counted(instances: Mapping[str, int] | None) -> str:
    """`3`, or `2 prefill, 4 decode`."""
    if instances is None:
        return ""
    if len(instances) == 1:
        return str(next(iter(instances.values())))
    return ", ".join(f"{number} {name}" for name, number in instances.items())


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
