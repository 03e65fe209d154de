"""What `task=` can do with a set-up. A task is called with the set-up, its report and the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flowsim.config import Setup
from flowsim.keep import need_all
from flowsim.metrics import Result
from flowsim.pool import HERE, Cluster
from flowsim.report.plots import NoReport, Report, draw_workload
from flowsim.report.terminal import RunProgress, class_table, header, interruptible
from flowsim.workload import describe, write_trace

__all__ = ["Export", "Simulate", "finished", "simulated"]


class Simulate:
    """`task=simulate`: one run, its result files, its report, and a table."""

    def __call__(self, setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> int:
        """Runs it; returns how many requests finished.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; what the run did until then is written, and marked as partial.
        """
        return finished(simulated(setup, title=title, report=report, folder=folder, quiet=quiet))


def simulated(setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> Result:
    """One run, its files and its report written, its table shown.

    Raises:
        ValueError: the report needs tables that the run would not keep.
        KeyboardInterrupt: Ctrl-C was pressed; what the run did until then is written, and marked as partial.
    """
    if not isinstance(report, NoReport):
        need_all(setup.keep, f"report={type(report).__name__.lower()}", " or report=none")
    capacity = capacity_words(Cluster.of(setup.cluster))
    with interruptible() as stop:
        if quiet:
            result = setup.run(stop=stop)
        else:
            shown = header(title, len(setup.requests), setup.offered_load(), capacity)
            Console(stderr=True, highlight=False).print(shown)
            with RunProgress(len(setup.requests)) as progress:
                result = setup.run(progress, stop)
    partial = result.run["partial"]
    if partial:
        title += f" (partial: stopped at {result.summary()['simulated_s']:.1f} s)"
    result.save(folder)
    report.write(result, folder, title)
    if not quiet:
        console = Console(markup=False)
        console.print(class_table(result, title))
        for line in notes(result.summary(), capacity):
            console.print(line, highlight=False)
        console.print(f"{'partial ' * partial}results in {folder}", highlight=False, soft_wrap=True)
    if partial:
        raise KeyboardInterrupt
    return result


def finished(result: Result) -> int:
    """How many requests finished."""
    count: int = result.summary()["finished"]
    return count


class Export:
    """`task=export`: the workload written as `trace.csv`, which replays it, and drawn as `workload.png`; no run."""

    def __call__(self, setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> int:
        """Writes them; returns how many requests there are."""
        if not isinstance(setup.requests, Sequence):
            raise ValueError("a closed loop has no arrivals before it runs; replay the requests.csv of a run instead")
        path = write_trace(setup.requests, folder / "trace.csv")
        draw_workload(setup.requests, folder / "workload.png", title.split(" on ", 1)[-1])
        if not quiet:
            console = Console(markup=False)
            console.print(describe(setup.requests), highlight=False, soft_wrap=True)
            console.print(f"trace in {path}", highlight=False, soft_wrap=True)
        return len(setup.requests)


def pool_notes(pools: dict[str, Any]) -> list[str]:
    """A line for each pool, where there is more than one."""
    lines = []
    for name, pool in pools.items():
        attained = "" if pool["attainment"] is None else f", attained {pool['attainment']:.2%}"
        gpus = f"{pool['instances']} x {pool['gpus'] // pool['instances']} {pool['gpu']}"
        sent = f", {pool['requests']} requests" if pool["requests"] else ""  # none to a pool that others hand over to
        lines.append(f"{name}: {gpus}{sent}{attained}, utilisation {pool['utilisation']:.1%}")
    return lines if len(pools) > 1 else []


def capacity_words(cluster: Cluster) -> str:
    """What the offered load, which is of prefills, is a share of."""
    if any(pool.decode == HERE for pool in cluster.pools.values()):
        return "capacity without decoding"
    names = [name for name in cluster.pools if name not in cluster.decoding]
    return f"the capacity of {' and '.join(names)}" if len(names) < len(cluster.pools) else "capacity"


def decode_notes(figures: dict[str, Any]) -> list[str]:
    """Of a run that decodes: times between tokens, what came out, and what KV memory cost."""
    decode, mean_s, p99_s = figures["decode"], figures["tbt_mean_s"], figures["tbt_p99_s"]
    if decode is None:
        return []
    attained = figures["tbt_attainment"]
    slo = "" if attained is None else f", TBT SLO attained {attained:.2%}, all SLOs {figures['joint_attainment']:.2%}"
    times = "no second token"
    if mean_s["mean"] is not None:
        times = f"TBT within a request: mean {mean_s['mean'] * 1e3:.1f} ms, p99 {p99_s['mean'] * 1e3:.1f} ms"
    lines = [f"{times}{slo}; {decode['output_tokens_per_s']:.0f} output tokens/s"]
    if decode["evictions"] or decode["cached_tokens"]:
        lines.append(
            f"KV memory: {decode['cached_tokens']} prompt tokens from the prefix cache, {decode['evictions']} "
            f"evictions, {decode['recomputed_tokens']} tokens recomputed"
        )
    return lines


def notes(figures: dict[str, Any], capacity: str) -> list[str]:
    """The run's other figures in a few lines, the ones to be warned about among them."""
    preemptions, batches = figures["preemptions"], figures["batches"]
    blocking_s = preemptions["blocking_s"]["mean"]
    load = "-" if figures["offered_load"] is None else f"{figures['offered_load']:.2f} of {capacity}"
    blocking = f" (mean blocking {blocking_s * 1e3:.2f} ms)" if blocking_s is not None else ""
    lines = [
        f"offered load {load}, utilisation {figures['utilisation']:.1%}",
        f"preemptions: {preemptions['count']}{blocking}, batches of two or more: {batches['multi']}",
    ]
    lines += pool_notes(figures["pools"])
    lines += decode_notes(figures)
    if figures["failures"]:
        failures = figures["failures"]
        lines.append(
            f"failures: {failures['count']}, down for {failures['down_s']:g} s in all; {failures['requeued']} requests "
            f"requeued, {failures['recomputed_tokens']} tokens recomputed"
        )
    if not figures["measured"]:
        lines.append("no request is left to measure: warmup_s and cooldown_s leave out all of them")
    warnings = {
        "impossible": "have an SLO under their TTFT on an idle instance",
        "rejected": "were rejected",
        "unfinished": "did not finish",
        "extrapolated": "are longer than the profile was measured for",
    }
    kinds = {"warmup": "in the warm-up", "cooldown": "in the cool-down", "after_horizon": "after the clock stopped"}
    left_out = [f"{count} {kinds[name]}" for name, count in figures["left_out"].items() if count]
    if left_out:
        lines.append("arrivals left out: " + ", ".join(left_out))
    return lines + [f"requests that {text}: {figures[key]}" for key, text in warnings.items() if figures[key]]
