"""Stops as dense as pay, batch by batch: a rule around any policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from flowsim.core import Batch, Job
from flowsim.names import unknown
from flowsim.policy import Policy, Polling, View, check_is_policy, slack_edf
from flowsim.timeline import INSTANT_S, Stops

__all__ = ["AdaptiveStops", "expected_flags"]

LOOKAHEAD = 64
"""How many that wait are looked at, so that a decision in a long queue stays cheap."""


class AdaptiveStops:
    """The batches of another policy, each with the stops that are expected to delay requests least.

    Checks delay the batch's members, and all who wait or are suspended and can still be on time, each by the seconds
    that all checks of the batch take. Sparse stops delay whoever comes while it runs and goes first, each by the mean
    wait from a flag to the stop. The stops with the least of both, in seconds summed over requests, are the batch's;
    among equals those with the cheapest checks, then those with the shortest wait. So a long prompt gets dense stops
    where urgent requests keep coming, sparser ones the more is waiting behind it, and a short one that nothing will be
    due before gets none.

    They are chosen when a batch starts, of the policy's own, which predictions assume, and those that are denser.
    Batches that decode, or go through some of the layers only, keep their policy's.

    Args:
        within: the policy; its `stops` are the sparsest.
        densest: the densest stops that a batch may get; `Stops` or its name.

    Raises:
        ValueError: `within` is no policy, an unknown name, or `densest` is sparser than the policy's stops.
    """

    def __init__(self, within: Policy, densest: Stops | str = "operator") -> None:
        check_is_policy(within)
        names = [stops.value for stops in Stops]
        if not isinstance(densest, Stops) and densest not in names:
            raise ValueError(unknown("policy.densest", densest, names))
        first, last = (names.index(Stops(stops).value) for stops in (within.stops, densest))
        if last < first:
            raise ValueError(f"policy.densest is {names[last]}, sparser than the policy's own stops, {names[first]}")
        self.within = within
        self.densest = Stops(densest)
        self.stops = within.stops
        self.choices = list(Stops)[first : last + 1]
        self.consult: str | Polling = getattr(within, "consult", "events")
        self.idles = bool(getattr(within, "idles", False))
        self.admit: Callable[[View, Job], bool] | None = getattr(within, "admit", None)

    def select(self, view: View) -> Batch | None:
        batch = self.within.select(view)
        if batch is not None and view.running is None and _chooses(batch):
            batch.stops = self._worth(batch, view)
        return batch

    def _worth(self, batch: Batch, view: View) -> Stops:
        """The stops with the least expected delay of all requests."""
        held, flags = _held_up(batch, view), expected_flags(batch, view)

        def delay_s(stops: Stops) -> tuple[float, float, float]:
            checks_s, wait_s = view.pauses(batch.parts, stops)
            return checks_s * held + wait_s * flags, checks_s, wait_s

        return min(self.choices, key=delay_s)

    def __repr__(self) -> str:
        return f"AdaptiveStops({self.within!r}, up to {self.densest.value})"


def _chooses(batch: Batch) -> bool:
    """Whether it is a new batch that may have stops of its own."""
    return batch.number < 0 and not batch.decodes and batch.layers is None


def _held_up(batch: Batch, view: View) -> int:
    """How many requests wait for the checks of a batch: its own, and others for whom being later may be being late."""
    now_s, members = view.now_s, {job.id for job, _ in batch.parts}
    count = len(members)
    for job in islice(view.waiting.by(slack_edf), LOOKAHEAD):
        if now_s + view.left_s(job) >= job.deadline_s:
            break  # and so are all behind it
        count += job.id not in members
    for paused in view.suspended:
        left_s = view.left_s(paused)
        count += sum(now_s + left_s < job.deadline_s for job, _ in paused.parts)
    return count


def expected_flags(batch: Batch, view: View) -> float:
    """How many requests are expected to come while a batch runs and to go before it.

    Those that came lately come again, at the same rate and with the same SLOs, at any moment of its run: each goes
    before it if it is then due before it, or if the batch cannot be on time. One more than was seen always does
    (Laplace's rule of succession), as what has not been seen for a while may still come.
    """
    now_s, arrived = view.now_s, view.arrived
    run_s = view.cost_s(batch.parts) - view.request_s
    seen_s = max(now_s - arrived[0].arrival_s if arrived else 0.0, run_s, INSTANT_S)
    until_s = batch.deadline_s - now_s
    if run_s >= until_s:
        return (len(arrived) + 1) * run_s / seen_s
    going_first_s = run_s
    for job in arrived:
        early_s = until_s - job.slo_s  # of a run so long, the arrivals are due before the batch
        if early_s > 0.0:
            going_first_s += early_s if early_s < run_s else run_s
    return going_first_s / seen_s
