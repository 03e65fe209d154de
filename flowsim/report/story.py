"""What became of single requests: behind whom they waited, who paused them, and for how long.

Computed from a run's tables alone; it knows no policy, and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome, Reason
from flowsim.log import Columns, Ended
from flowsim.metrics import Result
from flowsim.report.series import heads, last_s, members

__all__ = ["Behind", "Chronicle", "Spell", "Story", "tell", "worst"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Behind:
    """What the GPU did meanwhile: `seconds` for batches with `request` at their head, of at most `members` requests.

    `request` is None for steps in which sequences decoded and no prompt was computed.
    """

    request: int | None
    seconds: float
    members: int = 1


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of one request's prefill: it was `waiting`, `running` or `suspended`.

    `behind` is whom the GPU served meanwhile, longest first; what is left of the stretch it idled, switched, or was at
    a barrier. `by` is whom a suspended batch was flagged for; `instance` is where a waiting one waited.
    """

    state: str
    start_s: float
    end_s: float
    behind: tuple[Behind, ...] = ()
    by: int | None = None
    instance: int | None = None

    @property
    def length_s(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Story:
    """One request's prefill as spells that lie end to end from its arrival to the end of its prefill.

    For a request that never got there they end when it was given up, or with the run. One that was refused on arrival
    has none.
    """

    request: int
    spells: tuple[Spell, ...]

    def seconds(self, state: str) -> float:
        """The time spent in a state."""
        return sum(spell.length_s for spell in self.spells if spell.state == state)

    def behind(self, state: str) -> tuple[Behind, ...]:
        """Whom the GPU served while the request was in a state, longest first; its spells added up."""
        return _longest_first(one for spell in self.spells if spell.state == state for one in spell.behind)

    def paused_by(self) -> tuple[Behind, ...]:
        """For whom the request's batches were paused, and for how long they then stayed suspended; longest first."""
        pauses = [spell for spell in self.spells if spell.by is not None]
        return _longest_first(Behind(spell.by, spell.length_s) for spell in pauses if spell.by is not None)


class Chronicle:
    """The stories of one run. Finding a story takes a few bisections, and time for the segments it spans."""

    def __init__(self, result: Result) -> None:
        self.requests = result.tables["requests"]
        self._tables = result.tables

    def story(self, request: int) -> Story:
        """What became of one request.

        Raises:
            ValueError: the run has no request of that id.
        """
        if not 0 <= request < len(self.requests["id"]):
            raise ValueError(
                f"request {request} is not in the run; it has requests 0 to {len(self.requests['id']) - 1}"
            )
        spells: list[Spell] = []
        at_s = float(self.requests["arrival_s"][request])
        rows = [row for batch in self._batches_of(request) for row in self._segments_of(batch)]
        for row in rows:
            start_s, end_s = float(self._segments["start_s"][row]), float(self._segments["end_s"][row])
            if start_s >= self.requests["first_token_s"][request]:
                break  # computed again, after an eviction
            if start_s > at_s:
                spells += self._idle_spells(request, row, at_s, start_s, resumed=self._segments["first_op"][row] > 0)
            spells.append(Spell("running", start_s, end_s))
            at_s = end_s
        until_s = self._gave_up_s(request)
        if until_s > at_s and rows:
            spells += self._idle_spells(request, rows[-1], at_s, until_s, resumed=self._is_paused(rows[-1]))
        elif until_s > at_s:
            spells += self._waits(request, self.requests["prefill_instance"][request], at_s, until_s)
        return Story(request, tuple(spells))

    def served(self, instance: int, start_s: float, end_s: float) -> tuple[Behind, ...]:
        """Whom an instance's GPU served in a stretch of time, longest first; switches and barriers included."""
        return self._served(instance, start_s, end_s, -1)

    def _idle_spells(self, request: int, row: int, start_s: float, end_s: float, *, resumed: bool) -> list[Spell]:
        """The stretch before (or, at the end of the run, behind) a segment of the request."""
        batch, instance = int(self._segments["batch"][row]), int(self._segments["instance"][row])
        if resumed:
            behind = self._served(instance, start_s, end_s, batch)
            return [Spell("suspended", start_s, end_s, behind, self._flagged_for(batch, start_s))]
        return self._waits(request, instance, start_s, end_s, batch)

    def _waits(
        self, request: int, instance: int | None, start_s: float, end_s: float, but_batch: int = -1
    ) -> list[Spell]:
        """A stretch of waiting that ended at an instance, cut where the request moved from one to another."""
        spells = []
        for source, at_s in self._moves.get(request, ()):
            if start_s < at_s <= end_s:
                behind = self._served(source, start_s, at_s, but_batch)
                spells.append(Spell("waiting", start_s, at_s, behind, instance=source))
                start_s = at_s
        if end_s > start_s:
            behind = () if instance is None else self._served(int(instance), start_s, end_s, but_batch)
            spells.append(Spell("waiting", start_s, end_s, behind, instance=instance))
        return spells

    def _served(self, instance: int, start_s: float, end_s: float, but_batch: int) -> tuple[Behind, ...]:
        low, high = np.searchsorted(self._segments["instance"], [instance, instance + 1])
        begin_s, stop_s = self._busy
        first = low + int(np.searchsorted(stop_s[low:high], start_s, side="right"))
        last = low + int(np.searchsorted(begin_s[low:high], end_s, side="left"))
        shares_s = np.minimum(stop_s[first:last], end_s) - np.maximum(begin_s[first:last], start_s)
        batches = self._segments["batch"][first:last].tolist()
        return _longest_first(
            Behind(int(self._heads[batch]) if self._heads[batch] >= 0 else None, share_s, int(self._members[batch]))
            for batch, share_s in zip(batches, shares_s.tolist(), strict=True)
            if batch != but_batch and share_s > 0.0
        )

    def _gave_up_s(self, request: int) -> float:
        """Until when a request that did not finish was still there; -inf for the others."""
        outcome, reason = self.requests["outcome"][request], self.requests["reason"][request]
        if outcome == Outcome.UNFINISHED.value:
            return self._end_s
        if reason == Reason.ABANDONED.value:
            return float(self.requests["arrival_s"][request] + self.requests["abandon_s"][request])
        return -np.inf

    def _is_paused(self, row: int) -> bool:
        return bool(self._segments["ended"][row] == Ended.PAUSED.value)

    def _flagged_for(self, batch: int, stopped_s: float) -> int | None:
        """For whom a batch was flagged that stopped at a time, barrier not included."""
        low, high = np.searchsorted(self._flags["batch"], [batch, batch + 1])
        place = low + int(np.searchsorted(self._flags["stopped_s"][low:high], stopped_s - 1e-9))
        return int(self._flags["by"][place]) if place < high else None

    def _batches_of(self, request: int) -> list[int]:
        low, high = np.searchsorted(self._parts["request"], [request, request + 1])
        numbers: list[int] = self._parts["batch"][low:high].tolist()
        return numbers

    def _segments_of(self, batch: int) -> list[int]:
        order, batches = self._by_batch
        low, high = np.searchsorted(batches, [batch, batch + 1])
        rows: list[int] = order[low:high].tolist()
        return rows

    @cached_property
    def _segments(self) -> Columns:
        """All segments by instance, then time."""
        table = self._tables["segments"]
        return _ordered(table, table["start_s"], table["instance"])

    @cached_property
    def _busy(self) -> tuple[Array, Array]:
        """When each segment took the GPU and when it gave it back."""
        segments = self._segments
        return segments["start_s"] - segments["switch_s"], segments["end_s"] + segments["barrier_s"]

    @cached_property
    def _by_batch(self) -> tuple[Array, Array]:
        """Rows of `_segments` by batch, then time; and their batches."""
        order = np.lexsort((self._segments["start_s"], self._segments["batch"]))
        return order, self._segments["batch"][order]

    @cached_property
    def _parts(self) -> Columns:
        table = self._tables["batches"]
        return _ordered(table, table["batch"], table["request"])

    @cached_property
    def _flags(self) -> Columns:
        table = self._tables["preemptions"]
        return _ordered(table, table["stopped_s"], table["batch"])

    @cached_property
    def _moves(self) -> dict[int, list[tuple[int, float]]]:
        """Of requests that moved before they started: the instances that they left, and when."""
        found: dict[int, list[tuple[int, float]]] = {}
        if "migrations" in self._tables:
            names = ("request", "source", "at_s")
            rows = zip(*(self._tables["migrations"][name].tolist() for name in names), strict=True)
            for request, source, at_s in rows:
                found.setdefault(request, []).append((source, at_s))
        return found

    @cached_property
    def _members(self) -> Array:
        return members(self._tables)

    @cached_property
    def _heads(self) -> Array:
        return heads(self._tables)

    @cached_property
    def _end_s(self) -> float:
        return last_s(self._tables)


def worst(requests: Columns, count: int = 10) -> list[tuple[int, float]]:
    """The requests that fared worst, worst first: (id, how many times its SLO the TTFT was).

    Where no request has an SLO: how many times the TTFT on an idle instance it was. Requests that were rejected are
    left out, and unfinished ones too, as their TTFT is not known.
    """
    allowed_s = requests["ttft_slo_s"] if np.isfinite(requests["ttft_slo_s"]).any() else requests["isolated_s"]
    ratio = requests["ttft_s"] / allowed_s
    known = np.flatnonzero(~np.isnan(ratio) & np.isfinite(allowed_s) & requests["measured"])
    order = known[np.argsort(-ratio[known], kind="stable")][:count]
    return [(int(requests["id"][row]), float(ratio[row])) for row in order]


def tell(story: Story, requests: Columns, *, named: int = 3) -> list[str]:
    """A story in a few sentences; of those it names the `named` that mattered most."""
    row = story.request
    slo_s, ttft_s = float(requests["ttft_slo_s"][row]), float(requests["ttft_s"][row])
    slo = f"SLO {slo_s:g} s" if np.isfinite(slo_s) else "no SLO"
    lines = [f"Arrived at {requests['arrival_s'][row]:.3f} s with {requests['prompt_tokens'][row]} tokens, {slo}."]
    for state, verb in (("waiting", "Waited"), ("suspended", "Was suspended")):
        if seconds := story.seconds(state):
            behind = _named(story.behind(state), requests, named)
            lines.append(f"{verb} {_span(seconds)} in all" + (f", while the GPU served {behind}." if behind else "."))
    if by := _named(story.paused_by(), requests, named):
        lines.append(f"Paused for {by}.")
    runs = sum(spell.state == "running" for spell in story.spells)
    if runs:
        lines.append(f"Ran {_span(story.seconds('running'))} in {runs} segment{'s' * (runs > 1)}.")
    if not np.isnan(ttft_s):
        times = f", {ttft_s / slo_s:.3g} times its SLO" if np.isfinite(slo_s) else ""
        isolated_s = float(requests["isolated_s"][row])
        hopeless = ", more than its SLO" if isolated_s > slo_s else ""
        alone = f"; alone on an idle instance it takes {_span(isolated_s)}{hopeless}"
        lines.append(f"First token after {_span(ttft_s)}{times}{alone}.")
    else:
        reason = requests["reason"][row]
        lines.append(f"No first token: {requests['outcome'][row]}{f' ({reason})' if reason else ''}.")
    return lines


def _named(found: tuple[Behind, ...], requests: Columns, most: int) -> str:
    """`#7 (file, 12000 tokens) for 1.2 s, ... and 40 others for 3.1 s`; empty where there is nobody."""
    parts = []
    for one in found[:most]:
        if one.request is None:
            parts.append(f"decodes for {_span(one.seconds)}")
            continue
        more = f" and {one.members - 1} with it" if one.members > 1 else ""
        about = f"{requests['slo_class'][one.request]}, {requests['prompt_tokens'][one.request]} tokens"
        parts.append(f"#{one.request} ({about}){more} for {_span(one.seconds)}")
    if rest := found[most:]:
        others = f"{len(rest)} others" if len(rest) > 1 else "one other"
        parts.append(f"{others} for {_span(sum(one.seconds for one in rest))}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _span(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def _ordered(table: Columns, *keys: Array) -> Columns:
    """A table's rows sorted by the last key, then the one before it."""
    order = np.lexsort(keys)
    return {name: column[order] for name, column in table.items()}


def _longest_first(found: Any) -> tuple[Behind, ...]:
    """Each request once, with its seconds added up."""
    seconds: dict[int | None, float] = {}
    members: dict[int | None, int] = {}
    for one in found:
        seconds[one.request] = seconds.get(one.request, 0.0) + one.seconds
        members[one.request] = max(members.get(one.request, 1), one.members)
    ranked = sorted(seconds, key=lambda request: (-seconds[request], -1 if request is None else request))
    return tuple(Behind(request, seconds[request], members[request]) for request in ranked)
