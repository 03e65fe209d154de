"""A run as Chrome trace events, one JSON object a string; times are whole microseconds.

Names differ by class only when their numbers are left out, so that Perfetto colours by class; `cname` does it in
chrome://tracing. Queue and suspension overlap, and are async slices; all else are slices on a thread of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns
from flowsim.report.series import Intervals, counted, heads, members, suspended, waiting

__all__ = ["Scene"]

Array = npt.NDArray[Any]
GPU, FLAGS, ARRIVALS, FIRST_TOKENS = 1, 2, 3, 4
TRACKS = {
    GPU: "GPU",
    FLAGS: "preemption: signal to acknowledgement",
    ARRIVALS: "arrivals",
    FIRST_TOKENS: "first tokens",
}
CNAMES = ("rail_response", "rail_idle", "rail_load", "rail_animation", "thread_state_iowait", "generic_work")
DECODE_CNAME = "grey"
MARK_US = 100  # an arrival or a first token is a slice so long, or up to the next one


@dataclass(frozen=True)
class Scene:
    """The part of a run from `from_s` to `to_s`: segments that overlap it whole, stays in the queue cut to it."""

    tables: Mapping[str, Columns]
    run: Mapping[str, Any]
    from_s: float
    to_s: float

    def events(self) -> Iterator[str]:
        """Every event, metadata first."""
        flows = _Flows(self._flow_points())
        return chain(
            self._tracks(),
            self._marks(ARRIVALS, self.requests["arrival_s"], flows),
            self._gpu(flows),
            self._marks(FIRST_TOKENS, self.requests["first_token_s"], flows),
            self._flags(),
            self._async("queued", waiting(self.tables)),
            self._async("suspended", suspended(self.tables)),
            self._async("transfer", self._transfers()),
            *(self._counters(instance) for instance in range(self.run["instances"])),
        )

    @cached_property
    def requests(self) -> Columns:
        """The run's requests, with instances as numbers (-1 for none)."""
        where = [-1 if one is None else one for one in self.tables["requests"]["prefill_instance"].tolist()]
        return {**self.tables["requests"], "instance": np.array(where, dtype=np.int64)}

    @cached_property
    def segments(self) -> Columns:
        """The segments that overlap the window, in order of time."""
        table = self.tables["segments"]
        rows = np.flatnonzero((table["end_s"] >= self.from_s) & (table["start_s"] <= self.to_s))
        rows = rows[np.argsort(table["start_s"][rows], kind="stable")]
        return {name: column[rows] for name, column in table.items()}

    @cached_property
    def members(self) -> tuple[Array, Array]:
        """Where each batch's members begin in the second array, which has the requests of all batches."""
        parts = self.tables["batches"]
        order = np.lexsort((parts["position"], parts["batch"]))
        first = np.append(0, np.cumsum(members(self.tables)))
        return first, parts["request"][order]

    @cached_property
    def labels(self) -> list[str]:
        """`text 812` for each request, fit for a JSON string."""
        classes = [json.dumps(name)[1:-1] for name in self.requests["slo_class"].tolist()]
        return [f"{name} {row}" for row, name in enumerate(classes)]

    @cached_property
    def cnames(self) -> list[str]:
        """A colour of chrome://tracing for each request, by its class."""
        classes = self.requests["slo_class"].tolist()
        places = {name: place for place, name in enumerate(sorted(set(classes)))}
        return [CNAMES[places[name] % len(CNAMES)] for name in classes]

    def _members_of(self, batch: int) -> list[int]:
        first, found = self.members
        numbers: list[int] = found[first[batch] : first[batch + 1]].tolist()
        return numbers

    def _shown(self, times_s: Array) -> Array:
        """The rows whose time is inside the window."""
        return np.flatnonzero((times_s >= self.from_s) & (times_s <= self.to_s))

    def _tracks(self) -> Iterator[str]:
        for instance in range(self.run["instances"]):
            name = json.dumps(f"instance {instance} ({self._hardware(instance)})")
            begin = f'"ph":"M","ts":{_us(self.from_s)}'
            yield f'{{{begin},{_where(instance, GPU)},"name":"process_name","args":{{"name":{name}}}}}'
            for thread, track in TRACKS.items():
                where = _where(instance, thread)
                yield f'{{{begin},{where},"name":"thread_name","args":{{"name":"{track}"}}}}'
                yield f'{{{begin},{where},"name":"thread_sort_index","args":{{"sort_index":{thread}}}}}'

    def _hardware(self, instance: int) -> str:
        """The GPUs of an instance, and its pool where there are several."""
        pools = self.run.get("pools", {})
        for name, pool in pools.items():
            first, last = pool["instances"]
            if first <= instance <= last:
                return f"{name + ', ' if len(pools) > 1 else ''}{pool['gpu']} x {pool['tp']}"
        return f"{self.run['gpu']} x {self.run['tp']}"

    def _gpu(self, flows: _Flows) -> Iterator[str]:
        """Segments, each with the switch before and the barrier behind it."""
        table, head_of = self.segments, heads(self.tables)
        columns = ("instance", "batch", "start_s", "end_s", "switch_s", "barrier_s")
        for place, row in enumerate(zip(*(table[name].tolist() for name in columns), strict=True)):
            instance, batch, start_s, end_s, switch_s, barrier_s = row
            where, head, found = _where(instance, GPU), int(head_of[batch]), self._members_of(batch)
            if switch_s and start_s >= self.from_s:
                yield _slice("switch", where, start_s - switch_s, start_s)
            if head < 0:  # sequences that decode, and no prompt
                about = f'"cname":"{DECODE_CNAME}","args":{{"batch":{batch}}}'
                yield _slice(f"decode {self._decodes.get(batch, '')}", where, start_s, end_s, about)
            else:
                name = f"{self.labels[head]} operators {table['first_op'][place]}-{table['last_op'][place]}"
                about = f'"cname":"{self.cnames[head]}","args":{{{self._batch(place, batch, head, found)}}}'
                yield _slice(name, where, start_s, end_s, about)
            for request in found:
                if not self._has_token(request, start_s):
                    yield from flows.through(request, where, start_s)
            if barrier_s:
                yield _slice("barrier", where, end_s, end_s + barrier_s)

    def _batch(self, place: int, batch: int, head: int, found: list[int]) -> str:
        """What is told of a segment's batch."""
        table, requests = self.segments, self.requests
        told = f'"batch":{batch},"requests":{json.dumps(found)},"tokens":{table["tokens"][place]}'
        if batch in self._decodes:
            told += f',"decodes":{self._decodes[batch]}'
        if batch in self._layers:
            told += f',"layers":"{self._layers[batch]}"'
        if batch in self._stops:
            told += f',"stops":"{self._stops[batch]}"'
        slo_s = requests["ttft_slo_s"][head]
        if np.isfinite(slo_s):
            deadline_s = requests["arrival_s"][head] + slo_s
            slack_s = deadline_s - table["start_s"][place] - self._left_s[place]
            told += f',"deadline [s]":{deadline_s:.6f},"slack [s]":{slack_s:.6f}'
        return f'{told},"ended":"{table["ended"][place]}"'

    @cached_property
    def _decodes(self) -> dict[int, int]:
        """How many sequences decode in each batch in which any does."""
        steps = self.tables.get("steps", {"batch": np.zeros(0), "decodes": np.zeros(0)})
        decodes = zip(steps["batch"].tolist(), steps["decodes"].tolist(), strict=True)
        return {int(batch): int(count) for batch, count in decodes if count}

    @cached_property
    def _layers(self) -> dict[int, str]:
        """Of batches whose prompts go through some layers only, which: "12-17" of layers numbered from 0."""
        if "layers" not in self.tables:
            return {}
        columns = (self.tables["layers"][name].tolist() for name in ("batch", "first_layer", "last_layer"))
        return {batch: f"{first}-{last - 1}" for batch, first, last in zip(*columns, strict=True)}

    @cached_property
    def _stops(self) -> dict[int, str]:
        """Of batches with stops of their own, these."""
        stops = self.tables.get("stops", {"batch": np.zeros(0), "stops": np.zeros(0)})
        return dict(zip(stops["batch"].tolist(), stops["stops"].tolist(), strict=True))

    def _has_token(self, request: int, at_s: float) -> bool:
        """Whether a request has had its first token by a time: what it computes then, it computes again."""
        return bool(at_s >= self.requests["first_token_s"][request])

    @cached_property
    def _left_s(self) -> Array:
        """From the start of each segment shown: the batch's own seconds until its first tokens, as they came to be."""
        table = self.tables["segments"]
        own_s = table["end_s"] - table["start_s"]
        order = np.lexsort((table["start_s"], table["batch"]))
        until_s = np.cumsum(own_s[order][::-1])[::-1]
        batches = table["batch"][order]
        after_s = np.append(until_s, 0.0)[np.searchsorted(batches, batches, side="right")]
        left_s = np.empty(len(own_s))
        left_s[order] = until_s - after_s
        shown = (table["end_s"] >= self.from_s) & (table["start_s"] <= self.to_s)
        rows = np.flatnonzero(shown)
        rows = rows[np.argsort(table["start_s"][rows], kind="stable")]
        return left_s[rows] + float(self.run.get("request_s", 0.0))

    def _marks(self, thread: int, times_s: Array, flows: _Flows) -> Iterator[str]:
        """A short slice at each time of a request, on the track of its instance."""
        rows = self._shown(times_s)
        for instance in range(self.run["instances"]):
            mine = rows[self.requests["instance"][rows] == instance]
            mine = mine[np.argsort(times_s[mine], kind="stable")]
            at_us = np.rint(times_s[mine] * 1e6).astype(np.int64)
            distinct = np.unique(at_us)
            until_us = np.minimum(distinct + MARK_US, np.append(distinct[1:], np.iinfo(np.int64).max))
            length_us = (until_us - distinct)[np.searchsorted(distinct, at_us)]
            where = _where(instance, thread)
            for request, at, length in zip(mine.tolist(), at_us.tolist(), length_us.tolist(), strict=True):
                about = f'"args":{{{self._about(request)}}}'
                name, colour = self.labels[request], self.cnames[request]
                yield f'{{"ph":"X","name":"{name}",{where},"ts":{at},"dur":{length},"cname":"{colour}",{about}}}'
                yield from flows.through(request, where, at / 1e6)

    def _about(self, request: int) -> str:
        requests = self.requests
        told = f'"prompt [tokens]":{requests["prompt_tokens"][request]},"outcome":"{requests["outcome"][request]}"'
        for name, column in (("TTFT SLO [s]", "ttft_slo_s"), ("TTFT [s]", "ttft_s")):
            if np.isfinite(requests[column][request]):
                told += f',"{name}":{requests[column][request]:.6f}'
        return told

    def _flags(self) -> Iterator[str]:
        """From the signal to stop to its acknowledgement."""
        table = self.tables["preemptions"]
        rows = np.flatnonzero((table["stopped_s"] >= self.from_s) & (table["flagged_s"] <= self.to_s))
        columns = ("instance", "flagged_s", "stopped_s", "batch", "victim", "by", "paused")
        for row in zip(*(table[name][rows].tolist() for name in columns), strict=True):
            instance, flagged_s, stopped_s, batch, victim, by, paused = row
            name = f"stop {self.labels[victim]} for {self.labels[by]}"
            about = f'"batch":{batch},"victim":{victim},"by":{by},"paused":{json.dumps(bool(paused))}'
            where = _where(instance, FLAGS)
            yield _slice(name, where, flagged_s, stopped_s, f'"cname":"{self.cnames[by]}","args":{{{about}}}')

    def _async(self, state: str, intervals: Intervals) -> Iterator[str]:
        """Slices that may overlap, on a track for each class and instance."""
        rows = np.flatnonzero((intervals.end_s >= self.from_s) & (intervals.start_s <= self.to_s))
        classes = [json.dumps(name)[1:-1] for name in self.requests["slo_class"].tolist()]
        for number, row in enumerate(zip(*(column[rows].tolist() for column in intervals), strict=True)):
            start_s, end_s, request, instance = row
            name = f'"cat":"{state}","name":"{state}: {classes[request]}","id2":{{"local":"{number}"}}'
            where, about = _where(instance, GPU), f'"args":{{"request":{request},{self._about(request)}}}'
            yield f'{{"ph":"b",{name},{where},"ts":{_us(max(start_s, self.from_s))},{about}}}'
            yield f'{{"ph":"e",{name},{where},"ts":{_us(min(end_s, self.to_s))}}}'

    def _transfers(self) -> Intervals:
        """When each request's KV was on its way to a decode instance, at the instance that it came from."""
        requests = self.requests
        start_s, end_s = (requests.get(name, np.zeros(0)) for name in ("transfer_start_s", "transfer_end_s"))
        rows = np.flatnonzero(~np.isnan(end_s))
        return Intervals(start_s[rows], end_s[rows], rows, requests["instance"][rows])

    def _counters(self, instance: int) -> Iterator[str]:
        queue = counted(waiting(self.tables).at(instance))
        yield from self._counter(instance, "queue length", queue.t_s, {"requests": queue.values})
        kv = self.tables["kv"]
        rows = kv["instance"] == instance
        free, parked = kv["free_blocks"][rows], kv["suspended_blocks"][rows]
        blocks = {"running": self.run["kv_blocks"][instance] - free - parked, "suspended": parked}
        yield from self._counter(instance, "KV blocks", kv["t_s"][rows], blocks)
        head = heads(self.tables)[self.segments["batch"]]
        rows = (self.segments["instance"] == instance) & (head >= 0)
        start_s, head = self.segments["start_s"][rows], head[rows]
        deadline_s = self.requests["arrival_s"][head] + self.requests["ttft_slo_s"][head]
        slack_s = deadline_s - start_s - self._left_s[rows]
        due = np.isfinite(slack_s)
        yield from self._counter(instance, "slack of the running head [s]", start_s[due], {"seconds": slack_s[due]})
        yield from self._decisions(instance)

    def _decisions(self, instance: int) -> Iterator[str]:
        """What decisions led to, counted up: batches started, batches resumed, flags raised."""
        segments, flags = self.tables["segments"], self.tables["preemptions"]
        mine = segments["instance"] == instance
        resumed = segments["first_op"] > 0
        times_s = {
            "started": segments["start_s"][mine & ~resumed],
            "resumed": segments["start_s"][mine & resumed],
            "flagged": flags["flagged_s"][flags["instance"] == instance],
        }
        at_s = np.unique(np.concatenate(list(times_s.values())))
        counts = {name: np.searchsorted(np.sort(found), at_s, side="right") for name, found in times_s.items()}
        yield from self._counter(instance, "decisions", at_s, counts)

    def _counter(self, instance: int, name: str, t_s: Array, series: Mapping[str, Array]) -> Iterator[str]:
        """The values inside the window, and the one that it begins with; of several at one time, the last."""
        rows = self._shown(t_s)
        before = int(np.searchsorted(t_s, self.from_s)) - 1
        if before >= 0:
            rows = np.append(before, rows)
        at_us = np.rint(np.maximum(t_s[rows], self.from_s) * 1e6).astype(np.int64)
        rows, at_us = (kept[np.append(at_us[1:] != at_us[:-1], True)] if len(rows) else kept for kept in (rows, at_us))
        columns = [np.round(values[rows], 6).tolist() for values in series.values()]
        for at, *values in zip(at_us.tolist(), *columns, strict=True):
            args = ",".join(f'"{key}":{value}' for key, value in zip(series, values, strict=True))
            yield f'{{"ph":"C","name":"{name}",{_where(instance, GPU)},"ts":{at},"args":{{{args}}}}}'

    def _flow_points(self) -> Array:
        """How many places each request's flow has: its arrival, its segments, its first token."""
        count = np.zeros(len(self.requests["id"]), dtype=np.int64)
        for column in ("arrival_s", "first_token_s"):
            rows = self._shown(self.requests[column])
            count[rows[self.requests["instance"][rows] >= 0]] += 1
        for batch, start_s in zip(self.segments["batch"].tolist(), self.segments["start_s"].tolist(), strict=True):
            found = self._members_of(batch)
            count[[request for request in found if not self._has_token(request, start_s)]] += 1
        return count


