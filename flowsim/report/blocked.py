"""The worst head-of-line blocking of a run, found in its tables; it draws nothing and knows no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.report.series import busy, came_s, heads

__all__ = ["Blocked", "worst_blocked"]

Array = npt.NDArray[Any]
MOST = 5000  # requests looked at, the most promising first


@dataclass(frozen=True, slots=True)
class Blocked:
    """A request that waited for work less urgent than itself.

    `behind` is the request at the head of the batches that it waited for longest, from `from_s` to `to_s`; `behind_s`
    are the seconds behind all such batches together, `waited_s` all that it waited before it started.
    """

    request: int
    behind: int
    instance: int
    from_s: float
    to_s: float
    behind_s: float
    waited_s: float


def worst_blocked(result: Result) -> Blocked | None:
    """The request that waited longest, in multiples of its TTFT SLO, while its GPU served later deadlines.

    A request's deadline is its arrival plus its SLO, a batch's the earliest of its members; where the run has no SLOs,
    the TTFT on an idle instance stands for them, so that long prompts count as less urgent. Requests whose SLO no
    schedule could have met are left out. None where no request had to wait for a later deadline.
    """
    tables = result.tables
    requests, parts = tables["requests"], tables["batches"]
    allowed_s = _allowed_s(requests)
    due_s = requests["arrival_s"] + allowed_s
    batch_due_s = np.full(len(heads(tables)), np.inf)
    np.minimum.at(batch_due_s, parts["batch"], due_s[parts["request"]])
    batch_due_s[heads(tables) < 0] = -np.inf  # decodes alone are not less urgent than a prefill
    served = _Served(result, batch_due_s)
    possible = requests["measured"] & (requests["isolated_s"] <= allowed_s)
    most = np.where(possible, requests["queued_s"], np.nan) / allowed_s
    order = np.argsort(-np.nan_to_num(most, nan=-1.0), kind="stable")[:MOST]
    found, worst = None, 0.0
    for row in order.tolist():
        if not most[row] > worst:  # nor can any that follows
            break
        one = served.behind(row, float(due_s[row]))
        if one is not None and one.behind_s / allowed_s[row] > worst:
            found, worst = one, one.behind_s / float(allowed_s[row])
    return found


def _allowed_s(requests: Columns) -> Array:
    """The TTFT SLO of each request, or what stands for one."""
    slo_s = requests["ttft_slo_s"]
    allowed_s: Array = slo_s if np.isfinite(slo_s).any() else requests["isolated_s"]
    return allowed_s


class _Served:
    """What each instance's GPU served, by instance and time."""

    def __init__(self, result: Result, batch_due_s: Array) -> None:
        self._requests = result.tables["requests"]
        stretches = busy(result.tables)
        order = np.lexsort((stretches.start_s, stretches.instance))
        self._start_s, self._end_s = stretches.start_s[order], stretches.end_s[order]
        self._instance = stretches.instance[order]
        self._batch = result.tables["segments"]["batch"][order]
        self._due_s = batch_due_s
        self._heads = heads(result.tables)
        self._came_s = came_s(result.tables)

    def behind(self, row: int, due_s: float) -> Blocked | None:
        """How a request waited behind later deadlines; None where it did not."""
        requests = self._requests
        since_s, until_s = float(self._came_s[row]), float(requests["start_s"][row])
        instance = int(requests["prefill_instance"][row])
        low, high = np.searchsorted(self._instance, [instance, instance + 1])
        first = low + int(np.searchsorted(self._end_s[low:high], since_s, side="right"))
        last = low + int(np.searchsorted(self._start_s[low:high], until_s, side="left"))
        start_s = np.maximum(self._start_s[first:last], since_s)
        end_s = np.minimum(self._end_s[first:last], until_s)
        batches = self._batch[first:last]
        later = (self._due_s[batches] > due_s) & (end_s > start_s)
        if not later.any():
            return None
        start_s, end_s, batches = start_s[later], end_s[later], batches[later]
        kinds, place = np.unique(self._heads[batches], return_inverse=True)
        longest = int(np.bincount(place, weights=end_s - start_s).argmax())
        mine = place == longest
        return Blocked(
            request=row,
            behind=int(kinds[longest]),
            instance=instance,
            from_s=float(start_s[mine].min()),
            to_s=float(end_s[mine].max()),
            behind_s=float((end_s - start_s).sum()),
            waited_s=until_s - since_s,
        )
