"""Why each missed request missed its TTFT SLO: where its slack went, and one cause for each miss.

Computed from a finished run's tables alone; what was predicted may be given beside them. A request arrives with a
slack, its SLO less its TTFT on an idle instance. Each second in which it makes no progress takes a second of it, and
when the slack is gone the miss is sealed: what happens later explains nothing. The parts of the slack add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowsim.core import Outcome, Reason
from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.report.story import Chronicle

__all__ = ["CAUSES", "LOST", "Miss", "explain", "misses_by_cause"]

LOST = (
    "blocked", "kv", "behind_earlier", "behind_lost", "behind_later", "behind_decodes", "preempted", "batched", "idle"
)  # fmt: skip
SAME_S = 1e-6
CAUSES = {
    "too_large": "more KV blocks than the instance has",
    "refused": "refused on arrival by the policy's admission",
    "abandoned": "the client gave up before its prefill started",
    "unfinished": "the run ended before its slack was gone",
    "hopeless": "its SLO is below its TTFT on an idle instance",
    "mispredicted": "late by no more than its prediction was short, or taken for hopeless on arrival when it was not",
    "blocked": "waited for a flagged batch to come to its next stop",
    "kv": "waited while its KV blocks were not free",
    "behind_earlier": "waited for requests due before it that were on time: overload",
    "behind_lost": "waited for requests due before it that were late all the same: work in vain",
    "behind_later": "waited for requests due after it, or without an SLO: head-of-line blocking, or given up",
    "behind_decodes": "waited while sequences decoded and no prompt ran",
    "preempted": "suspended for others",
    "batched": "its own batch took longer than it alone would have",
    "idle": "nothing ran: a poll was awaited, or a switch or barrier took the time",
}
"""Each cause and what it says; a miss has exactly one."""

TURNED_AWAY = {
    Reason.TOO_LARGE.value: "too_large",
    Reason.ADMISSION.value: "refused",
    Reason.ABANDONED.value: "abandoned",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """One missed request. `slack_s` is what it had on arrival (negative: hopeless), `late_s` by how much it missed (NaN
    without a first token), `lost_s` where the slack went, by the causes in `LOST`."""

    request: int
    slo_class: str
    cause: str
    slack_s: float
    late_s: float
    lost_s: dict[str, float]


def explain(result: Result, predicted_s: Callable[[int], float] | None = None) -> list[Miss]:
    """Every measured request that missed its TTFT SLO, in order of arrival, with its cause.

    Args:
        result: a finished run; `Result.load(folder)` will do.
        predicted_s: what the policy believed that a prompt of so many tokens takes alone, to its first token; without
            it no miss is `mispredicted`.
    """
    requests = result.tables["requests"]
    missed = np.flatnonzero((requests["met_slo"] == False) & requests["measured"])  # noqa: E712 (None is neither)
    ledger = _Ledger(result)
    return [_miss(row, requests, ledger, predicted_s) for row in missed.tolist()]


def misses_by_cause(misses: Sequence[Miss]) -> dict[str, dict[str, int]]:
    """Misses counted by cause, then class; the causes that occur, most misses first. They add up to all misses."""
    totals = Counter(miss.cause for miss in misses)
    return {
        cause: dict(sorted(Counter(miss.slo_class for miss in misses if miss.cause == cause).items()))
        for cause, _ in totals.most_common()
    }


def _miss(row: int, requests: Columns, ledger: _Ledger, predicted_s: Callable[[int], float] | None) -> Miss:
    slo_s, isolated_s = float(requests["ttft_slo_s"][row]), float(requests["isolated_s"][row])
    slack_s, late_s = slo_s - isolated_s, float(requests["ttft_s"][row]) - slo_s
    lost_s = ledger.lost_s(row, max(0.0, slack_s))
    cause = _outright(row, requests, slack_s)
    if cause is None and predicted_s is not None:
        believed_s = predicted_s(int(requests["prompt_tokens"][row]))
        if late_s <= isolated_s - believed_s or slo_s <= believed_s:
            cause = "mispredicted"
    if cause is None:
        cut = requests["outcome"][row] == Outcome.UNFINISHED.value and sum(lost_s.values()) < slack_s - SAME_S
        cause = "unfinished" if cut else max(LOST, key=lambda name: lost_s[name])
    return Miss(row, str(requests["slo_class"][row]), cause, slack_s, late_s, lost_s)


def _outright(row: int, requests: Columns, slack_s: float) -> str | None:
    """The cause of a request that was turned away, or never had a chance."""
    if requests["outcome"][row] == Outcome.REJECTED.value:
        return TURNED_AWAY[requests["reason"][row]]
    if slack_s < 0.0:
        return "hopeless"
    return None


class _Ledger:
    """Where the slack of a request went."""

    def __init__(self, result: Result) -> None:
        self._chronicle = Chronicle(result)
        self._requests = requests = result.tables["requests"]
        self._due_s = requests["arrival_s"] + requests["ttft_slo_s"]
        self._met = requests["met_slo"] == True  # noqa: E712 (None is neither)
        self._kv = _FreeBlocks(result)
        flags = result.tables["preemptions"]
        order = np.argsort(flags["by"], kind="stable")
        self._by, self._flagged_s, self._stopped_s = (flags[name][order] for name in ("by", "flagged_s", "stopped_s"))

    def lost_s(self, row: int, slack_s: float) -> dict[str, float]:
        """Seconds by the names in `LOST`; they sum to the slack of a request that is late."""
        lost = dict.fromkeys(LOST, 0.0)
        left_s = slack_s
        for spell in self._chronicle.story(row).spells:
            if spell.state == "running" or left_s <= 0.0:
                continue
            end_s = min(spell.end_s, spell.start_s + left_s)
            left_s -= end_s - spell.start_s
            if spell.state == "suspended":
                lost["preempted"] += end_s - spell.start_s
            else:
                self._waited(row, spell.instance, spell.start_s, end_s, lost)
        if self._requests["outcome"][row] == Outcome.FINISHED.value:
            lost["batched"] = max(0.0, left_s)
        return lost

    def _waited(self, row: int, instance: int | None, start_s: float, end_s: float, lost: dict[str, float]) -> None:
        """A stretch of waiting at an instance, by what kept it: a flag raised for it, KV, or whom the GPU served."""
        at_s = start_s
        for name, from_s, to_s in self._kept(row, instance, start_s, end_s):
            self._served(row, instance, at_s, from_s, lost)
            lost[name] += to_s - from_s
            at_s = to_s
        self._served(row, instance, at_s, end_s, lost)

    def _kept(self, row: int, instance: int | None, start_s: float, end_s: float) -> Iterator[tuple[str, float, float]]:
        """When it waited for an acknowledgement or for KV blocks, in order and apart from one another."""
        low, high = np.searchsorted(self._by, [row, row + 1])
        spans = [("blocked", f, s) for f, s in zip(self._flagged_s[low:high], self._stopped_s[low:high], strict=True)]
        spans += [("kv", f, s) for f, s in self._kv.short(row, instance, start_s, end_s)]
        at_s = start_s
        for name, from_s, to_s in sorted(spans, key=lambda span: span[1]):
            from_s, to_s = max(at_s, float(from_s)), min(end_s, float(to_s))
            if to_s > from_s:
                yield name, from_s, to_s
                at_s = to_s

    def _served(self, row: int, instance: int | None, start_s: float, end_s: float, lost: dict[str, float]) -> None:
        if end_s <= start_s or instance is None:
            return
        idle_s = end_s - start_s
        for other in self._chronicle.served(int(instance), start_s, end_s):
            if other.request is None:
                name = "behind_decodes"
            elif self._due_s[other.request] > self._due_s[row]:
                name = "behind_later"
            else:
                name = "behind_earlier" if self._met[other.request] else "behind_lost"
            lost[name] += other.seconds
            idle_s -= other.seconds
        lost["idle"] += max(0.0, idle_s)


class _FreeBlocks:
    """When an instance had fewer KV blocks free than a request needs."""

    def __init__(self, result: Result) -> None:
        kv = result.tables["kv"]
        self._requests = result.tables["requests"]
        self._block_tokens = {
            instance: pool["block_tokens"]
            for pool in result.run["pools"].values()
            for instance in range(pool["instances"][0], pool["instances"][1] + 1)
        }
        self._free = {
            instance: (kv["t_s"][rows], kv["free_blocks"][rows])
            for instance in range(result.run["instances"])
            for rows in [kv["instance"] == instance]
        }

    def short(self, row: int, instance: int | None, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Stretches within a time, in order."""
        if instance is None:
            return
        t_s, free = self._free[int(instance)]
        needed = -(-int(self._requests["prompt_tokens"][row]) // self._block_tokens[int(instance)])
        low = max(0, int(np.searchsorted(t_s, start_s, side="right")) - 1)
        high = int(np.searchsorted(t_s, end_s, side="left"))
        for place in (low + np.flatnonzero(free[low:high] < needed)).tolist():
            until_s = float(t_s[place + 1]) if place + 1 < len(t_s) else end_s
            yield max(start_s, float(t_s[place])), min(end_s, until_s)