class _Flows:
    """Flow events, which draw a request's way from its arrival over its segments to its first token."""

    def __init__(self, points: Array) -> None:
        self._points = points.tolist()
        self._seen = [0] * len(self._points)

    def through(self, request: int, where: str, at_s: float) -> Iterator[str]:
        """The event at the next of the request's places, bound to the slice just written."""
        self._seen[request] = seen = self._seen[request] + 1
        points = self._points[request]
        if points < 2:
            return
        phase = "s" if seen == 1 else "f" if seen == points else "t"
        bound = ',"bp":"e"' if phase == "f" else ""
        yield f'{{"ph":"{phase}","cat":"request","name":"request","id":{request},{where},"ts":{_us(at_s)}{bound}}}'


def _slice(name: str, where: str, start_s: float, end_s: float, more: str = "") -> str:
    start_us = _us(start_s)
    rest = f",{more}" if more else ""
    return f'{{"ph":"X","name":"{name}",{where},"ts":{start_us},"dur":{_us(end_s) - start_us}{rest}}}'


def _where(instance: int, thread: int) -> str:
    """The process of an instance and one of its threads; no two have a number in common."""
    return f'"pid":{10 * instance + 10},"tid":{10 * instance + 10 + thread}'


def _us(at_s: float) -> int:
    return round(at_s * 1e6)
